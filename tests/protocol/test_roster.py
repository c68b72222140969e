"""What makes a roster valid, which of two is in force, who leads the next one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ALL_SPANS, ORGANISER, RUN, peer_id, run_rules, sign_as, verify
from hypothesis import given
from hypothesis import strategies as st
from made import certify, child_of, founding, goodbye, ids, member, roster_1, roster_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import sha256
from p2p_diloco.protocol.ballot import ballot_number
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.messages import RosterReply, decode_message, encode_message
from p2p_diloco.protocol.roster import (
    CertifiedRoster,
    Roster,
    check_certificate,
    check_child,
    check_founding,
    counted_members,
    founding_roster,
    founding_statement,
    is_quotable,
    lead_order,
    most_included,
    reducers,
    seniority,
    votes_needed,
)
from p2p_diloco.protocol.wire import MOST_COUNTED

PARENT = roster_of(4)
A, B, C, D = ids(4)


def child(**changes: object) -> Roster:
    return replace(child_of(PARENT, PARENT.members), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num", "level", "needed"),
    [(1, 0, 1), (2, 0, 2), (3, 0, 2), (4, 0, 3), (8, 0, 5), (8, 1, 2), (5, 1, 2), (1, 1, 1), (8, 2, 1), (100, 2, 13)],
)
def test_a_majority_certifies_and_later_ever_smaller_shares(num: int, level: int, needed: int) -> None:
    assert votes_needed(num, level) == needed


@given(st.integers(1, 500))
def test_two_majorities_always_share_a_member(num: int) -> None:
    assert 2 * votes_needed(num, 0) > num


def test_a_majority_of_the_parent_makes_a_child_valid() -> None:
    check_certificate(certify(child(), [A, B, C]), PARENT, verify)


def test_too_few_votes_are_refused() -> None:
    with pytest.raises(PeerError, match="has 2 votes of the 4 that count; 3 are needed"):
        check_certificate(certify(child(), [A, B]), PARENT, verify)


def test_votes_of_strangers_are_refused() -> None:
    with pytest.raises(PeerError, match="could not give or did not sign"):
        check_certificate(certify(child(), [A, B, C, peer_id("eve")]), PARENT, verify)


def test_a_forged_vote_is_refused() -> None:
    sound = certify(child(), [A, B, C])
    votes = ((A, bytes(64)), *(vote for vote in sound.votes if vote[0] != A))
    with pytest.raises(PeerError, match="could not give or did not sign"):
        check_certificate(replace(sound, votes=votes), PARENT, verify)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parent": sha256(b"other")}, "names another parent"),
        ({"run": sha256(b"other")}, "belongs to another run"),
        ({"genesis": sha256(b"other")}, "belongs to another run"),
        ({"k": 7}, "does not follow roster 1"),
        ({"epoch": 1}, "does not follow epoch 0"),
        ({"level": 1}, "does not follow epoch 0"),
        ({"level": 13, "epoch": 1}, "says level 13, more than 12"),
        ({"members": ()}, "has no members"),
        ({"members": (member(A), member(A))}, "lists a peer twice"),
    ],
)
def test_a_child_must_follow_its_parent(changes: dict[str, object], text: str) -> None:
    with pytest.raises(PeerError, match=text):
        check_certificate(certify(child(**changes), [A, B, C, D]), PARENT, verify)


@pytest.mark.parametrize(
    ("field", "text"), [("cycle", "is from cycle 4, before its parent's 5"), ("included_total", "counts fewer")]
)
def test_nothing_falls_along_a_chain(field: str, text: str) -> None:
    parent = replace(PARENT, **{field: 5})  # type: ignore[arg-type]
    later = replace(child_of(parent, parent.members), **{field: 4})  # type: ignore[arg-type]
    with pytest.raises(PeerError, match=text):
        check_certificate(certify(later, [A, B, C]), parent, verify)


def test_a_quoted_good_bye_lowers_the_majority() -> None:
    quoting = child(goodbyes=(goodbye(C, parent=PARENT), goodbye(D, parent=PARENT)))
    check_certificate(certify(quoting, [A, B]), PARENT, verify)
    with pytest.raises(PeerError, match="could not give"):
        check_certificate(certify(quoting, [A, B, C]), PARENT, verify)


def test_a_good_bye_that_was_not_signed_is_refused() -> None:
    forged = replace(goodbye(C, parent=PARENT), signature=bytes(64))
    with pytest.raises(PeerError, match="did not sign"):
        check_certificate(certify(child(goodbyes=(forged,)), [A, B]), PARENT, verify)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"promised": 5}, True),
        ({"promised": 6}, False),
        ({"voted": True}, False),
        ({"parent": sha256(b"another branch")}, False),
        ({"parent": sha256(b"an older one"), "k": 0, "voted": True}, True),
    ],
)
def test_a_good_bye_counts_only_where_the_leaver_cannot_have_voted(changes: dict[str, object], expected: bool) -> None:
    word = replace(goodbye(D, parent=PARENT), **changes)  # type: ignore[arg-type]
    word = replace(word, signature=sign_as(D, word.statement()))
    assert is_quotable(word, PARENT, PARENT.digest(), 5) is expected
    certified = certify(child(goodbyes=(word,)), [A, B], ballot=5)
    if expected:
        check_certificate(certified, PARENT, verify)
    else:
        with pytest.raises(PeerError, match="whose vote may have counted already"):
            check_certificate(certified, PARENT, verify)


def test_good_byes_do_not_count_in_the_degraded_way() -> None:
    words = [goodbye(peer, parent=PARENT) for peer in ids(4)]
    assert counted_members(PARENT, words, 0) == frozenset()
    assert counted_members(PARENT, words, 1) == frozenset(ids(4))
    degraded = child(level=1, epoch=1)
    assert degraded.is_degraded()
    check_certificate(certify(degraded, [D]), PARENT, verify)


def test_a_good_bye_of_an_earlier_incarnation_changes_nothing() -> None:
    assert counted_members(PARENT, [goodbye(A, parent=PARENT, incarnation=0)], 0) == frozenset(ids(4))


def test_a_founding_roster_is_signed_by_the_organiser() -> None:
    check_founding(founding(), RUN, ORGANISER, verify)
    with pytest.raises(PeerError, match="not signed by the organiser"):
        check_founding(replace(founding(), votes=((ORGANISER, bytes(64)),)), RUN, ORGANISER, verify)
    with pytest.raises(PeerError, match="belongs to another run"):
        check_founding(founding(), sha256(b"other"), ORGANISER, verify)
    with pytest.raises(PeerError, match="not the first link"):
        check_founding(roster_1(2), RUN, ORGANISER, verify)


def test_of_a_run_that_names_its_founder_nobody_else_signs_a_second_beginning() -> None:
    (founder,) = founding().roster.members
    check_founding(founding(), RUN, ORGANISER, verify, founder.peer)
    with pytest.raises(PeerError, match="may found this run"):
        check_founding(founding(), RUN, ORGANISER, verify, ORGANISER)


def test_a_run_founded_before_its_round_0_begins_in_cycle_0() -> None:
    roster = founding_roster(RUN, sha256(b"genesis"), member(A), cycle=-3)
    assert (roster.k, roster.cycle, roster.members) == (0, 0, (member(A),))
    signature = sign_as(ORGANISER, founding_statement(roster.digest()))
    check_founding(CertifiedRoster(roster=roster, ballot=0, votes=((ORGANISER, signature),)), RUN, ORGANISER, verify)


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_a_child_is_senior_to_its_parent(more: int, cycles: int, level: int) -> None:
    later = child(included_total=PARENT.included_total + more, cycle=PARENT.cycle + cycles, level=level)
    assert seniority(later) > seniority(PARENT)


def test_of_two_branches_the_one_with_more_contributions_wins() -> None:
    short_but_busy, long_but_idle = child(included_total=9), child(k=99)
    assert seniority(short_but_busy) > seniority(long_but_idle)
    twins = [child(regrid=1), child(regrid=2)]
    assert max(twins, key=seniority).digest() == min(twin.digest() for twin in twins)


def test_members_are_found_by_peer() -> None:
    assert PARENT.member(B) == member(B)
    assert PARENT.member(peer_id("stranger")) is None
    assert PARENT.position(B) == 1
    assert PARENT.position(peer_id("stranger")) is None


@given(st.integers(0, 10_000))
def test_leads_are_those_who_can_be_dialled_then_the_helper_then_anybody(round_index: int) -> None:
    roster = replace(PARENT, members=(member(A), member(B), member(C, dialable=False), member(D, dialable=False)))
    order = lead_order(roster, round_index)
    assert len(order) == LEAD_TURNS
    assert set(order[:-2]) == {A, B}
    assert order[-2] == peer_id("boot"), "should nobody who can be dialled be left, the helper sees the others"
    assert order[-1] in roster.peers()
    assert set(lead_order(replace(roster, helper=None), round_index)[:-1]) == {A, B}


def test_every_member_gets_the_last_turn_some_day() -> None:
    roster = replace(PARENT, members=(member(A), member(B, dialable=False), member(C, dialable=False)))
    assert {lead_order(roster, r)[-1] for r in range(50)} == {A, B, C}
    assert {lead_order(PARENT, r)[0] for r in range(50)} == {A, B, C, D}


def test_the_hub_leads_and_reduces_while_nobody_can_be_dialled() -> None:
    hidden = roster_of(3, dialable=False)
    assert hidden.hub() == peer_id("boot")
    assert reducers(hidden) == (peer_id("boot"),)
    assert set(lead_order(hidden, 1)[:-1]) == {peer_id("boot")}
    assert PARENT.hub() is None
    orphans = replace(hidden, helper=None)
    assert reducers(orphans) == ()
    assert set(lead_order(orphans, 1)) <= orphans.peers()


def test_a_lone_hidden_member_reduces_itself_and_the_hub_leads() -> None:
    lone = roster_of(1, dialable=False)
    assert reducers(lone) == (A,)
    assert lead_order(lone, 1) == (peer_id("boot"),) * 3 + (A,)


@pytest.mark.parametrize("more", [2 * len(ALL_SPANS) * 4 + 1, (1 << 62) - 1])
def test_a_lead_cannot_write_a_sum_that_nobody_can_have_made(more: int) -> None:
    rules, ballot = run_rules(), ballot_number(3, 0)
    most = child(cycle=1, included_total=2 * len(ALL_SPANS) * 4)
    check_child(most, PARENT, ballot, verify, rules)
    with pytest.raises(PeerError, match="since roster 1, which counts 0, at most 40 can have come"):
        check_child(replace(most, included_total=more), PARENT, ballot, verify, rules)


def test_a_roster_is_from_no_later_cycle_than_its_ballot() -> None:
    check_child(child(cycle=5), PARENT, ballot_number(10, 0), verify, run_rules())
    with pytest.raises(PeerError, match="is from cycle 6, but its ballot from cycle 5"):
        check_child(child(cycle=6), PARENT, ballot_number(11, 3), verify, run_rules())


def test_a_sum_at_the_end_of_its_range_stays_there_and_makes_frames_that_can_be_read() -> None:
    full = replace(PARENT, included_total=MOST_COUNTED)
    assert most_included(full, 9, run_rules()) == MOST_COUNTED
    beyond = RosterReply(rosters=(certify(replace(full, included_total=MOST_COUNTED + 7), [A]),))
    assert decode_message(encode_message(beyond)) == RosterReply(rosters=(certify(full, [A]),)), (
        "signed and named by what is read"
    )
