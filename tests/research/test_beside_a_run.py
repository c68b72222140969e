"""A recorded run beside data-parallel training; `make replay` plays it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))
sys.path.insert(0, str(Path(__file__).parents[1] / "peer"))

from recorded_run import TRAINERS, record
from small_run import peer_key

from p2p_diloco.config.key_file import write_key_file
from p2p_diloco.config.settings import IDENTITY_FILE
from research.command import main


@pytest.mark.long
def test_a_run_is_made_again_and_one_machine_trains_on_as_many_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = record(tmp_path)
    for name in TRAINERS:
        write_key_file((stage.folder / name) / IDENTITY_FILE, peer_key(name))
    words = ["data-parallel", *(str(stage.folder / name) for name in TRAINERS), "--data", str(stage.text)]
    target = tmp_path / "figures.json"
    assert main([*words, "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(target.read_text())
    assert figures["gap"] == 0.0
    assert figures["data_parallel_loss"] < 5.6
    assert f"data-parallel, as many tokens: {figures['data_parallel_loss']:.4f}; the swarm" in printed
