"""A run in virtual time whose peers keep traces and change their batch: one joins late, dies, and returns."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from session_stage import SessionStage, Watcher, run_stage
from small_run import ORGANISER, EveryThird, peer_key

from p2p_diloco.app.training import built_in
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.storage.run_folder import MANIFEST_FILE, RunFolder

LAST_ROUND = 16
TRAINERS = ("ada", "ben", "cleo")
SCHEDULE = {"inner.schedule": "cosine", "rounds.planned_cycles": 10, "rounds.planned_steps": 8}
"""A learning rate that follows the run's cycle, so a returning island must know the cycle."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Location of a recorded run."""

    folder: Path
    run: Digest

    @property
    def text(self) -> Path:
        return self.folder / "words.txt"

    def run_folder(self, name: str) -> RunFolder:
        return RunFolder(self.folder / name, self.run)

    def folders(self) -> dict[PeerId, Path]:
        return {peer_key(name).peer: self.folder / name for name in TRAINERS}


def record(folder: Path) -> Recorded:
    """Record the run once per process and return a copy; its folders hold what a replay needs."""
    if not _played:
        _played.append(_play(Path(tempfile.mkdtemp(prefix="recorded-"))))
    shutil.copytree(_played[0].folder, folder / "run")
    return Recorded(folder=folder / "run", run=_played[0].run)


def _play(folder: Path) -> Recorded:
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    stages: list[SessionStage] = []

    async def scene() -> None:
        stage = SessionStage(folder, **SCHEDULE)
        stages.append(stage)

        async def play(name: str, *, founds: bool = False, trains: bool = True) -> None:
            await stage.play(
                name, Watcher(), StopRequest(), founds=founds, trains=trains, until_round=LAST_ROUND, keep_trace=trains
            )

        async def come_go_and_come_again() -> None:
            await stage.sleep_to(4)
            first = asyncio.ensure_future(play("cleo"))
            await stage.sleep_to(9, 3.0)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            await stage.sleep_to(11)
            await play("cleo")

        await asyncio.gather(
            play("boot", founds=True, trains=False), play("ada"), play("ben"), come_go_and_come_again()
        )

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(built_in, "BatchChoice", EveryThird)
        run_stage(monkeypatch, scene)
    (stage,) = stages
    for name in TRAINERS:
        stage.run_folder(name).write(MANIFEST_FILE, stage.manifest.sign(ORGANISER).encode())
    return Recorded(folder=folder, run=stage.manifest.digest())


_played: list[Recorded] = []
