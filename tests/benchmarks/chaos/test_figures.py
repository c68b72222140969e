"""The figures of a play, from small histories worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks.chaos.figures import Inclusion, Life, Played, figures_of
from p2p_diloco.protocol.clock import RoundClock

CLOCK = RoundClock(start_seconds=100.0, round_seconds=2.0, num_fragments=2)
WINDOW = (110.0, 130.0)
ROUNDS = range(5, 15)
"""Rounds that lie in the window."""


def entry(round_index: int, tokens: Mapping[str, float], *, new: Sequence[str] = (), share: float = 1.0) -> Inclusion:
    return Inclusion(round=round_index, share=share, tokens=tokens, present=frozenset([*tokens, *new]))


def played(
    inclusions: Sequence[Inclusion], lives: Sequence[Life] = (), *, window: tuple[float, float] = WINDOW, **more: Any
) -> Played:
    given: dict[str, Any] = {
        "kills": [], "digests": {"a": "x", "b": "x"}, "unfinished": [], "surprises": [], "left_behind": [],
        "memory": [], "machine_share": 0.5,
    }  # fmt: skip
    return Played(clock=CLOCK, window=window, inclusions=inclusions, lives=lives, **(given | more))


BOTH = [Life(island="a", started=90.0), Life(island="b", started=90.0)]
QUIET = played([entry(number, {"a": 10.0, "b": 10.0}) for number in range(20)], BOTH)


def test_tokens_count_in_whole_rounds_of_the_window_and_by_the_share_of_their_span() -> None:
    halves = [entry(5, {"a": 10.0}, share=0.5), entry(5, {"a": 8.0}, share=0.5), entry(4, {"a": 99.0})]
    assert played(halves, BOTH).tokens() == 9.0
    assert QUIET.tokens() == 200.0


@pytest.mark.parametrize(
    ("life", "living"),
    [
        (Life(island="a", started=0.0), [WINDOW]),
        (Life(island="a", started=112.0, ended=120.0), [(112.0, 120.0)]),
        (Life(island="a", started=0.0, stops=[(115.0, 118.0)]), [(110.0, 115.0), (118.0, 130.0)]),
        (Life(island="a", started=0.0, stops=[(105.0, 112.0), (128.0, 140.0)]), [(112.0, 128.0)]),
        (Life(island="a", started=131.0), []),
    ],
)
def test_an_island_lives_while_its_process_runs_and_is_not_stopped(
    life: Life, living: list[tuple[float, float]]
) -> None:
    assert life.living(WINDOW) == living


def test_throughput_is_told_in_total_and_per_second_of_living_islands() -> None:
    lives = [BOTH[0], Life(island="b", started=90.0, ended=120.0)]
    half = played(
        [entry(number, {"a": 10.0, "b": 10.0} if number < 10 else {"a": 10.0}) for number in range(20)], lives
    )
    figures = figures_of(half, QUIET, faults=1, islands=2)
    assert figures["throughput_kept_total"] == 0.75
    assert figures["throughput_kept"] == pytest.approx(1.0)
    assert figures["living_share"] == 0.75


def test_plays_of_different_length_are_compared_by_the_second() -> None:
    short = played(QUIET.inclusions, BOTH, window=(110.0, 120.0))
    figures = figures_of(QUIET, short, faults=0, islands=2)
    assert figures["throughput_kept_total"] == pytest.approx(1.0)
    assert figures["living_share"] == 1.0


def test_participation_is_the_share_of_contributions_of_islands_that_ran_all_through_a_round() -> None:
    history = [entry(number, {"a": 10.0, "b": 10.0}) for number in range(5, 10)]
    history += [entry(number, {"a": 10.0}) for number in range(10, 15)]
    assert played(history, BOTH).participation() == 0.75
    b_stopped = [BOTH[0], Life(island="b", started=90.0, stops=[(121.0, 130.0)])]
    assert played(history, b_stopped).participation() == 15.0 / 15.0
    newcomer = [entry(number, {"a": 10.0}, new=["b"]) for number in ROUNDS]
    assert played(newcomer, BOTH).participation() == 1.0


def test_gaps_are_from_one_round_with_entries_to_the_next_with_the_fewest_islands_alive_in_them() -> None:
    lives = [BOTH[0], Life(island="b", started=90.0, ended=115.0), Life(island="b", started=118.0, restarts=True)]
    history = [entry(number, {"a": 1.0}) for number in ROUNDS if number not in (7, 8)]
    assert played(history, lives).gaps()[0] == (6.0, 1)
    assert played(history, lives).gaps()[1] == (2.0, 2)
    figures = figures_of(played(history, lives), QUIET, faults=1, islands=2)
    assert figures["longest_gap_seconds"] == 6.0
    assert figures["longest_gap_with_majority_seconds"] == 2.0
    assert figures["gaps_beyond_two_rounds"] == [[6.0, 1]]


def test_an_island_is_back_once_an_entry_gives_it_weight() -> None:
    lives = [BOTH[0], Life(island="b", started=90.0, ended=112.0), Life(island="b", started=115.0, restarts=True)]
    history = [entry(number, {"a": 1.0}, new=["b"] if number > 8 else []) for number in range(5, 11)]
    history += [entry(number, {"a": 1.0, "b": 1.0}) for number in range(11, 15)]
    assert played(history, lives).rejoin_seconds() == [124.0 - 115.0]


def test_an_island_that_was_killed_again_soon_does_not_count_but_one_that_never_comes_back_does() -> None:
    soon = Life(island="b", started=115.0, ended=120.0, restarts=True)
    history = [entry(number, {"a": 1.0}) for number in range(5, 60)]
    assert played(history, [BOTH[0], soon]).rejoin_seconds() == []
    never = Life(island="b", started=115.0, restarts=True)
    assert played(history, [BOTH[0], never]).rejoin_seconds() == [float("inf")]
    figures = figures_of(played(history, [BOTH[0], never]), QUIET, faults=1, islands=2)
    assert figures["rejoin_seconds"] == [None]


def test_the_next_entry_after_a_kill_is_that_of_a_round_that_began_later() -> None:
    history = [entry(number, {"a": 1.0}) for number in ROUNDS if number != 8]
    assert played(history, BOTH, kills=[115.0]).next_entry_seconds() == [120.0 - 115.0]


def test_memory_is_judged_after_its_first_third() -> None:
    memory = [(110.0 + second, 1e9 if second < 6 else 1000.0 * second) for second in range(21)]
    assert played([], BOTH, memory=memory).memory_slope() == pytest.approx(1000.0)
    assert played([], BOTH).memory_slope() is None


def test_bytes_are_equal_only_if_all_islands_came_to_the_end() -> None:
    for changed, is_equal in (({}, True), ({"digests": {"a": "x", "b": "y"}}, False), ({"unfinished": ["b"]}, False)):
        figures = figures_of(played(QUIET.inclusions, BOTH, **changed), QUIET, faults=0, islands=2)
        assert figures["heads_equal"] is is_equal
