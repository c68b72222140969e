"""The thread for vector work beside the event loop, and how its results come back: in bunches, with few wake-ups.

An executor makes two futures, two locks and a wake-up of the loop for every call; an exchange has some hundred calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

Done = Callable[[Any, BaseException | None], None]
"""Takes a function's result, or what it raised instead; called in the loop."""


class Worker(Protocol):
    """Runs functions one after another."""

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function`, then hand what came of it to `done`."""
        ...


class AtOnce:
    """Runs everything in the loop itself, at once: for virtual time, where computing takes none."""

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` now; `done` is called in the loop's next turn, as with a thread."""
        asyncio.get_running_loop().call_soon(done, *_run(function, args))


class _Order(NamedTuple):
    done: Done
    function: Callable[..., Any]
    args: tuple[Any, ...]


class VectorWorker:
    """One thread. Made and used in the loop's thread; `close` it.

    Args:
        loop: in which results are handed over; closing it before this worker loses results, nothing else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._finished: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="vectors", daemon=True)
        self._thread.start()

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` behind all that was submitted before; `done` hears of it in the loop."""
        self._orders.put(_Order(done, function, args))

    def close(self) -> None:
        """End the thread after the call in progress; what waits is not begun, and nobody hears of anything any more."""
        self._is_closed = True
        self._orders.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread's end; False when it did not come in time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None and not self._is_closed:
            self._finished.append((order.done, *_run(order.function, order.args)))
            # Who comes first wakes the loop, which then takes all that is there. Appended before it is counted, so that
            # the loop cannot have looked and gone between.
            if len(self._finished) == 1:
                self._wake_loop()

    def _wake_loop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:  # the loop is closed: nobody is left to hear of it
            self._is_closed = True

    def _hand_over(self) -> None:
        while self._finished and not self._is_closed:
            done, result, error = self._finished[0]
            try:
                done(result, error)
            except Exception as mistake:
                context = {"message": "what came of vector work was not taken", "exception": mistake}
                self._loop.call_exception_handler(context)
            finally:
                # Only now, so that until then the thread need not wake the loop for what it adds.
                self._finished.popleft()


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return function(*args), None
    except BaseException as error:
        return None, error
