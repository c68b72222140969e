"""A peer that leaves, and what it requests of others."""

from __future__ import annotations

from council import AFTER, AFTER_BEGIN, NEW, NOW, OTHER, ROSTER, TURN_SECONDS, A, B, Council, member_of_three, topics
from fake_run import ROUND_SECONDS, verify
from made import founding, membership_of, roster_1

from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.membership.membership import LEAVE_SECONDS
from p2p_diloco.protocol.wire.messages import RosterRequest


def test_a_declared_leaving_calls_a_ballot_at_once_in_which_the_leaver_votes() -> None:
    council = Council(roster_1(3))
    now = AFTER_BEGIN + 0.1
    council.tick(now)
    leaver = council.here[OTHER]
    word = leaver.leave(now)
    assert word.leaving
    assert verify(OTHER, word.statement(), word.signature)
    assert not leaver.local.ready
    assert not leaver.votes.may_name_parents(ROSTER.digest(), AFTER)
    assert not leaver.may_go(now)
    for peer in sorted(ROSTER.voters - {OTHER}):
        council.do(OTHER, [Send(to=peer, message=word, deadline=now + 9)], now)
    assert "good-bye" in topics(action for _, action in council.actions)
    for turn in range(LEAD_TURNS):
        council.tick(now + turn * TURN_SECONDS)
    assert council.in_force().peers() == ROSTER.peers() - {OTHER}
    assert not leaver.may_go(now), "the round in progress is under the roster that lists it"
    assert leaver.may_go(now + ROUND_SECONDS), "it is listed no more"


def test_a_leaving_peer_waits_for_eight_seconds_at_most() -> None:
    here = member_of_three()
    here.leave(NOW)
    assert not here.may_go(NOW + LEAVE_SECONDS - 0.1)
    assert here.may_go(NOW + LEAVE_SECONDS)
    assert membership_of(A).may_go(NOW)
    assert membership_of(NEW, founding(), roster_1(3)).may_go(NOW)


def test_a_leaving_peer_repeats_its_declaration_while_it_is_listed() -> None:
    here = member_of_three()
    assert here.declarations.own_news(NOW) is None, "there is nothing to say"
    here.leave(NOW)
    word = here.declarations.own_news(NOW)
    assert word is not None
    assert word.leaving


def test_a_peer_requests_later_rosters_and_earlier_certificates() -> None:
    here = member_of_three(A)
    ask = here.request_rosters(B, NOW)
    assert (ask.to, ask.message) == (B, RosterRequest(known=here.book.landmarks()))
    again = here.request_certificate(B, ROSTER.digest(), NOW)
    assert again.message == RosterRequest(known=(founding().roster.digest(),))
