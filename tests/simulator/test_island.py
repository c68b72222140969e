"""The simulated island: its ledger agrees with the real code."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.outer.state import (
    InFlight,
    IslandSpan,
    PreparedContribution,
    genesis_state,
    prepare_contribution,
)
from simulator.island import SimulatedIsland
from simulator.maths import SharedMaths
from simulator.run import SPAN_ELEMENTS, codecs_of
from simulator.simulation import play

SPANS = (SpanId(0, 0), SpanId(0, 1))
STEP_SECONDS = 0.5


class Complaints:
    """A `Watch` that keeps complaints and ignores everything else."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def complain(self, invariant: str, text: str) -> None:
        self.texts.append(f"{invariant}: {text}")

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def with_island(
    scene: Callable[[SimulatedIsland, Complaints, Callable[[int], Any]], Any], *, trains: bool = True
) -> None:
    """Run a scene with an island that holds zeros; its last argument lets a number of inner steps pass."""

    async def whole() -> None:
        watch = Complaints()
        made = SimulatedIsland(
            maths=SharedMaths(codecs_of("int8"), SPAN_ELEMENTS),
            spans=SPANS,
            noise=random.Random(1),
            trains=trains,
            step_seconds=STEP_SECONDS,
            now=asyncio.get_running_loop().time,
            share=lambda span, state: state,
            watch=watch,  # type: ignore[arg-type]
        )
        start_N = np.zeros(SPAN_ELEMENTS, dtype=np.float32)
        made.hold({span: genesis_state(start_N, sha256(b"roster")) for span in SPANS})
        await scene(made, watch, lambda steps: asyncio.sleep((steps + 0.01) * STEP_SECONDS))

    play(whole)


def test_an_island_contributes_what_it_has_made_exactly_once() -> None:
    async def scene(made: SimulatedIsland, watch: Complaints, steps: Callable[[int], Any]) -> None:
        await steps(10)
        contribution = made.contribute(0, 0, None)
        assert contribution is not None
        assert [encoded.span for encoded in contribution.spans] == list(SPANS)
        assert (contribution.tokens, contribution.steps) == (1000, 10)
        assert made.contribute(1, 0, None) is None
        await steps(10)
        again = made.contribute(0, 0, None)
        assert again is not None
        assert again.spans == ()
        await steps(10)
        assert made.contribute(2, 0, None) is not None
        assert made.in_flight[SPANS[0]].rounds == (0, 2)
        assert watch.texts == []

    with_island(scene)


def test_an_island_that_ignores_what_is_in_flight_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(span: IslandSpan, *, round_index: int) -> PreparedContribution:
        return prepare_contribution(span._replace(in_flight=InFlight()), round_index=round_index)

    monkeypatch.setattr("simulator.island.prepare_contribution", forget)

    async def scene(made: SimulatedIsland, watch: Complaints, steps: Callable[[int], Any]) -> None:
        await steps(10)
        made.contribute(0, 0, None)
        assert watch.texts == []
        await steps(10)
        made.contribute(1, 0, None)
        assert "I2" in watch.texts[0]
        assert "is not sent" in watch.texts[0]

    with_island(scene)


def test_a_transfer_settles_everything_in_flight() -> None:
    async def scene(made: SimulatedIsland, watch: Complaints, steps: Callable[[int], Any]) -> None:
        await steps(10)
        made.contribute(0, 0, None)
        other = genesis_state(np.ones(SPAN_ELEMENTS, dtype=np.float32), sha256(b"roster"))
        made.take(SPANS[0], other)
        assert made.states[SPANS[0]] is other
        assert made.in_flight[SPANS[0]].rounds == ()
        assert watch.texts == []

    with_island(scene)


def test_a_bit_flips_only_if_the_number_stays_in_range() -> None:
    async def scene(made: SimulatedIsland, watch: Complaints, steps: Callable[[int], Any]) -> None:
        assert made.flip_bit(SPANS[0], 0, 30)  # 0 becomes 2
        assert not made.flip_bit(SPANS[0], 0, 29)  # 2 would become 4e19
        assert made.states[SPANS[0]].anchor_N[0] != 0.0

    with_island(scene)


def test_a_peer_that_does_not_train_has_no_parameters() -> None:
    async def scene(made: SimulatedIsland, watch: Complaints, steps: Callable[[int], Any]) -> None:
        await steps(10)
        assert made.contribute(0, 0, None) is None
        assert made.local == {}
        made.drop()
        assert made.states == {}

    with_island(scene, trains=False)
