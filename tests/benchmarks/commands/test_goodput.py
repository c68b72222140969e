"""`python -m benchmarks goodput`: what it prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.command import main


def test_goodput_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.json"
    row = {"islands": 4, "lost_seconds": 40.0, "skipped_cycles": 0.25}
    costs.write_text(json.dumps({"pause_seconds": 18.0, "cycle_seconds": 24.0, "rows": [row]}), encoding="utf-8")
    assert main(["goodput", "--costs", str(costs), "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["command"] == "goodput"
    assert len(figures["rows"]) == 9 + 6 * 11 - 5
    assert main(["goodput", "--costs", str(costs)]) == 0
    assert "3 constants fitted to 5 published points" in capsys.readouterr().out
