"""Checkpoints are written soon after a peer is ready, at intervals, and after a span was replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from small_run import small_plan, start_states

from p2p_diloco.errors import StateError
from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.storage.archive import Archive, Saver, pause_between_checkpoints
from simulator.virtual_time import run_virtual

PLAN = small_plan()


@pytest.mark.parametrize(
    ("round_seconds", "keep", "expected"), [(1.0, 3, 10.0), (5.0, 3, 40.0), (5.0, 1, 80.0), (3600.0, 3, 300.0)]
)
def test_entries_on_disk_reach_back_to_every_checkpoint(round_seconds: float, keep: int, expected: float) -> None:
    rules = replace(PLAN.rules, clock=replace(PLAN.rules.clock, round_seconds=round_seconds), retained_cycles=16)
    assert rules.clock.num_fragments == 2
    assert pause_between_checkpoints(rules, keep) == expected


@pytest.mark.parametrize(("round_seconds", "expected"), [(1.0, 10.0), (5.0, 40.0), (100.0, 300.0), (3600.0, 7200.0)])
def test_two_checkpoints_of_an_archivist_are_a_cycle_apart(round_seconds: float, expected: float) -> None:
    rules = replace(PLAN.rules, clock=replace(PLAN.rules.clock, round_seconds=round_seconds), retained_cycles=16)
    assert pause_between_checkpoints(rules, 3, archives=True) == expected


class Scene:
    """A saver in virtual time."""

    def __init__(self, folder: Path) -> None:
        self.archive = Archive(folder, plan=PLAN, keep=9, soon=lambda write: write(), report=self.report)
        self.states: Mapping[SpanId, SpanState] | None = start_states(PLAN)
        self.ready = False
        self.heard: list[str] = []
        self.saver = Saver(
            self.archive,
            states=lambda: self.states,
            is_ready=lambda: self.ready,
            pause_seconds=60.0,
            report=self.report,
        )

    def report(self, _: str, text: str) -> None:
        self.heard.append(text)

    @property
    def num_saved(self) -> int:
        return len(self.archive.checkpoints.paths())


def test_the_first_checkpoint_is_written_when_ready_and_the_next_after_a_pause_or_a_replacement(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path)
        task = asyncio.ensure_future(stage.saver.run())
        await asyncio.sleep(30.0)
        assert stage.num_saved == 0
        stage.ready = True
        await asyncio.sleep(3.0)
        assert stage.num_saved == 1
        await asyncio.sleep(50.0)
        assert stage.num_saved == 1
        await asyncio.sleep(12.0)
        assert stage.num_saved == 2
        stage.archive.give_up(SpanId(0, 0))
        await asyncio.sleep(3.0)
        assert stage.num_saved == 3
        task.cancel()

    run_virtual(scene())


def test_incomplete_states_are_not_saved_and_a_failed_write_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise StateError("cannot write the checkpoint")

    async def scene() -> None:
        stage = Scene(tmp_path)
        stage.states = None
        await stage.saver.save()
        assert (stage.num_saved, stage.heard) == (0, [])
        stage.states = start_states(PLAN)
        monkeypatch.setattr(Archive, "save", refuse)
        await stage.saver.save()
        assert stage.heard == ["cannot write the checkpoint"]

    run_virtual(scene())


def test_a_save_whose_task_is_cancelled_ends_before_the_next_begins(tmp_path: Path) -> None:
    """A thread goes on writing; two at once would write one file."""
    scene = Scene(tmp_path)
    writing, most, goes_on, save = 0, 0, threading.Event(), scene.archive.save

    def slow(states: Mapping[SpanId, SpanState]) -> None:
        nonlocal writing, most
        writing += 1
        most = max(most, writing)
        goes_on.wait(5.0)
        save(states)
        writing -= 1

    scene.archive.save = slow  # type: ignore[method-assign]

    async def play() -> None:
        first = asyncio.ensure_future(scene.saver.save())
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.ensure_future(scene.saver.save())
        await asyncio.sleep(0.1)
        goes_on.set()
        await second

    asyncio.run(play())
    assert (most, scene.num_saved) == (1, 2)
