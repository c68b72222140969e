"""Seeds with three to twelve peers and all kinds of trouble: every invariant holds."""

from __future__ import annotations

import pytest

from simulator.campaign import CampaignPlan, run_campaign
from simulator.command import MOST_SKIPPED_SHARE
from simulator.troubles import KINDS

pytestmark = pytest.mark.story

SEEDS_OF_ONE_TEST, SEEDS = 2, 24


# `python -m simulator swarm --peers 3..24 --seeds 10000` plays ten thousand others.
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_OF_ONE_TEST))
def test_every_invariant_holds(first: int) -> None:
    plan = CampaignPlan(peers=(3, 12), kinds=frozenset(KINDS))
    result = run_campaign(plan, range(first, first + SEEDS_OF_ONE_TEST), processes=1)
    assert [(failing.seed, failing.text) for failing in result.failing] == []
    assert result.skipped_share <= MOST_SKIPPED_SHARE
