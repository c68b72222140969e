"""The chaos benchmark plays real processes to the end, and its figures agree with what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]


def test_two_islands_of_which_one_is_killed_keep_equal_bytes_and_the_loss_is_told(tmp_path: Path) -> None:
    target = tmp_path / "chaos.json"
    words = ["--islands", "2", "--minutes", "1", "--every", "40s", "--faults", "kill", "--json", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "chaos", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(target.read_text())
    assert figures["faults"] == 1
    assert figures["heads_equal"], figures
    assert figures["quiet_heads_equal"], figures
    assert figures["quiet_participation"] > 0.9
    assert 0.6 < figures["living_share"] < 0.99, "5 s of two times 60 s, and more until the process is found dead"
    assert 0.4 < figures["throughput_kept_total"] < 0.99
    assert figures["throughput_kept"] > figures["throughput_kept_total"]
    assert figures["surprises"] == []
    assert "is killed (kill -9)" in done.stderr
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info)]
