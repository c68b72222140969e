"""The processes of an island's ranks: started together, ended together, and started again after a loss."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from p2p_diloco.app.cli import ranks
from p2p_diloco.app.cli.ranks import RankGroup
from p2p_diloco.errors import RANK_LOST_CODE

SAY = "import os, sys, pathlib, time; rank = os.environ['RANK']; folder = pathlib.Path(sys.argv[1])\n"
"""Begin of each program: notes of each start are files in the folder."""


def group(folder: Path, program: str, count: int = 2) -> RankGroup:
    return RankGroup([sys.executable, "-c", SAY + program, str(folder)], count, dict(os.environ))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(ranks, "END_SECONDS", 1.0)


def test_all_ranks_are_started_again_after_one_is_lost(tmp_path: Path) -> None:
    program = f"""
starts = len(list(folder.glob(rank + "-*")))
(folder / f"{{rank}}-{{starts}}").write_text(os.environ["MASTER_PORT"] + " " + os.environ["WORLD_SIZE"])
if rank == "1":
    time.sleep(60)
sys.exit([{RANK_LOST_CODE}, 5][starts])
"""
    assert group(tmp_path, program).run() == 5
    notes = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert sorted(notes) == ["0-0", "0-1", "1-0", "1-1"]
    assert notes["0-0"] == notes["1-0"], "the ranks of one start meet at one port"
    assert all(count == "2" for _, count in notes.values())


def test_a_rank_with_an_error_of_its_own_ends_the_island(tmp_path: Path) -> None:
    program = f"""
(folder / f"{{rank}} {{os.getpid()}}").touch()
sys.exit({{"0": {RANK_LOST_CODE}, "1": 4}}[rank])
"""
    assert group(tmp_path, program).run() == 4
    assert len(list(tmp_path.iterdir())) == 2


def test_a_killed_rank_0_is_started_again(tmp_path: Path) -> None:
    program = """
if rank == "0" and not (folder / "killed").exists():
    (folder / "killed").touch()
    os.kill(os.getpid(), 9)
"""
    assert group(tmp_path, program).run() == 0
    assert (tmp_path / "killed").exists()


def test_a_rank_0_that_does_not_notice_a_lost_rank_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LEAVE_SECONDS", 0.5)
    program = """
if rank == "1":
    os.kill(os.getpid(), 9)
if not (folder / "hung").exists():
    (folder / "hung").touch()
    time.sleep(60)
"""
    began = time.monotonic()
    assert group(tmp_path, program).run() == 0
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_for_rank_0_alone(tmp_path: Path, number: signal.Signals) -> None:
    program = """
try:
    (folder / rank).touch()
    while not (folder / "over").exists():
        time.sleep(0.05)
except KeyboardInterrupt:
    (folder / f"interrupted {rank}").touch()
    (folder / "over").touch()
"""

    def interrupt() -> None:
        while not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert group(tmp_path, program).run() == 0
    thread.join()
    assert [path.name for path in tmp_path.glob("interrupted*")] == ["interrupted 0"]
    assert signal.getsignal(number) == before


def test_an_interrupted_island_is_not_started_again(tmp_path: Path) -> None:
    program = f"""
(folder / f"start {{rank}} {{os.getpid()}}").touch()
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit({RANK_LOST_CODE})
"""

    def interrupt() -> None:
        while len(list(tmp_path.glob("start*"))) < 2:
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert group(tmp_path, program).run() == RANK_LOST_CODE
    thread.join()
    assert len(list(tmp_path.glob("start*"))) == 2


def test_no_rank_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    """Ranks notice the end of their standard input, as `--with-parent` makes them."""
    rank = SAY + "(folder / rank).write_text(str(os.getpid())); sys.stdin.read()"
    starter = (
        "import os, sys; from p2p_diloco.app.cli.ranks import RankGroup\n"
        f"RankGroup([sys.executable, '-c', {rank!r}, {str(tmp_path)!r}], 2, dict(os.environ)).run()"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], cwd=Path(__file__).parents[2])
    while len(list(tmp_path.glob("?"))) < 2 or not all(path.read_text() for path in tmp_path.glob("?")):
        time.sleep(0.05)
    ranks = [int(path.read_text()) for path in tmp_path.glob("?")]
    process.kill()
    process.wait()
    until = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
