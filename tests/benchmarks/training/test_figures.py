"""Speed kept, participation and what an exchange costs, from what islands have counted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.training.figures import (
    TORCHFT,
    IslandWindow,
    Row,
    Setting,
    Turn,
    Work,
    document_of,
    processor_left,
    steps_per_second,
    steps_within,
)

ALONE = IslandWindow(seconds=10.0, steps=100.0, work=Work(training=5.0, rest=0.1, daemon=0.1))
EXCHANGING = IslandWindow(
    seconds=20.0,
    steps=190.0,
    included=6.0,
    due=8.0,
    work=Work(training=9.9, outer=0.2, rest=0.7, daemon=0.4),
)
TURN = Turn(before=(ALONE, ALONE), exchanging=(EXCHANGING, EXCHANGING), after=(ALONE, ALONE))


def row_of(*turns: Turn) -> Row:
    return Row(
        system="p2p_diloco",
        uplink="20mbit",
        cycle_seconds=10.0,
        transmission_seconds=2.5,
        steps_per_cycle=95.0,
        turns=turns,
    )


@pytest.mark.parametrize(
    ("begin", "end", "steps"),
    [
        (1.0, 3.0, 2.0),
        (1.0, 1.5, 0.5),
        (1.25, 5.0, 2.75),
        (3.0, 5.0, 1.0),
        (3.5, 4.5, 0.5),
    ],
)
def test_of_a_step_that_crosses_a_moment_the_part_inside_counts(begin: float, end: float, steps: float) -> None:
    borders = [0.0, 1.0, 2.0, 3.0, 5.0]
    assert steps_within(borders, begin, end) == pytest.approx(steps)


def test_parts_of_a_stretch_add_up() -> None:
    borders = [0.0, 0.3, 0.9, 1.0, 1.7, 2.2]
    whole = steps_within(borders, 0.1, 2.1)
    assert steps_within(borders, 0.1, 0.95) + steps_within(borders, 0.95, 2.1) == pytest.approx(whole)


def test_speed_is_that_of_all_islands_together() -> None:
    slow = IslandWindow(seconds=10.0, steps=50.0)
    assert steps_per_second((ALONE, slow)) == pytest.approx(15.0)


def test_speed_kept_is_over_the_mean_of_before_and_after() -> None:
    faster = IslandWindow(seconds=10.0, steps=110.0)
    assert TURN.speed_kept == pytest.approx(0.95)
    turn = Turn(before=(ALONE, ALONE), exchanging=(EXCHANGING, EXCHANGING), after=(faster, faster))
    assert turn.speed_kept == pytest.approx(9.5 / 10.5)


def test_participation_is_of_all_rounds_and_islands() -> None:
    other = IslandWindow(seconds=20.0, steps=190.0, included=8.0, due=8.0)
    turn = Turn(before=(ALONE,), exchanging=(EXCHANGING, other), after=(ALONE,))
    assert row_of(turn).participation == pytest.approx(14 / 16)


def test_what_an_exchange_costs_is_told_apart_for_each_island_and_cycle() -> None:
    cost = row_of(TURN).cost
    assert cost.outer == pytest.approx(0.1)
    # 190 steps alone would have taken 9.5 s of the processor; 9.9 s less 0.2 s of outer work were taken.
    assert cost.slower_steps == pytest.approx((9.9 - 0.2 - 9.5) / 2)
    assert cost.rest == pytest.approx((0.7 - 0.2) / 2)
    assert cost.daemon == pytest.approx((0.4 - 0.2) / 2)


SETTING = Setting(
    islands=2,
    parameters=1000,
    model="tiny",
    batch=1,
    context=64,
    codec="int4",
    fragments=4,
    spans_per_fragment=8,
    repeats=2,
    machine={"cores": 2},
)


def test_what_an_exchange_leaves_of_all_cores() -> None:
    row = row_of(TURN)
    assert row.cost.seconds == pytest.approx(0.1 + 0.1 + 0.25 + 0.1)
    assert processor_left(SETTING, row) == pytest.approx(1.0 - 2 * 0.55 / (2 * 10.0))
    assert processor_left(SETTING, replace(row, system=TORCHFT)) is None


def test_the_document_holds_what_others_read() -> None:
    document = json.loads(json.dumps(document_of(SETTING, [row_of(TURN, TURN)])))
    (row,) = document["rows"]
    assert (row["system"], row["uplink"]) == ("p2p_diloco", "20mbit")
    assert row["speed_kept"] == pytest.approx(0.95)
    assert row["participation"] == pytest.approx(0.75)
    assert row["processor_left"] == pytest.approx(0.945)
    assert row["spread"]["speed_kept"].keys() == {"middle", "low", "high"}
    assert row["inner_steps_per_second_alone"] == pytest.approx(20.0)
    assert row["cpu_seconds_per_cycle_per_island"].keys() == {"outer", "slower_steps", "rest", "daemon"}
    assert len(row["turns"]) == 2
    assert row["turns"][0]["exchanging"][0]["work"]["outer"] == 0.2
    assert (document["machine"]["cores"], document["repeats"], document["islands"]) == (2, 2, 2)


def test_what_workers_answer_is_read_back() -> None:
    answer = {"seconds": 2.0, "steps": 5.5, "included": 1.0, "due": 2.0, "work": {"training": 1.5}}
    window = IslandWindow.of_answer(answer)
    assert window == IslandWindow(seconds=2.0, steps=5.5, included=1.0, due=2.0, work=Work(training=1.5))
