"""One seed from its scenario to its result."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from p2p_diloco.lab.campaign import CampaignPlan
from p2p_diloco.lab.faults import FaultKind
from p2p_diloco.lab.mistakes import Mistake
from p2p_diloco.lab.scenario import draw_scenario
from p2p_diloco.lab.trial import Trial, play

PRINT_DIGEST = """
from p2p_diloco.lab.faults import FaultKind
from p2p_diloco.lab.scenario import draw_scenario
from p2p_diloco.lab.trial import play
print(play(draw_scenario(11, (3, 8), FaultKind)).digest)
"""


def test_the_same_seed_plays_the_same_whatever_the_process_hashes() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        surroundings = {**os.environ, "PYTHONHASHSEED": hash_seed}
        finished = subprocess.run(
            [sys.executable, "-c", PRINT_DIGEST], env=surroundings, capture_output=True, text=True, check=True
        )
        digests.add(finished.stdout)
    assert digests == {play(draw_scenario(11, (3, 8), FaultKind)).digest + "\n"}


def test_a_swarm_without_faults_holds_all_promises() -> None:
    for seed in range(4):
        result = play(draw_scenario(seed, (3, 6), []))
        assert result.invariant is None, result.text
        assert result.num_entries > 10


def test_spans_that_a_seed_drew_have_radial_means() -> None:
    scenario = next(s for s in (draw_scenario(seed, (3, 6), []) for seed in range(40)) if s.radial_spans)
    trial, plain = Trial(scenario), play(replace(scenario, radial_spans=frozenset()))
    assert trial.swarm.maths.codecs.radial.keys() == scenario.radial_spans
    assert all(marks_B.all() for marks_B in trial.swarm.maths.codecs.radial.values())
    played = play(scenario)
    assert played.invariant is plain.invariant is None
    assert played.digest != plain.digest


def test_a_failure_says_when_who_and_what_happened_before() -> None:
    plan = CampaignPlan(peers=(4, 4), faults=frozenset(), mistake=Mistake.DOUBLE_COUNT)
    result = plan.play(1, with_trace=True)
    assert result.invariant == "I2"
    assert "round" in result.text
    assert any("SpanVector" in line for line in result.trace)
    assert plan.play(1).trace == ()
