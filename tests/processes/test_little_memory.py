"""A machine with too little memory is refused in one sentence, before it downloads anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_diloco.errors import ConfigError
from tests.processes.machines import Machines

pytestmark = [pytest.mark.wall_clock, pytest.mark.slow]

PROGRAM = str(Path(__file__).with_name("little_memory_peer.py"))
MODEL = ["--model.size", "small", "--model.layers", "32"]
"""40 million parameters: 318 MB to download, and 840 MB with Muon."""
ROOM = 600_000_000


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    yield machines
    machines.close()


def test_a_machine_with_too_little_memory_downloads_nothing(machines: Machines) -> None:
    machines.run("new", *MODEL, "--step-seconds", "1")
    machines.start("boot", "bootstrap", "run.toml")
    invite = machines.invite("boot")
    machines.start("ann", "join", invite, "--device", "cpu", program=(PROGRAM, str(ROOM)))
    ann = machines.peers.pop("ann")
    code, text = ann.wait(120), machines.log("ann").read_text()
    assert code == ConfigError.exit_code, text
    assert "needs at least 8" in text, text
    assert 'ask the organiser for a run with model.size "small"' in text.replace("\n", " "), text
    assert not machines.state("ann").exists(), text
    assert machines.status("boot").bytes_sent.transfer == 0
