"""Fixtures that keep the environment of the shell away from the commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2p_diloco.app.cli.new import make_run
from p2p_diloco.app.cli.options import CommandContext, NewRunOptions
from p2p_diloco.app.training import step_benchmark
from p2p_diloco.app.training.step_benchmark import MeasuredStep


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("P2P_DILOCO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("P2P_DILOCO_STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _measured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner steps take 45 ms; `tests/training/test_step_benchmark.py` measures real ones."""
    step = MeasuredStep(seconds=0.045, is_estimated=False, is_disturbed=False)
    monkeypatch.setattr(step_benchmark, "measure_inner_step", lambda manifest, **_: step)


@pytest.fixture
def run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a run and its key, as `new` writes them."""
    path = tmp_path / "run.toml"
    make_run(path, NewRunOptions(name="night", step_seconds=0.045), CommandContext())
    capsys.readouterr()
    return path
