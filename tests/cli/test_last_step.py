"""A long step neither delays the exit of a process nor changes its exit code."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from p2p_diloco.app.cli import app
from p2p_diloco.app.cli.command_line import LONG_AT_WORK, end_despite_last_step
from p2p_diloco.app.training.training_thread import TrainingThread
from p2p_diloco.node.vector_actions import VectorWorker

Begin = Callable[[str], None]


class Ended(BaseException):
    """Raised where the process would have exited."""


@pytest.fixture(autouse=True)
def never_really_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)


@pytest.fixture
def busy() -> Iterator[Begin]:
    """Start threads that are busy until the test ends."""
    told, threads = threading.Event(), []

    def begin(name: str) -> None:
        threads.append(threading.Thread(target=told.wait, name=name, daemon=True))
        threads[-1].start()

    yield begin
    told.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", sorted(LONG_AT_WORK))
@pytest.mark.parametrize("code", [0, 4])
def test_a_step_in_progress_is_left_with_the_exit_code_kept(name: str, code: int, busy: Begin) -> None:
    busy(name)
    with pytest.raises(Ended) as ended:
        end_despite_last_step(code)
    assert ended.value.args == (code,)


def test_other_threads_are_left_to_the_interpreter(busy: Begin) -> None:
    busy("parent")
    assert end_despite_last_step(3) == 3


class Writer(threading.Thread):
    """A thread that is busy until it is joined."""

    def __init__(self) -> None:
        self.awaited = threading.Event()
        super().__init__(target=self.awaited.wait, name="entries", daemon=False)

    def join(self, timeout: float | None = None) -> None:
        self.awaited.set()
        super().join(timeout)


def test_pending_writes_are_waited_for(busy: Begin) -> None:
    writer = Writer()
    writer.start()
    busy("training")
    with pytest.raises(Ended):
        end_despite_last_step(0)
    assert not writer.is_alive()


def test_only_a_process_run_from_its_own_command_line_ends_early(monkeypatch: pytest.MonkeyPatch, busy: Begin) -> None:
    busy("training")
    assert app.main(["--version"]) == 0
    monkeypatch.setattr("sys.argv", ["p2p-diloco", "no-such-command"])
    with pytest.raises(Ended) as ended:
        app.main()
    assert ended.value.args == (2,)


def test_the_threads_have_the_expected_names() -> None:
    nothing, before = cast(Any, None), set(threading.enumerate())
    state = SimpleNamespace(wake_with=lambda wake: None, border=lambda: None, begin=lambda: False, has_work=False)
    training = TrainingThread(state=state, step=nothing)  # type: ignore[arg-type]
    training.start()
    loop = asyncio.new_event_loop()
    worker = VectorWorker(loop)
    assert {thread.name for thread in set(threading.enumerate()) - before} == LONG_AT_WORK
    training.stop()
    worker.close()
    assert training.join(30.0)
    assert worker.join(30.0)
    loop.close()
