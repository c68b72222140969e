"""Wall clocks that are far off are named with the amount, and nobody is blamed for another's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.node.clock_keeper import MISSET_SECONDS, ClockWatch

ME, ANN, BOB, CLEO = EVERYBODY = tuple(PeerId(sha256(name.encode())) for name in ("me", "ann", "bob", "cleo"))
HOURS = 3600.0


def test_a_clock_that_differs_from_most_others_is_named_once_with_the_amount() -> None:
    watch, name = ClockWatch(ME), short_peer_id(CLEO)
    behind = {ME: 0.0, ANN: 0.4, BOB: -2.0, CLEO: 2 * HOURS}
    said = f"the clock of {name} is 2 h 00 min behind those of 3 others"
    assert watch.look(behind, EVERYBODY) == [(CLEO, said)]
    assert watch.sentence == said
    assert watch.look({**behind, CLEO: 2 * HOURS + 3.0}, EVERYBODY) == []
    assert watch.look({**behind, CLEO: 0.0}, EVERYBODY) == []
    assert watch.sentence == ""


def test_this_machines_clock_comes_first_and_is_to_be_set_right() -> None:
    watch = ClockWatch(ME)
    watch.look({ME: -24 * HOURS, ANN: 0.0, BOB: 0.1}, EVERYBODY)
    assert watch.sentence == "the clock of this machine is 24 h 00 min ahead of those of 2 others; set it right"


def test_if_the_founders_clock_was_wrong_it_alone_is_named() -> None:
    """The run's time follows the founder's clock, so all others are as far from it."""
    watch = ClockWatch(ME)
    behind = {ANN: 0.0, ME: 600.0, BOB: 600.5, CLEO: 599.0}
    assert [peer for peer, _ in watch.look(behind, EVERYBODY)] == [ANN]
    assert watch.sentence.endswith("is 10 min 00 s ahead of those of 3 others")


@pytest.mark.parametrize(("mine", "theirs"), [(0.0, 2 * HOURS), (-HOURS, HOURS)])
def test_of_two_clocks_none_is_blamed(mine: float, theirs: float) -> None:
    watch = ClockWatch(ME)
    said = f"the clocks of this machine and {short_peer_id(ANN)} are 2 h 00 min apart; one of them is wrong"
    assert [sentence for _, sentence in watch.look({ME: mine, ANN: theirs}, EVERYBODY)] == [said]


def test_this_machines_clock_is_corrected_by_most_others_and_of_two_the_founders_counts() -> None:
    watch = ClockWatch(ME)
    watch.look({ME: 2 * HOURS, ANN: 0.0}, EVERYBODY, yields=False)
    assert watch.correction_seconds == 0.0
    watch.look({ME: 2 * HOURS, ANN: 0.0}, EVERYBODY)
    assert watch.correction_seconds == 2 * HOURS
    watch.look({ME: 2 * HOURS + 5.0, ANN: 0.0, BOB: 0.1}, EVERYBODY, yields=False)
    assert watch.correction_seconds == 2 * HOURS, "it does not follow every breath"
    watch.look({ME: 0.0, ANN: 0.0, BOB: 2 * HOURS}, EVERYBODY)
    assert watch.correction_seconds == 0.0


def test_any_number_of_strangers_proves_nothing_about_the_clocks_of_members() -> None:
    watch = ClockWatch(ME)
    strangers = {PeerId(sha256(bytes([n]))): 9 * HOURS for n in range(9)}
    said = watch.look({ME: 0.0, ANN: 0.1, BOB: 0.2, **strangers}, (ME, ANN, BOB))
    assert {peer for peer, _ in said} == strangers.keys()
    assert watch.correction_seconds == 0.0
    watch.look({ME: 0.0, ANN: 0.1, CLEO: 2 * HOURS, **strangers}, (ME, ANN, CLEO))
    assert watch.sentence.startswith(f"the clock of {short_peer_id(CLEO)} is"), "members come first"


def test_alone_there_is_nothing_to_compare_with() -> None:
    assert ClockWatch(ME).look({ME: 9 * HOURS}, EVERYBODY) == []


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=9), st.integers(0, 8))
def test_a_clock_that_agrees_with_half_of_the_others_is_never_named(clocks: list[float], place: int) -> None:
    peers = [PeerId(sha256(bytes([n]))) for n in range(len(clocks))]
    one = peers[place % len(peers)]
    mine = clocks[place % len(peers)]
    near = sum(abs(seconds - mine) <= MISSET_SECONDS for seconds in clocks) - 1
    named = {peer for peer, _ in ClockWatch(ME).look(dict(zip(peers, clocks, strict=True)), peers)}
    assert one not in named or 2 * near < len(clocks) - 1
