"""What a seed draws."""

from __future__ import annotations

import math
from statistics import median

from p2p_diloco.lab.faults import WEATHER, FaultKind
from p2p_diloco.lab.scenario import FEWEST_FAULTY_ROUNDS, FOUNDER, draw_scenario
from p2p_diloco.lab.toy_run import ROUND_SECONDS

DRAWN = [draw_scenario(seed, (3, 64), FaultKind) for seed in range(300)]


def test_the_same_seed_draws_the_same() -> None:
    assert draw_scenario(7, (3, 64), FaultKind) == DRAWN[7]


def test_small_swarms_are_drawn_more_often_than_large_ones() -> None:
    counts = [len(scenario.peers) for scenario in DRAWN]
    assert min(counts) == 3
    assert 60 <= max(counts) <= 64
    assert 8 <= median(counts) <= 20


def test_bad_times_last_ten_rounds_and_all_that_strikes_strikes_then() -> None:
    kinds = set()
    for scenario in DRAWN:
        assert scenario.bad_until - scenario.bad_from >= FEWEST_FAULTY_ROUNDS * ROUND_SECONDS - 1e-6
        for fault in scenario.strikes:
            kinds.add(fault.kind)
            assert scenario.bad_from <= fault.at <= scenario.bad_until
            assert fault.until <= scenario.bad_until or math.isinf(fault.until)
            assert fault.names or fault.kind in (FaultKind.WIPE, FaultKind.KILL)
    assert kinds == set(FaultKind) - WEATHER


def test_who_founds_keeps_its_disk_and_comes_back() -> None:
    for scenario in DRAWN:
        founder = FOUNDER if scenario.helper else scenario.peers[0].name
        for fault in scenario.strikes:
            lasting = fault.kind is FaultKind.WIPE or math.isinf(fault.until)
            assert not (lasting and founder in fault.names)


def test_half_of_the_seeds_have_radial_means_in_all_spans_or_in_some() -> None:
    shares = [len(scenario.radial_spans) / sum(scenario.num_spans) for scenario in DRAWN]
    assert 0.4 < sum(share > 0.0 for share in shares) / len(shares) < 0.6
    assert sum(share == 1.0 for share in shares) > 50
    assert sum(0.0 < share < 1.0 for share in shares) > 25
    for scenario in DRAWN:
        assert all(span.index < scenario.num_spans[span.fragment] for span in scenario.radial_spans)


def test_a_seed_draws_what_it_drew_before_there_were_radial_means() -> None:
    # The lab log names seeds: what is new is drawn by itself.
    last_draws = [(one.codec, one.group_size, one.void_cycles, len(one.strikes)) for one in DRAWN[:5]]
    assert last_draws == [
        ("float32", 31, 2, 14),
        ("float32", 16, 3, 8),
        ("int8", 64, 1, 16),
        ("bfloat16", 16, 2, 14),
        ("int8", 4, 2, 8),
    ]


def test_without_faults_nothing_strikes() -> None:
    scenario = draw_scenario(3, (5, 5), [])
    assert scenario.strikes == ()
    assert len(scenario.peers) == 5
    assert scenario.weather.loss == 0.0
    assert scenario.describe().startswith("seed 3: 5 peers (")
    assert scenario.cycle_seconds == ROUND_SECONDS * len(scenario.num_spans)
