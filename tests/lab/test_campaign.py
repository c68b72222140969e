"""Many seeds at once."""

from __future__ import annotations

from p2p_diloco.lab.campaign import CampaignPlan, run_campaign
from p2p_diloco.lab.faults import faults_named
from p2p_diloco.lab.mistakes import Mistake


def test_a_few_seeds_of_small_swarms_hold_every_promise() -> None:
    result = run_campaign(CampaignPlan(peers=(3, 8), faults=faults_named("all")), range(24))
    assert result.seeds == 24
    assert [failing.text for failing in result.failing] == []


def test_failing_seeds_are_counted_in_order() -> None:
    plan = CampaignPlan(peers=(3, 4), faults=frozenset(), mistake=Mistake.DOUBLE_COUNT)
    result = run_campaign(plan, range(3), processes=1)
    assert [failing.seed for failing in result.failing] == [0, 1, 2]
    assert result.violations == 3
