"""On a file system that is really full, the older checkpoint is kept, votes can be saved, and entries are served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fill_the_disk.py")
PROJECT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare, to mount a small file system of its own")
def test_a_full_file_system_loses_nothing_agreed(tmp_path: Path) -> None:
    command = ["unshare", "--mount", sys.executable, str(SCRIPT), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip("this machine lets nobody mount a file system of its own")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    if "not_permitted" in told:
        pytest.skip(f"this machine lets nobody mount a file system of its own: {told['not_permitted']}")
    assert "cannot write the checkpoint" in told["refused"]
    assert "the previous one is kept" in told["refused"]
    assert told["drafts"] == [], "half a checkpoint is left"
    assert told["recalled"], "the older checkpoint is gone"
    assert told["ballots"], "a vote found no room although entries could be deleted"
    assert any(told["served"]), "nothing is served any more"
    assert any("full" in text or "No space" in text for text in told["heard"]), told["heard"]
