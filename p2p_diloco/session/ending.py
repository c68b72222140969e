"""The end of a peer: requests to stop, the common end of a run, and waits for the first of several events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.state import state_digest as outer_digest
from p2p_diloco.protocol.engine import PeerEngine

AGREE_SECONDS = 30.0
LOOK_SECONDS = 1.0
BEATS_OF_AGREEMENT = 3

_Result = TypeVar("_Result")


class StopRequest:
    """Set from a signal handler in the event loop; the session watches it."""

    def __init__(self) -> None:
        self._leave = asyncio.Event()
        self._now = asyncio.Event()
        self.within_seconds: float | None = None
        """Time for leaving; None: until the end of the round, and for a last measurement."""
        self._last_round: int | None = None
        self._has_last_round = asyncio.Event()

    def end_after(self, last_round: int) -> None:
        """Contribute to no round after this one, and end when all peers agree on it; only the first call counts."""
        if self._last_round is None:
            self._last_round = last_round
            self._has_last_round.set()

    def leave(self, *, within_seconds: float | None = None) -> None:
        """Announce the leave, finish the round, save a checkpoint, end.

        Args:
            within_seconds: do not wait for the end of a longer round.
        """
        self.within_seconds = within_seconds
        self._leave.set()

    def stop_now(self) -> None:
        self._leave.set()
        self._now.set()

    @property
    def is_leaving(self) -> bool:
        return self._leave.is_set()

    async def wait_for_last_round(self) -> int:
        """Wait until a last round is set, and return it."""
        await self._has_last_round.wait()
        assert self._last_round is not None
        return self._last_round

    async def wait_for_leave(self) -> None:
        await self._leave.wait()

    async def wait_for_stop(self) -> None:
        await self._now.wait()


async def wait_until_over(engine: PeerEngine, now: Callable[[], float], last_round: int) -> None:
    """Contribute to no round after `last_round`, and wait until it is over."""
    engine.set_conditions(replace(engine.conditions, last_round=last_round))
    over = engine.rules.clock.begin(last_round + 1)
    while (left := over - now()) > 0:  # noqa: ASYNC110  # in steps, because swarm time may be corrected meanwhile
        await asyncio.sleep(min(left, LOOK_SECONDS))


async def wait_for_agreement(engine: PeerEngine, now: Callable[[], float]) -> bool:
    """Wait until all ready live peers have published the same tips for some heartbeats, or for `AGREE_SECONDS`.

    Returns:
        Whether they agreed.
    """
    beat = engine.rules.heartbeat_seconds
    give_up = now() + AGREE_SECONDS
    agreed_for = 0.0
    while agreed_for < BEATS_OF_AGREEMENT * beat + LOOK_SECONDS:
        if now() > give_up:
            return False
        await asyncio.sleep(beat)
        agreed_for = agreed_for + beat if all_agree(engine, now()) else 0.0
    return True


def all_agree(engine: PeerEngine, now: float) -> bool:
    """Return whether this peer, if it follows the run, and all ready live peers have the same tips."""
    mine = tuple(head.digest for head in engine.closed_heads(now))
    places = {
        tuple(head.digest for head in beat.heads)
        for beat in engine.membership.liveness.alive(now).values()
        if beat.ready
    }
    if engine.me.trains or engine.me.archives:
        return bool(mine) and places <= {mine}
    return len(places) <= 1


def state_digest(states: Mapping[SpanId, SpanState]) -> str:
    """Return one digest over φ, m and d of all spans, in hexadecimal."""
    return outer_digest([state for _, state in sorted(states.items())]).hex()


async def wait_for_first(*waits: Coroutine[Any, Any, None]) -> None:
    """Return when the first of these ends, or raise its exception; cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def result_before(work: Coroutine[Any, Any, _Result], end: Coroutine[Any, Any, None]) -> _Result | None:
    """Return the result of `work`, or raise its exception; cancel it and return None if `end` comes first."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait((working, ending), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)


@contextmanager
def first_error_alone() -> Iterator[None]:
    """Raise the first error of the groups raised inside the block, so that people read one sentence, not a tree."""
    try:
        yield
        return
    except BaseExceptionGroup as group:
        error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error
