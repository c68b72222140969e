"""Requirements of a run, compared with measured figures and with arithmetic by hand."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from p2p_diloco.config.rounds import (
    Question,
    flow_per_parameter,
    loss_cost,
    make_plan,
    measure_outer_work,
    shortest_round,
    traffic_of_a_day,
)
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.fragments import plan_fragments, plan_spans, suited_spans
from p2p_diloco.protocol.clock import CONTRIBUTE_SHARE

PAPER = Question(parameters=12_000_000_000, islands=4, uplink_bits=2e9, step_seconds=1.0, cores=64)


@pytest.mark.parametrize(("islands", "measured"), [(8, 0.930), (64, 1.070), (256, 1.089), (1024, 1.082)])
def test_bytes_match_the_measurements_of_the_lab_except_for_headers(islands: int, measured: float) -> None:
    """`python -m simulator scale`, research/lab-log.md."""
    estimate = flow_per_parameter(dataclasses.replace(PAPER, islands=islands)).sent
    assert 0.96 * measured < estimate < measured


@pytest.mark.parametrize(("islands", "up", "down"), [(1, 1.0, 0.5), (2, 4 / 3, 1.0), (3, 4 / 3, 4 / 3), (4, 1.5, 1.5)])
def test_with_one_or_two_islands_the_bootstrap_peer_reduces_too(islands: int, up: float, down: float) -> None:
    """The bootstrap peer contributes nothing, so less comes in than goes out."""
    plan = make_plan(dataclasses.replace(PAPER, islands=islands))
    assert plan.bytes_per_parameter == pytest.approx(up * 4.25 / 8)
    assert plan.received_per_parameter == pytest.approx(down * 4.25 / 8)


def test_a_wide_codec_sends_more() -> None:
    wide = dataclasses.replace(PAPER, contribution="float32", entry="float32")
    assert flow_per_parameter(wide).sent == pytest.approx(0.75 * 8)


def test_a_cycle_leaves_half_of_the_line_free_and_is_a_whole_number_of_steps() -> None:
    plan = make_plan(PAPER)
    assert plan.transfer_seconds == pytest.approx(12e9 * plan.bytes_per_parameter * 8 / 2e9)
    assert plan.cycle_seconds == plan.steps * 1.0
    assert plan.transfer_seconds / plan.cycle_seconds <= 0.5
    assert plan.round_seconds * plan.fragments == pytest.approx(plan.cycle_seconds)
    # A ring of bfloat16 gradients: 2 · ¾ · 2 bytes.
    assert plan.data_parallel_step_seconds == pytest.approx(1.0 + 3.0 * 12e9 * 8 / 2e9)


def test_a_cycle_is_no_longer_than_needed_on_a_fast_line() -> None:
    plan = make_plan(dataclasses.replace(PAPER, uplink_bits=1e12, cores=32))
    assert plan.steps == 150, "the cores set the cycle: 32 of them take 15 s"
    assert make_plan(dataclasses.replace(PAPER, uplink_bits=1e12, cores=4096)).steps == 4 * 24
    small = dataclasses.replace(PAPER, parameters=10_000_000, uplink_bits=1e12, cores=4096)
    assert make_plan(small).steps == 8


@pytest.mark.parametrize("parameters", [1_000_000, 10_000_000, 1_200_000_000, 4_000_000_000, 12_000_000_000, 10**12])
@pytest.mark.parametrize("uplink_bits", [5e6, 1e8, 1e12])
@pytest.mark.parametrize("step_seconds", [0.01, 1.0, 20.0])
def test_two_steps_fit_in_the_half_of_a_round_in_which_islands_contribute(
    parameters: int, uplink_bits: float, step_seconds: float
) -> None:
    changes = {"parameters": parameters, "uplink_bits": uplink_bits, "step_seconds": step_seconds, "cores": 4096}
    plan = make_plan(dataclasses.replace(PAPER, **changes))  # type: ignore[arg-type]
    assert plan.round_seconds * CONTRIBUTE_SHARE >= 2.0 * step_seconds * (1.0 - 1e-9)
    assert plan.fragments in (1, 2, 3, 4) or plan.fragments == min(24, -(-parameters // 500_000_000))


@pytest.mark.parametrize(
    ("changes", "steps", "fragments", "set_by"),
    [
        ({}, 8, 2, "steps"),
        ({"step_seconds": 0.25}, 16, 1, "rounds"),
        ({"step_seconds": 0.045}, 89, 1, "rounds"),
        ({"step_seconds": 0.1}, 40, 1, "rounds"),
        ({"step_seconds": 0.1, "islands": 17}, 40, 1, "rounds"),
        ({"step_seconds": 0.1, "fragments": 4}, 160, 4, "rounds"),
        ({"fragments": 10}, 40, 10, "steps"),
        ({"uplink_bits": 1e6}, 18, 1, "rounds"),
        ({"uplink_bits": 1e6, "islands": 2}, 18, 1, "rounds"),
        ({"uplink_bits": 1e6, "islands": 16}, 18, 1, "rounds"),
        ({"core_nanoseconds": 1000.0}, 10, 2, "cores"),
    ],
)
def test_a_cycle_is_as_short_as_line_cores_and_clock_allow(
    changes: dict[str, Any], steps: int, fragments: int, set_by: str
) -> None:
    million = Question(parameters=1_000_000, islands=4, uplink_bits=1e9, step_seconds=1.0, core_nanoseconds=10.0)
    plan = make_plan(dataclasses.replace(million, **changes))
    assert (plan.steps, plan.fragments, plan.set_by) == (steps, fragments, set_by)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"uplink_bits": 2e6}, 2 * (4 * 0.2 + 0.1 + 0.53125 * 8 / 2 + 2.5)),
        ({"uplink_bits": 5e6}, 2 * (4 * 0.2 + 0.1 + 0.53125 * 8 / 5 + 2.5)),
        ({"step_seconds": 1.0}, 2 * (4 * 0.2 + 1.0 + 0.53125 * 8 / 10)),
        ({}, 4.0),
        ({"uplink_bits": 1e9}, 4.0),
        ({"is_lan": True, "uplink_bits": 1e9}, 2.0),
        ({"is_lan": True, "uplink_bits": 2e6}, 2 * (4 * 0.005 + 0.1 + 0.53125 * 8 / 2)),
    ],
)
def test_half_of_a_round_holds_ways_a_step_and_a_contribution(changes: dict[str, Any], seconds: float) -> None:
    million = Question(parameters=1_000_000, islands=4, uplink_bits=1e7, step_seconds=0.1)
    assert shortest_round(dataclasses.replace(million, **changes), 1) == pytest.approx(seconds)


def test_limited_traffic_makes_cycles_up_to_four_times_as_long() -> None:
    """The amount that is printed as the least one fits."""
    best = make_plan(million := Question(parameters=1_000_000, islands=4, uplink_bits=1e7, step_seconds=0.1))
    most = traffic_of_a_day(million, best.cycle_seconds)
    for share in (1.0, 0.6, 0.26):
        plan = make_plan(dataclasses.replace(million, traffic_bytes=share * most))
        assert traffic_of_a_day(million, plan.cycle_seconds) <= 1.0001 * share * most
        assert plan.steps == pytest.approx(best.steps / share, abs=1.0)
        assert plan.best_steps == best.steps
    with pytest.raises(ConfigError, match=r"10\.0 GB a day does not fit: 12\.0 GB a day, .*; allow at least that"):
        make_plan(dataclasses.replace(million, traffic_bytes=10e9))
    assert make_plan(dataclasses.replace(million, traffic_bytes=12e9)).steps <= 4 * best.steps


@pytest.mark.parametrize(
    ("steps", "cost"), [(4, 0.0), (8, 0.0), (16, 0.0154), (32, 0.0425), (48, 0.0637), (256, 0.1834), (9999, 0.1834)]
)
def test_the_cost_of_a_longer_cycle_matches_measurements(steps: int, cost: float) -> None:
    assert loss_cost(steps) == pytest.approx(cost, abs=1e-4)


def test_speed_depends_on_the_outer_work_and_the_cores_that_share_it() -> None:
    one = make_plan(dataclasses.replace(PAPER, core_nanoseconds=10.0, cores=1))
    many = make_plan(dataclasses.replace(PAPER, core_nanoseconds=10.0, cores=64))
    assert one.cycle_seconds == 1200.0, "outer work is at most a tenth of it"
    assert one.utilisation == pytest.approx(1200.0 / (1200.0 + 120.0))
    assert many.utilisation > 0.97


def test_parts_beyond_two_to_the_31_elements_fit_together() -> None:
    plan = make_plan(PAPER)
    tensors = [(f"layer{index}", 250_000_000) for index in range(46)] + [("embedding", 2**31 + 5), ("norm", 7)]
    fragments = plan_fragments(tensors, plan.fragments)
    assert sum(fragment.elements for fragment in fragments) == 46 * 250_000_000 + 2**31 + 12
    largest = max(fragments, key=lambda fragment: fragment.elements)
    assert largest.elements > 2**31
    assert plan.spans_per_fragment == suited_spans(12_000_000_000 // plan.fragments, 4)
    spans = plan_spans(largest.elements, plan.spans_per_fragment, 128)
    assert (spans[0][0], spans[-1][1]) == (0, largest.elements)
    assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_the_outer_work_is_measured_on_this_machine() -> None:
    # The first time may include compiling the loops.
    assert 1.0 < measure_outer_work(elements=1 << 14, repeats=2) < 100_000.0


def test_senseless_values_are_refused() -> None:
    for changes in ({"parameters": 0}, {"islands": 0}, {"cores": 0}, {"uplink_bits": 0.0}, {"step_seconds": -1.0}):
        with pytest.raises(ConfigError, match="expected"):
            dataclasses.replace(PAPER, **changes)  # type: ignore[arg-type]
