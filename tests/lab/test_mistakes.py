"""Each planted mistake is caught, by the invariant that it breaks."""

from __future__ import annotations

import pytest

from p2p_diloco.lab.campaign import CampaignPlan
from p2p_diloco.lab.faults import faults_named
from p2p_diloco.lab.mistakes import Mistake, planted_in_rules
from p2p_diloco.protocol import ballot, membership, roster, roster_book

CAUGHT_BY = {
    Mistake.DOUBLE_COUNT: "I2",
    Mistake.APPLY_TWICE: "I2",
    Mistake.OUT_OF_ORDER: "I3",
    Mistake.NEWCOMER_CERTIFIES: "I8",
    Mistake.TWO_VOTES: "I8",
    Mistake.UNDECODED_BYTES: "I1",
    Mistake.IN_FLIGHT_LEFT_OUT: "I2",
}
MOST_SEEDS = 40


@pytest.mark.parametrize("mistake", Mistake, ids=lambda mistake: mistake.value)
def test_a_planted_mistake_is_caught(mistake: Mistake) -> None:
    plan = CampaignPlan(peers=(3, 12), faults=faults_named("all"), mistake=mistake)
    broken = next(r for r in (plan.play(seed) for seed in range(MOST_SEEDS)) if r.invariant is not None)
    assert broken.invariant == CAUGHT_BY[mistake], broken.text


def test_what_is_planted_in_the_rules_is_taken_out_again() -> None:
    for mistake in Mistake:
        with planted_in_rules(mistake):
            pass
    assert membership.vote is ballot.vote
    assert roster_book.check_certificate is roster.check_certificate
