"""An asyncio event loop in which waiting costs nothing: time jumps to the next timer when nothing is ready.

A weekend of swarm time passes in milliseconds, two runs of one program do the same things in the same order, and a
program in which everybody waits for nobody ends with an error instead of hanging.
"""

from __future__ import annotations

import asyncio
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")


class VirtualDeadlock(RuntimeError):
    """Every task waits and no timer is set: nothing would ever happen again."""


class _JumpingSelector:
    """Stands where the loop would wait for sockets: lets virtual time pass instead."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            self._loop.raise_deadlock()
        if timeout > 0:
            self._loop.advance(timeout)
        return []


class VirtualTimeLoop(BaseEventLoop):
    """An event loop without sockets, threads or waiting. `time()` starts at `start` seconds and only jumps.

    `run_in_executor` calls the function at once, in the loop: what other threads compute takes no virtual time.
    """

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self._now = start
        self._clock_resolution = 1e-6  # above the spacing of floats at unix times, or timers due now would never be due
        self._selector = _JumpingSelector(self)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass; timers that fall due run in the next turn of the loop."""
        self._now += seconds

    def raise_deadlock(self) -> NoReturn:
        """Name what waits for ever.

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
        """Do nothing: this loop never waits, so nobody need wake it."""


def run_virtual(main: Coroutine[Any, Any, _T], *, start: float = 0.0) -> _T:
    """Run `main` on a fresh `VirtualTimeLoop` and return its result; remaining tasks are cancelled.

    Raises:
        VirtualDeadlock: every task waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start)) as runner:
        return runner.run(main)
