"""An asyncio event loop with virtual time: if nothing is ready, time jumps to the next timer.

A weekend of swarm time passes in milliseconds, two runs of a program do the same things in the same order, and a
deadlocked program ends with an error instead of hanging.
"""

from __future__ import annotations

import asyncio
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from p2p_diloco.node.vector_actions import Done

_T = TypeVar("_T")


class AtOnce:
    """A `Worker` that runs every function immediately in the loop: in virtual time, computing takes no time."""

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` now; `done` is called in the loop's next iteration, as with a thread."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(*args)
        except Exception as mistake:
            error = mistake
        asyncio.get_running_loop().call_soon(done, result, error)


class VirtualDeadlock(RuntimeError):
    """Every task waits and no timer is set."""


class _JumpingSelector:
    """Replaces the loop's selector: advances virtual time instead of waiting for sockets."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            self._loop.raise_deadlock()
        if timeout > 0:
            self._loop.advance(timeout)
        return []


class VirtualTimeLoop(BaseEventLoop):
    """An event loop without sockets, threads or real waiting. `time()` starts at `start` seconds and jumps.

    `run_in_executor` calls the function immediately in the loop, so work of other threads takes no virtual time.
    """

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self._now = start
        self._clock_resolution = 1e-6  # above the float spacing at Unix times, otherwise due timers would never fire
        self._selector = _JumpingSelector(self)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time; due timers run in the next iteration of the loop."""
        self._now += seconds

    def raise_deadlock(self) -> NoReturn:
        """Raise an error that names the waiting tasks.

        Raises:
            VirtualDeadlock: always.
        """
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
        raise VirtualDeadlock(f"at {self._now:.3f} s nothing is ready and no timer is set; waiting: {waiting}")

    def run_in_executor(  # type: ignore[override]  # typeshed's TypeVarTuple form; the call is the same
        self, executor: Any, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        """Call `func` now and return its result as a finished future."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no sockets."""

    def _write_to_self(self) -> None:
        """Do nothing: this loop never waits, so it never has to be woken."""


def run_virtual(main: Coroutine[Any, Any, _T], *, start: float = 0.0) -> _T:
    """Run `main` on a fresh `VirtualTimeLoop` and return its result; remaining tasks are cancelled.

    Raises:
        VirtualDeadlock: every task waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start)) as runner:
        return runner.run(main)
