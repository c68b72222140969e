"""Streams that are not greeted: a few for each peer, a bound for all strangers, and a newcomer always gets in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.transport.rate_limit import MOST_BUCKETS
from p2p_diloco.transport.strangers import (
    BORNE_AT_ONCE,
    MOST_IN_ALL,
    MOST_OF_MEMBER,
    MOST_OF_ONE,
    Callers,
)


def peer_of(number: int) -> PeerId:
    return PeerId(sha256(b"caller", number.to_bytes(4, "little")))


ONE, OTHER = peer_of(0), peer_of(1000)


def fill(callers: Callers[int], num_peers: int) -> None:
    for number in range(num_peers):
        for stream in range(MOST_OF_ONE):
            callers.called(peer_of(number), MOST_OF_ONE * number + stream, 0.0, is_member=False)


def test_a_stranger_gets_eight_streams_and_a_member_sixteen() -> None:
    callers: Callers[int] = Callers()
    for peer, most, is_member in ((ONE, MOST_OF_ONE, False), (OTHER, MOST_OF_MEMBER, True)):
        greeted = [callers.called(peer, stream, 0.0, is_member=is_member).is_greeted for stream in range(most + 1)]
        assert greeted == [*[True] * most, False]


def test_a_stream_that_was_greeted_or_closed_makes_room() -> None:
    callers: Callers[int] = Callers()
    fill(callers, 1)
    callers.ended(ONE, 3)
    assert callers.called(ONE, 99, 0.0, is_member=False).is_greeted
    assert len(callers) == MOST_OF_ONE


def test_a_newcomer_gets_in_while_strangers_hold_all_places() -> None:
    callers: Callers[int] = Callers()
    fill(callers, MOST_IN_ALL // MOST_OF_ONE)
    newcomer = peer_of(99)
    for stream in (1000, 1001):
        answer = callers.called(newcomer, stream, 0.0, is_member=False)
        assert answer.is_greeted
        assert answer.dropped is not None
        assert answer.dropped < 1000, "a stream of one of those that hold the places"
    assert len(callers) == MOST_IN_ALL


def test_members_need_no_place_of_the_strangers_and_lose_none() -> None:
    callers: Callers[int] = Callers()
    callers.called(OTHER, 5000, 0.0, is_member=True)
    fill(callers, MOST_IN_ALL // MOST_OF_ONE + 2)
    assert callers.called(OTHER, 5001, 0.0, is_member=True).dropped is None
    assert len(callers) == MOST_IN_ALL + 2


def test_what_is_useless_is_borne_for_a_while_and_again_after_a_pause() -> None:
    callers: Callers[int] = Callers()
    borne = [callers.has_patience_with(ONE, 0.0) for _ in range(int(BORNE_AT_ONCE) + 1)]
    assert borne == [*[True] * int(BORNE_AT_ONCE), False]
    assert not callers.has_patience_with(ONE, 0.5)
    assert callers.has_patience_with(ONE, 10.0)


def test_there_is_no_patience_with_more_identities_than_are_remembered_but_they_may_greet() -> None:
    callers: Callers[int] = Callers()
    for number in range(MOST_BUCKETS):
        callers.has_patience_with(peer_of(number), 0.0)
    assert not callers.has_patience_with(peer_of(MOST_BUCKETS), 0.0)
    assert callers.called(peer_of(MOST_BUCKETS), 1, 0.0, is_member=False).is_greeted


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=400))
def test_no_order_of_calls_and_ends_exceeds_the_bounds(moves: list[tuple[int, bool]]) -> None:
    callers: Callers[int] = Callers()
    held: dict[int, PeerId] = {}
    members = {peer_of(number) for number in range(3)}
    for stream, (number, ends) in enumerate(moves):
        peer = peer_of(number)
        mine = [each for each, its in held.items() if its == peer]
        if ends and mine:
            callers.ended(peer, mine[0])
            del held[mine[0]]
            continue
        answer = callers.called(peer, stream, 0.1 * stream, is_member=peer in members)
        if answer.is_greeted:
            held[stream] = peer
        if answer.dropped is not None:
            del held[answer.dropped]
        assert len(callers) == len(held)
        of_strangers = [each for each in held.values() if each not in members]
        assert len(of_strangers) <= MOST_IN_ALL
        assert all(of_strangers.count(each) <= MOST_OF_ONE for each in of_strangers)
