"""The common end of a run: after the last round, wait until all peers reach the same tips, then hash the state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.outer.state import state_digest as outer_digest
from p2p_diloco.protocol.engine import PeerEngine

AGREE_SECONDS = 30.0
LOOK_SECONDS = 1.0
BEATS_OF_AGREEMENT = 3


async def wait_until_over(engine: PeerEngine, now: Callable[[], float], last_round: int) -> None:
    """Contribute to no round after `last_round`, and wait until it is over."""
    engine.last_round = last_round
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
    places = {tuple(head.digest for head in beat.heads) for beat in engine.membership.alive(now).values() if beat.ready}
    if engine.me.trains or engine.me.archives:
        return bool(mine) and places <= {mine}
    return len(places) <= 1


def state_digest(states: Mapping[SpanId, SpanState]) -> str:
    """Return one digest over φ, m and d of all spans, in hexadecimal."""
    return outer_digest([state for _, state in sorted(states.items())]).hex()
