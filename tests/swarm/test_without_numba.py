"""A peer without numba trains with one that has it, and holds the same bytes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.swarm.process_swarm import PROJECT, ProcessSwarm

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(180)]


def test_a_peer_without_numba_holds_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ModuleNotFoundError(\"No module named 'numba'\", name='numba')\n")
    with ProcessSwarm() as swarm:
        swarm.start("ann", founds=True)
        swarm.start("bob", within=("env", f"PYTHONPATH={tmp_path}{os.pathsep}{PROJECT}"))
        swarm.wait_for_whole_round(["ann", "bob"], 2, time.time())
        digests = swarm.end_all_after(swarm.round_at(time.time()) + 2)
        assert set(digests) == {"ann", "bob"}
        assert len(set(digests.values())) == 1
        assert [event.text for event in swarm.peers["bob"].events("loops")] == [
            "numba's compiled loops are not available here (ModuleNotFoundError: No module named 'numba'); using NumPy "
            "instead, with the same bytes and about three times the processor time"
        ]
        assert not swarm.peers["ann"].events("loops")
        assert swarm.peers["bob"].status.inner_steps > 0
