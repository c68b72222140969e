"""Each planted mistake is caught, by the invariant that it breaks."""

from __future__ import annotations

import numpy as np
import pytest
from lab_swarms import RADIAL

from p2p_diloco.ids import SpanId
from p2p_diloco.lab.campaign import CampaignPlan
from p2p_diloco.lab.faults import faults_named
from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.mistakes import Mistake, Mistakes, planted_in_rules
from p2p_diloco.lab.toy_run import peer_named
from p2p_diloco.protocol import ballot, entry, exchange, finish, inclusion, membership, roster, roster_book
from p2p_diloco.protocol import round as round_rules
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.swarm.vector_work import Reduced, reduce_parts

CAUGHT_BY = {
    Mistake.DOUBLE_COUNT: "I2",
    Mistake.APPLY_TWICE: "I2",
    Mistake.OUT_OF_ORDER: "I3",
    Mistake.NEWCOMER_CERTIFIES: "I8",
    Mistake.TWO_VOTES: "I8",
    Mistake.UNDECODED_BYTES: "I1",
    Mistake.IN_FLIGHT_LEFT_OUT: "I2",
    Mistake.NO_MAJORITY: "I8",
    Mistake.COUNTS_THE_ABSENT: "I8",
}
MOST_SEEDS = 40
FIRST_SEED = {Mistake.TWO_VOTES: 110}
"""One seed in thirty has two leads that both find a majority; of most mistakes it is nearly every one."""


@pytest.mark.parametrize("mistake", Mistake, ids=lambda mistake: mistake.value)
def test_a_planted_mistake_is_caught(mistake: Mistake) -> None:
    plan = CampaignPlan(peers=(3, 12), faults=faults_named("all"), mistake=mistake)
    first = FIRST_SEED.get(mistake, 0)
    broken = next(r for r in (plan.play(seed) for seed in range(first, first + MOST_SEEDS)) if r.invariant is not None)
    assert broken.invariant == CAUGHT_BY[mistake], broken.text


@pytest.mark.parametrize("span", [SpanId(0, 0), SpanId(0, 1)], ids=["plain", "radial"])
def test_what_is_kept_undecoded_is_the_mean_that_was_encoded(span: SpanId) -> None:
    vectors = np.eye(2, 8, dtype=np.float32)  # at right angles: their two means differ
    parts = tuple(
        Part(peer=peer_named(str(place)), payload=RADIAL.contribution.encode(vector_N), weight=1.0, norm=1.0)
        for place, vector_N in enumerate(vectors)
    )
    order = ReduceSpan(
        round=1, span=span, stage=Stage.WHOLE, parts=parts, norm_limit=2.0, rounding_seed=b"not drawn from"
    )
    reduced = reduce_parts(order, RADIAL, 8)
    assert isinstance(reduced, Reduced)
    mistakes = Mistakes(RADIAL, 8, Mistake.UNDECODED_BYTES)
    mistakes.note_mean(Machine(name="p0", dialable=True, trains=True), order, reduced)
    (mean_N,) = mistakes._undecoded.values()
    assert RADIAL.entry.encode(mean_N) == reduced.payload


def test_what_is_planted_in_the_rules_is_taken_out_again() -> None:
    for mistake in Mistake:
        with planted_in_rules(mistake):
            pass
    assert membership.vote is ballot.vote
    assert roster_book.check_certificate is roster.check_certificate
    assert round_rules.are_enough is finish.are_enough is inclusion.are_enough is entry.are_enough
    assert entry.are_enough(2, 3)
    assert not entry.are_enough(1, 3)
    assert exchange.build_entry is inclusion.build_entry
