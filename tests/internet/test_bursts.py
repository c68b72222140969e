"""Bursts of raw TCP on the lines of a scene: the baseline of what vectors can take."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from internet.places import PROJECT

pytestmark = [pytest.mark.wall_clock, pytest.mark.timeout(120)]


def test_each_home_tells_how_long_its_bursts_took() -> None:
    command = [sys.executable, "-m", "internet.bursts", "near", "--bursts", "3", "--every", "2"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=100.0, check=False)
    if "NoInternetError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    took = {way: seconds.split() for way, seconds in re.findall(r"  (home-\d to [\w-]+): (.*)", done.stdout)}
    assert {len(seconds) for seconds in took.values()} == {3}, done.stdout + done.stderr
    assert len(took) == 7, "of four homes, to the bootstrap peer and to the first home"
    assert all(float(seconds) < 2.0 for each in took.values() for seconds in each[1:]), "0.56 MB at 100 Mbit/s"
