"""Simulated processes: their callbacks run on their machine's clock, wait while it sleeps, and end with the process.

Every callback and task of a simulated peer carries its `Process` in its context, where the loop finds it. The loop
shows each process the monotonic clock of its machine, defers callbacks that become due while the process is stopped,
and drops those that become due after its end. So the shipped shell runs unchanged, asyncio and all.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections.abc import Callable
from typing import Any

from simulator.clock import MachineClock
from simulator.virtual_time import VirtualTimeLoop

_EARLY_SECONDS = 1e-6


class Process:
    """One life of a machine's peer, from its start to its end.

    Args:
        clock: clock of the machine.
    Attributes:
        context: context in which all code of this process runs.
    """

    def __init__(self, clock: MachineClock) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulationLoop), "simulated processes run in a SimulationLoop"
        self._loop = loop
        self.clock = clock
        self.is_over = False
        self.is_dying = False
        """Whether it was killed: it tears itself down, and nothing that it still does has an effect."""
        self.is_stopped = False
        self.waiting: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)

    def stop(self) -> None:
        """Stop as SIGSTOP and sleep do: nothing runs until `go_on`."""
        self.is_stopped = True

    def go_on(self) -> None:
        """Continue, and run in order what became due meanwhile."""
        self.is_stopped = False
        waiting, self.waiting = self.waiting, []
        self._loop.run_soon(waiting)

    def end(self) -> None:
        """Never run anything of this process again."""
        self.is_over = True
        self.waiting.clear()


_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
OUTSIDE = contextvars.copy_context()
"""The context of everything that belongs to no machine: the network, and the simulation itself."""
OUTSIDE.run(_PROCESS.set, None)


class _Handle(asyncio.TimerHandle):
    """A callback of a process; `local` is its due time on the machine's clock."""

    __slots__ = ("local", "process")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SimulationLoop,
        context: contextvars.Context | None,
        process: Process,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.process = process
        self.local = 0.0

    def _run(self) -> None:
        process = self.process
        if process.is_over:
            return
        if process.is_stopped:
            process.waiting.append(self)
            return
        loop: SimulationLoop = self._loop  # type: ignore[attr-defined]
        if self.local > process.clock.monotonic(loop.true_seconds()) + _EARLY_SECONDS:
            loop.put_off(self)  # the machine's clock was stopped meanwhile
            return
        super()._run()


class SimulationLoop(VirtualTimeLoop):
    """A `VirtualTimeLoop` that knows whose callback it runs. Work in threads takes no time, or its disk's time."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(start)
        self.executor_delay: Callable[[Process], float] = lambda process: 0.0

    def true_seconds(self) -> float:
        """Return the simulation's own time, which no machine sees."""
        return self._now

    def time(self) -> float:
        """Return the monotonic clock of the machine whose process is running; true time outside of all processes."""
        process = _PROCESS.get()
        return self._now if process is None else process.clock.monotonic(self._now)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        handle = _Handle(0.0, callback, args, self, context, process)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        handle = _Handle(process.clock.true_at(when, self._now), callback, args, self, context, process)
        handle.local = when
        self._push(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        now = self._now if process is None else process.clock.monotonic(self._now)
        return self.call_at(now + delay, callback, *args, context=context)

    def put_off(self, handle: _Handle) -> None:
        """Defer a handle until its machine's clock shows its due time."""
        handle._when = handle.process.clock.true_at(handle.local, self._now)  # type: ignore[attr-defined]
        self._push(handle)

    def run_soon(self, handles: list[asyncio.Handle]) -> None:
        """Run handles in the next iteration, before those scheduled later."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call `func` in this thread: now, or once the machine's disk has time for it."""
        process = _PROCESS.get()
        seconds = self.executor_delay(process) if process is not None else 0.0
        if seconds <= 0.0:
            return super().run_in_executor(executor, func, *args)
        future: asyncio.Future[Any] = self.create_future()

        def call() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(seconds, call)
        return future

    def _push(self, handle: asyncio.TimerHandle) -> None:
        heapq.heappush(self._scheduled, handle)  # type: ignore[attr-defined]
        handle._scheduled = True  # type: ignore[attr-defined]


def current_process() -> Process | None:
    """Return the process whose callback or task is running; None outside of all processes."""
    return _PROCESS.get()


def run_in(process: Process, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as part of a process: it sees the process's clock, and what it schedules belongs to it."""
    return process.context.copy().run(function, *args)
