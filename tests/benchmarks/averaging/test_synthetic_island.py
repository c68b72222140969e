"""An island that does not train contributes what it was told to, and counts what it absorbs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.averaging.our_run import our_orders
from benchmarks.averaging.synthetic_island import TOKENS, SyntheticState, tensors_of
from benchmarks.averaging.textbook import DELTA_SCALE
from p2p_diloco.config.decoder import model_shape
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_tensors
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.node.ports import SpanUpdate
from p2p_diloco.outer.state import genesis_state
from p2p_diloco.session.held_state import StateHost
from p2p_diloco.span_log import AbsorbedEntry

PARAMETERS = 4099
ROSTER = Digest(b"r" * 32)


OPEN: list[SyntheticState] = []


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def plan() -> RunPlan:
    orders = our_orders(codec="float32", spans=4, turn_seconds=60.0)
    manifest = decode_signed_manifest(bytes.fromhex(orders["manifest"])).manifest
    return plan_tensors(manifest, model_shape("tiny"), tensors_of(PARAMETERS))


class Counted:
    def __init__(self, plan: RunPlan) -> None:
        self.heard: list[bool] = []
        self.failures: list[object] = []
        host = StateHost(
            plan=plan,
            now=lambda: 0.0,
            in_loop=lambda call: call(),
            died=self.failures.append,
            damaged=lambda span, reason: self.failures.append(span),
        )
        self.state = SyntheticState(host, absorbed=lambda at, is_in: self.heard.append(is_in))
        OPEN.append(self.state)
        start_N = np.ones(plan.num_parameters, np.float32)
        self.state.hold(
            {span: genesis_state(start_N[place.start : place.stop], ROSTER) for span, place in plan.places.items()}
        )


def test_parameters_are_as_many_as_asked_for(plan: RunPlan) -> None:
    assert plan.num_parameters == PARAMETERS
    assert len(plan.fragments) == 1


def test_it_contributes_how_far_it_was_told_to_go_each_turn_anew(plan: RunPlan) -> None:
    counted = Counted(plan)
    sent = []
    for turn in range(2):
        counted.state.walk(seed=turn)
        contribution = counted.state.contribute(turn, 0)
        assert contribution is not None
        assert contribution.tokens == TOKENS
        assert len(contribution.spans) == len(plan.places)
        delta_N = np.frombuffer(b"".join(span.payload for span in contribution.spans), "<f4")
        assert np.std(delta_N) == pytest.approx(DELTA_SCALE, rel=0.1 if turn == 0 else 0.6)
        sent.append(delta_N)
    assert not np.array_equal(*sent)


def test_it_tells_what_it_absorbed_and_whether_it_had_a_part_in_it(plan: RunPlan) -> None:
    counted = Counted(plan)
    counted.state.walk(seed=0)
    contribution = counted.state.contribute(0, 0)
    assert contribution is not None
    span = SpanId(0, 1)
    entry = AbsorbedEntry(digest=Digest(b"e" * 32), round=0, roster=ROSTER, radius=1.0, median_weight=1.0)
    payload = contribution.spans[1].payload
    counted.state.apply(SpanUpdate(span=span, absorbed=entry, payload=payload, own_included=True))
    counted.state.wait_until_idle()
    assert counted.heard == [], "θ has not followed yet"
    counted.state.border()
    assert counted.heard == [True]
    assert counted.state.states()[span].head.height == 1
    assert counted.failures == []
