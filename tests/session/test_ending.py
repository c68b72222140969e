"""A peer is asked to stop in three ways, and all peers stop at one boundary, or after a while without agreement."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_run import peer_key, small_plan, start_states

from p2p_diloco.errors import NetworkError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.membership.local import Conditions
from p2p_diloco.protocol.wire.heartbeat import FragmentHead
from p2p_diloco.session.ending import (
    AGREE_SECONDS,
    StopRequest,
    all_agree,
    first_error_alone,
    result_before,
    state_digest,
    wait_for_agreement,
    wait_for_first,
    wait_until_over,
)
from simulator.virtual_time import run_virtual

PLAN = small_plan()
HERE, THERE = sha256(b"here"), sha256(b"there")


def heads(*digests: Digest) -> tuple[FragmentHead, ...]:
    return tuple(FragmentHead(round=4, digest=digest) for digest in digests)


@dataclass
class FakeEngine:
    """The parts of an engine that the last round uses."""

    mine: tuple[FragmentHead, ...] = ()
    others: dict[PeerId, Any] = field(default_factory=dict)
    trains: bool = True
    archives: bool = False
    conditions: Conditions = field(default_factory=Conditions)

    rules = PLAN.rules

    @property
    def me(self) -> Any:
        return SimpleNamespace(trains=self.trains, archives=self.archives)

    @property
    def membership(self) -> Any:
        return SimpleNamespace(liveness=SimpleNamespace(alive=lambda now: self.others))

    def set_conditions(self, conditions: Conditions) -> None:
        self.conditions = conditions

    def closed_heads(self, now: float) -> tuple[FragmentHead, ...]:
        return self.mine

    def take_heartbeat(self, name: str, *digests: Digest, ready: bool = True) -> None:
        self.others[peer_key(name).peer] = SimpleNamespace(ready=ready, heads=heads(*digests))


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("mine", "others", "agree"),
    [
        ((HERE,), {}, True),
        ((HERE,), {"ada": (HERE,), "ben": (HERE,)}, True),
        ((HERE,), {"ada": (HERE,), "ben": (THERE,)}, False),
        ((THERE,), {"ada": (HERE,)}, False),
        ((), {"ada": (HERE,)}, False),
        ((), {}, False),
        ((HERE,), {"ada": ()}, False),
        ((HERE, THERE), {"ada": (HERE, THERE)}, True),
        ((HERE, THERE), {"ada": (THERE, HERE)}, False),
    ],
)
def test_all_agree_if_every_fragment_has_one_tip(
    mine: tuple[Digest, ...], others: dict[str, tuple[Digest, ...]], agree: bool
) -> None:
    engine: Any = FakeEngine(mine=heads(*mine))
    for name, digests in others.items():
        engine.take_heartbeat(name, *digests)
    assert all_agree(engine, 0.0) is agree


def test_a_peer_that_is_not_ready_does_not_count() -> None:
    engine: Any = FakeEngine(mine=heads(HERE))
    engine.take_heartbeat("ada", THERE, ready=False)
    assert all_agree(engine, 0.0)


def test_a_peer_that_does_not_train_follows_the_others() -> None:
    engine: Any = FakeEngine(trains=False)
    assert all_agree(engine, 0.0)
    engine.take_heartbeat("ada", HERE)
    engine.take_heartbeat("ben", HERE)
    assert all_agree(engine, 0.0)
    engine.take_heartbeat("ben", THERE)
    assert not all_agree(engine, 0.0)


def test_an_archivist_holds_what_the_others_hold() -> None:
    engine: Any = FakeEngine(mine=heads(HERE), trains=False, archives=True)
    engine.take_heartbeat("ada", THERE)
    assert not all_agree(engine, 0.0)
    engine.take_heartbeat("ada", HERE)
    assert all_agree(engine, 0.0)


def test_the_last_round_is_waited_for_and_set_in_the_engine() -> None:
    async def scene() -> None:
        engine: Any = FakeEngine()
        asyncio.get_running_loop().advance(PLAN.rules.clock.begin(3))  # type: ignore[attr-defined]
        await wait_until_over(engine, now, 5)
        assert engine.conditions.last_round == 5
        assert now() == pytest.approx(PLAN.rules.clock.begin(6), abs=0.01)
        await wait_until_over(engine, now, 4)
        assert now() == pytest.approx(PLAN.rules.clock.begin(6), abs=0.01)

    run_virtual(scene())


def test_a_clock_correction_during_the_wait_is_followed() -> None:
    async def scene() -> None:
        offset = 0.0
        engine: Any = FakeEngine()
        start = PLAN.rules.clock.begin(0)
        task = asyncio.ensure_future(wait_until_over(engine, lambda: start + now() + offset, 0))
        await asyncio.sleep(2.0)
        offset = 4.0
        await task
        assert now() == pytest.approx(PLAN.rules.clock.round_seconds - 4.0, abs=1.01)

    run_virtual(scene())


def test_agreement_must_last_for_some_heartbeats() -> None:
    async def scene() -> None:
        engine: Any = FakeEngine(mine=heads(HERE))
        engine.take_heartbeat("ada", THERE)
        task = asyncio.ensure_future(wait_for_agreement(engine, now))
        await asyncio.sleep(5.0)
        engine.take_heartbeat("ada", HERE)
        await asyncio.sleep(2.0)
        engine.take_heartbeat("ada", THERE)
        await asyncio.sleep(2.0)
        engine.take_heartbeat("ada", HERE)
        assert not task.done()
        assert await task
        assert 9.0 + 3.0 <= now() <= 9.0 + 6.0

    run_virtual(scene())


def test_a_peer_that_never_agrees_is_not_waited_for_forever() -> None:
    async def scene() -> None:
        engine: Any = FakeEngine(mine=heads(HERE))
        engine.take_heartbeat("ada", THERE)
        assert not await wait_for_agreement(engine, now)
        assert now() == pytest.approx(AGREE_SECONDS, abs=2.0)

    run_virtual(scene())


def test_the_digest_covers_the_bytes_of_all_spans() -> None:
    states = start_states(PLAN)
    same = dict(reversed(list(start_states(PLAN).items())))
    assert state_digest(states) == state_digest(same)
    assert len(state_digest(states)) == 64
    for which in ("anchor_N", "momentum_N"):
        span, state = next(iter(states.items()))
        vectors = {"anchor_N": state.anchor_N.copy(), "momentum_N": state.momentum_N.copy()}
        vectors[which][-1] = np.nextafter(vectors[which][-1], np.float32(1))
        assert state_digest(states | {span: SpanState(head=state.head, **vectors)}) != state_digest(states)


def test_nothing_stops_without_a_request() -> None:
    async def scene() -> None:
        stop = StopRequest()
        waits = [
            asyncio.ensure_future(wait)
            for wait in (stop.wait_for_leave(), stop.wait_for_stop(), stop.wait_for_last_round())
        ]
        await asyncio.wait(waits, timeout=3600)
        assert not stop.is_leaving
        assert not any(wait.done() for wait in waits)

    run_virtual(scene())


def test_the_first_ctrl_c_only_asks_to_leave() -> None:
    async def scene() -> None:
        stop = StopRequest()
        stop.leave()
        await stop.wait_for_leave()
        hurry = asyncio.ensure_future(stop.wait_for_stop())
        await asyncio.wait({hurry}, timeout=3600)
        assert stop.is_leaving
        assert not hurry.done()

    run_virtual(scene())


def test_the_second_ctrl_c_stops_at_once_even_without_a_first() -> None:
    async def scene() -> None:
        stop = StopRequest()
        stop.stop_now()
        await stop.wait_for_leave()
        await stop.wait_for_stop()
        assert stop.is_leaving

    run_virtual(scene())


def test_the_first_request_for_a_last_round_counts() -> None:
    async def scene() -> None:
        stop = StopRequest()
        stop.end_after(7)
        stop.end_after(9)
        assert await stop.wait_for_last_round() == 7
        assert not stop.is_leaving

    run_virtual(scene())


def test_the_first_to_end_ends_the_wait_and_the_others() -> None:
    cancelled: list[str] = []

    async def wait(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    async def scene() -> float:
        await wait_for_first(wait("slow", 100.0), wait("quick", 2.0))
        await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(scene()) == pytest.approx(2.0, abs=0.01)
    assert cancelled == ["slow"]


def test_an_error_is_not_swallowed() -> None:
    async def fail() -> None:
        raise NetworkError("gone")

    with pytest.raises(NetworkError, match="gone"):
        run_virtual(wait_for_first(asyncio.sleep(10.0), fail()))


@pytest.mark.parametrize(("seconds", "result"), [(1.0, "done"), (100.0, None)])
def test_work_is_waited_for_until_the_end_comes(seconds: float, result: str | None) -> None:
    ended: list[float] = []

    async def work() -> str:
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            ended.append(asyncio.get_running_loop().time())

    assert run_virtual(result_before(work(), asyncio.sleep(2.0))) == result
    assert ended == [pytest.approx(min(seconds, 2.0), abs=0.01)]


def test_the_first_error_of_a_tree_is_raised() -> None:
    leaf = NetworkError("the daemon died")
    tree = BaseExceptionGroup("tasks", [BaseExceptionGroup("inner", [leaf, ValueError("later")])])
    for raised in (tree, leaf):
        with pytest.raises(NetworkError) as caught, first_error_alone():
            raise raised
        assert caught.value is leaf
