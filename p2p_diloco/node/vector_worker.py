"""The thread for vector work next to the event loop. Its results return in batches, with few wake-ups of the loop.

An executor creates two futures, two locks and a wake-up for every call, and an exchange makes about a hundred calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

Done = Callable[[Any, BaseException | None], None]
"""Called in the loop with a function's result, or with the exception that it raised."""


class Worker(Protocol):
    """Runs functions one after another."""

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function`, then pass its result or exception to `done`."""
        ...


class _Order(NamedTuple):
    done: Done
    function: Callable[..., Any]
    args: tuple[Any, ...]


class VectorWorker:
    """A single worker thread. Create and use it in the loop's thread, and `close` it.

    Args:
        loop: the loop that receives results; closing it before this worker loses results and nothing else.
        name: name of the thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str = "vectors") -> None:
        self._loop = loop
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._finished: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, done: Done, function: Callable[..., Any], *args: Any) -> None:
        """Run `function` after everything submitted before; `done` is called in the loop."""
        self._orders.put(_Order(done, function, args))

    def close(self) -> None:
        """End the thread after the call in progress. Queued functions are not run, and no `done` is called any more."""
        self._is_closed = True
        self._orders.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end; return False if it did not end in time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None and not self._is_closed:
            self._finished.append((order.done, *_run(order.function, order.args)))
            # The first result wakes the loop, which then takes all results. Append before counting: otherwise the loop
            # could empty the queue in between and miss this result.
            if len(self._finished) == 1:
                self._wake_loop()

    def _wake_loop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:  # the loop is closed: no one needs the results
            self._is_closed = True

    def _hand_over(self) -> None:
        while self._finished and not self._is_closed:
            done, result, error = self._finished[0]
            try:
                done(result, error)
            except Exception as mistake:
                context = {"message": "the callback for a result of vector work failed", "exception": mistake}
                self._loop.call_exception_handler(context)
            finally:
                # Remove it only now: while it is there, the thread need not wake the loop for further results.
                self._finished.popleft()


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        return function(*args), None
    except BaseException as error:
        return None, error
