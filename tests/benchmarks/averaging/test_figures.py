"""What turns come to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.averaging.figures import (
    MEASURED,
    MIB,
    Comparison,
    Turn,
    document_of,
    figures_of,
    idle_cores,
    ratios_to_ours,
)
from benchmarks.averaging.systems import GLOO, OURS
from benchmarks.interleaved import Spread

TURN = Turn(
    wall_seconds=1.0,
    cpu_seconds=0.04,
    wire_bytes=8_000_000,
    peak_rss_bytes=300 * MIB,
    others_cpu_seconds=0.01,
    results_equal=True,
)


def comparison_of(ours: list[Turn], theirs: list[Turn]) -> Comparison:
    return Comparison(
        num_peers=4,
        parameters=1_000_000,
        codec="int4",
        turns={OURS: ours, GLOO: theirs},
        on_own_network=True,
        kept_alive=True,
        num_cores=2,
    )


def test_figures_are_for_each_parameter_and_peer() -> None:
    figures = figures_of(comparison_of([TURN] * 3, [TURN] * 3), OURS)
    assert figures.cpu_ns_per_parameter_per_peer.middle == pytest.approx(10.0)
    assert figures.wire_bytes_per_parameter_per_peer.middle == pytest.approx(2.0)
    assert figures.peak_rss_mib == Spread(middle=300.0, low=300.0, high=300.0)


def test_a_ratio_is_of_one_repeat_so_that_bad_minutes_cancel() -> None:
    slow = replace(TURN, wall_seconds=10.0)
    theirs = [replace(TURN, wall_seconds=3.0), replace(TURN, wall_seconds=30.0), replace(TURN, wall_seconds=3.0)]
    ratio = ratios_to_ours(comparison_of([TURN, slow, TURN], theirs), GLOO)["wall_seconds"]
    assert ratio == Spread(middle=3.0, low=3.0, high=3.0)


def test_one_turn_that_differs_is_told() -> None:
    comparison = comparison_of([TURN, replace(TURN, results_equal=False)], [TURN, TURN])
    assert not figures_of(comparison, OURS).results_equal
    assert figures_of(comparison, GLOO).results_equal


def test_who_waits_is_told_in_cores() -> None:
    assert idle_cores(comparison_of([TURN], [replace(TURN, wall_seconds=3.0)])) == pytest.approx(0.005)


def test_the_document_has_medians_under_the_names_that_were_agreed_on() -> None:
    document = json.loads(json.dumps(document_of(comparison_of([TURN] * 5, [TURN] * 5)), allow_nan=False))
    assert (document["peers"], document["parameters"], document["repeats"]) == (4, 1_000_000, 5)
    assert set(document["systems"]) == {OURS, GLOO}
    for system in document["systems"].values():
        assert set(system) == {*MEASURED, "results_equal", "spread"}
        assert all(isinstance(system[name], float) for name in MEASURED)
        assert system["results_equal"] is True
        assert set(system["spread"]) == set(MEASURED)
    assert set(document["ratios"]) == {GLOO}
    assert len(document["turns"][OURS]) == 5
