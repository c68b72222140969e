"""A custom loop can be tried without a network, as the docs show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import p2p_diloco
from p2p_diloco.testing import local_swarm

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "own-loop.md"
PATIENCE_SECONDS = 120.0

NOTHING_IS_LEFT = """
import os, sys, tempfile, threading
assert not [name for name in sys.modules if name.split(".")[0] == "hivemind"], "hivemind was imported"
assert all(name.startswith("torchinductor") for name in os.listdir(tempfile.gettempdir())), "files are left"
assert threading.enumerate() == [threading.main_thread()]
"""


def test_the_example_of_the_docs_ends_with_equal_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    (example,) = [part.partition("```")[0] for part in PAGE.read_text().split("```python\n") if "local_swarm()" in part]
    done = subprocess.run(
        [sys.executable, "-c", example + NOTHING_IS_LEFT],
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(PAGE.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_joining_before_the_run_is_founded_is_refused_with_advice() -> None:
    with local_swarm() as local, pytest.raises(p2p_diloco.ConfigError, match="has no founder yet; call found first"):
        local.join(torch.nn.Linear(2, 1))


def test_values_of_the_run_are_those_of_a_run_file() -> None:
    with local_swarm(rounds={"round_secs": 1.0}) as local, pytest.raises(p2p_diloco.ConfigError, match="round_secs"):
        local.found(torch.nn.Linear(2, 1))
    with local_swarm(rounds={"fragments": 1}) as local:
        assert local.found(torch.nn.Linear(2, 1)).ready
