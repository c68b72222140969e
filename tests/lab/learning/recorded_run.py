"""A run in virtual time whose peers keep diaries: one joins late, dies, and comes again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from session_stage import SessionStage, Watcher, run_stage
from small_run import ORGANISER, peer_key

from p2p_diloco.ids import PeerId
from p2p_diloco.trainer.peer_memory import MANIFEST_FILE
from p2p_diloco.trainer.stop import StopRequest

LAST_ROUND = 20
TRAINERS = ("ada", "ben", "cleo")


def record(folder: Path, monkeypatch: pytest.MonkeyPatch, values: Mapping[str, Any] | None = None) -> SessionStage:
    """Play it and return the stage, whose folders hold what a twin needs."""
    stages: list[SessionStage] = []

    async def scene() -> None:
        stage = SessionStage(folder, **(values or {}))
        stages.append(stage)

        async def play(name: str, *, founds: bool = False, trains: bool = True) -> None:
            await stage.play(
                name, Watcher(), StopRequest(), founds=founds, trains=trains, until_round=LAST_ROUND, keep_diary=trains
            )

        async def come_go_and_come_again() -> None:
            await stage.sleep_to(4)
            first = asyncio.ensure_future(play("cleo"))
            await stage.sleep_to(11, 3.0)
            first.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await first
            await stage.sleep_to(13)
            await play("cleo")

        await asyncio.gather(
            play("boot", founds=True, trains=False), play("ada"), play("ben"), come_go_and_come_again()
        )

    run_stage(monkeypatch, scene)
    (stage,) = stages
    for name in TRAINERS:
        stage.run_folder(name).write(MANIFEST_FILE, stage.manifest.sign(ORGANISER).encode())
    return stage


def folders_of(stage: SessionStage) -> dict[PeerId, Path]:
    return {peer_key(name).peer: stage.folder(name) for name in TRAINERS}
