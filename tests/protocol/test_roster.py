"""Rosters: their content, the electorate of the next one, validity, and leaders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from fake_run import ALL_SPANS, ORGANISER, RUN, ballot_number, peer_id, run_rules, sign_as, verify
from hypothesis import given
from hypothesis import strategies as st
from made import certify, child_of, founding, ids, member, roster_1, roster_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.clock import LEAD_TURNS
from p2p_diloco.protocol.wire.member import NO_PLACE, Member
from p2p_diloco.protocol.wire.roster import (
    MOST_LEADERS,
    MOST_VOTERS,
    CertifiedRoster,
    Roster,
    by_seniority,
    check_certificate,
    check_child,
    check_founding,
    founding_roster,
    founding_statement,
    is_majority,
    is_quarter,
    lead_order,
    reducers,
)

RULES = run_rules()
PARENT = roster_of(4)
A, B, C, D = ids(4)
BOOT = peer_id("boot")


def child(**changes: object) -> Roster:
    return replace(child_of(PARENT, PARENT.members), **changes)  # type: ignore[arg-type]


def listing(*members: Member) -> Roster:
    return replace(PARENT, members=members)


def fresh(peer: PeerId, since: int = 9) -> Member:
    """A member that trains and does not count yet."""
    return member(peer, counts=False, since=since)


def bootstrap(since: int = 0) -> Member:
    return member(BOOT, counts=False, trains=False, since=since)


# -- the electorate

ELECTORATES: list[tuple[str, list[Member], set[PeerId]]] = [
    ("a bootstrap alone", [bootstrap()], {BOOT}),
    ("a bootstrap and two fresh ones", [bootstrap(), fresh(A), fresh(B)], {BOOT}),
    ("a bootstrap and a crowd of fresh ones", [bootstrap(), *map(fresh, ids(8))], {BOOT}),
    ("a founder and a fresh one", [member(A), fresh(B)], {A}),
    ("a founder and two fresh ones", [member(A), fresh(B), fresh(C)], {A}),
    ("a bootstrap, one that counts and a fresh one", [bootstrap(), member(A), fresh(B)], {BOOT, A, B}),
    ("one that counts, a bootstrap, a crowd", [bootstrap(), member(A), *map(fresh, (C, D)), fresh(B, 8)], {BOOT, A, B}),
    ("two that count and a bootstrap", [member(A), member(B), bootstrap()], {A, B, BOOT}),
    ("two that count, a bootstrap and a fresh one", [member(A), member(B), fresh(C), bootstrap(9)], {A, B, BOOT}),
    ("two that count and a fresh one", [member(A), member(B), fresh(C)], {A, B, C}),
    ("two that count and two fresh ones", [member(A), member(B), fresh(C), fresh(D, 8)], {A, B, D}),
    ("three that count, a fresh one and a bootstrap", [*map(member, (A, B, C)), fresh(D), bootstrap()], {A, B, C}),
    ("nobody counts and there is no bootstrap", [fresh(A), fresh(B), fresh(C), fresh(D, 10)], {A, B, C}),
    ("one that does not count", [fresh(A)], {A}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("members", "voters"), [case[1:] for case in ELECTORATES], ids=[case[0] for case in ELECTORATES]
)
def test_the_longest_listed_members_that_count_vote(members: list[Member], voters: set[PeerId]) -> None:
    assert listing(*members).voters == voters


def test_of_forty_members_that_count_the_thirty_two_longest_listed_vote() -> None:
    crowd = [member(peer_id(f"m{number}"), since=number) for number in range(40)]
    assert listing(*reversed(crowd)).voters == {one.peer for one in crowd[:MOST_VOTERS]}


MEMBERS = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.integers(0, 20)),
    min_size=1,
    max_size=12,
)


def mixed(drawn: list[tuple[bool, bool, int]], *, has_bootstrap: bool) -> Roster:
    members = [
        member(peer_id(f"m{n}"), counts=counts, reduces=reduces, since=since)
        for n, (counts, reduces, since) in enumerate(drawn)
    ]
    return listing(*members, *([bootstrap()] if has_bootstrap else []))


@given(MEMBERS, st.booleans())
def test_there_is_always_a_voter_and_fresh_identities_are_never_half_of_them(
    drawn: list[tuple[bool, bool, int]], has_bootstrap: bool
) -> None:
    roster = mixed(drawn, has_bootstrap=has_bootstrap)
    assert 0 < len(roster.voters) <= MOST_VOTERS
    trusted = {m.peer for m in roster.members if m.counts or not m.trains}
    if trusted:
        assert 2 * len(roster.voters & trusted) > len(roster.voters)
    crowded = replace(roster, members=(*roster.members, *(fresh(peer_id(f"sybil {n}"), 99) for n in range(50))))
    if trusted:
        assert not is_majority(crowded, crowded.peers() - trusted)


@given(MEMBERS, st.booleans(), st.randoms())
def test_who_votes_does_not_depend_on_the_order_of_the_members(
    drawn: list[tuple[bool, bool, int]], has_bootstrap: bool, chance: object
) -> None:
    roster = mixed(drawn, has_bootstrap=has_bootstrap)
    shuffled = list(roster.members)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert replace(roster, members=tuple(shuffled)).voters == roster.voters


def test_no_peer_chooses_the_seniority_of_members_listed_in_one_cycle() -> None:
    same = [member(peer) for peer in ids(8)]
    orders = {tuple(m.peer for m in by_seniority(same, sha256(b"run %d" % n))) for n in range(20)}
    assert len(orders) > 10
    older, younger = member(A, since=3), member(B, since=4)
    assert by_seniority([younger, older], RUN) == [older, younger]


@given(MEMBERS, st.booleans(), st.data())
def test_two_majorities_always_share_a_voter(
    drawn: list[tuple[bool, bool, int]], has_bootstrap: bool, data: st.DataObject
) -> None:
    roster = mixed(drawn, has_bootstrap=has_bootstrap)
    peers = sorted(roster.peers())
    one, other = (data.draw(st.sets(st.sampled_from(peers))) for _ in range(2))
    if is_majority(roster, one) and is_majority(roster, other):
        assert one & other & roster.voters


def test_a_majority_is_the_same_by_places_and_by_peers() -> None:
    roster = listing(fresh(D), member(A), member(B), member(C))
    assert roster.voter_places == {1, 2, 3}
    for places, num, is_enough in (({0, 1}, 1, False), ({1, 2}, 2, True), ({0}, 0, False), ({1, 2, 3}, 3, True)):
        assert roster.num_voters(places) == num
        assert roster.has_majority(places) is is_enough
        assert is_majority(roster, {roster.members[place].peer for place in places}) is is_enough


EIGHT = [member(peer) for peer in ids(8)]
QUARTERS: list[tuple[str, list[Member], Iterable[PeerId], bool]] = [
    ("two of eight voters", EIGHT, ids(2), True),
    ("one of eight voters", EIGHT, ids(1), False),
    ("one of four voters", EIGHT[:4], ids(1), True),
    ("one of five voters", EIGHT[:5], ids(1), False),
    ("one of three voters", EIGHT[:3], ids(1), True),
    ("nobody", EIGHT[:3], [], False),
    ("strangers", EIGHT[:3], [BOOT, D], False),
    ("one of four that do not vote, no voter", [*EIGHT[:3], *map(fresh, ids(7)[3:])], ids(4)[3:], False),
    ("two of seven members, no voter", [*EIGHT[:3], *map(fresh, ids(7)[3:])], ids(5)[3:], True),
    ("a bootstrap that is the only voter", [bootstrap(), *map(fresh, ids(3))], [BOOT], True),
    ("a crowd, and too few of the voters", [*EIGHT[:5], *map(fresh, ids(8)[5:])], [A, *ids(8)[5:]], False),
]


@pytest.mark.parametrize(
    ("members", "peers", "expected"), [case[1:] for case in QUARTERS], ids=[case[0] for case in QUARTERS]
)
def test_a_quarter_of_the_electorate_or_of_the_members_where_none_of_it_is_left(
    members: list[Member], peers: Iterable[PeerId], expected: bool
) -> None:
    assert is_quarter(listing(*members), set(peers)) is expected


# -- what makes a child valid


def check(certified: CertifiedRoster, parent: Roster = PARENT) -> None:
    check_certificate(certified, parent, verify, RULES)


def test_a_majority_of_the_parent_makes_a_child_valid() -> None:
    check(certify(child(), [A, B, C]))


def test_too_few_votes_are_refused() -> None:
    with pytest.raises(PeerError, match="has 2 votes of the 4 that count; more than half are needed"):
        check(certify(child(), [A, B]))


def test_votes_of_members_outside_the_electorate_make_no_majority() -> None:
    parent = listing(member(A), member(B), member(C), fresh(D))
    one_voter = certify(child_of(parent, parent.members), [A, D])
    with pytest.raises(PeerError, match="has 1 votes of the 3 that count"):
        check(one_voter, parent)
    check(certify(child_of(parent, parent.members), [A, B, D]), parent)


def test_votes_of_strangers_are_refused() -> None:
    with pytest.raises(PeerError, match="could not give or did not sign"):
        check(certify(child(), [A, B, C, peer_id("eve")]))


def test_a_forged_vote_is_refused() -> None:
    sound = certify(child(), [A, B, C])
    votes = ((A, bytes(64)), *(vote for vote in sound.votes if vote[0] != A))
    with pytest.raises(PeerError, match="could not give or did not sign"):
        check(replace(sound, votes=votes))


def test_a_vote_for_another_ballot_is_refused() -> None:
    with pytest.raises(PeerError, match="could not give or did not sign"):
        check(replace(certify(child(), [A, B, C], ballot=5), ballot=6))


def test_a_vote_counts_once() -> None:
    sound = certify(child(), [A, B])
    with pytest.raises(PeerError, match="more than half are needed"):
        check(replace(sound, votes=(*sound.votes, sound.votes[0])))


def degraded(**changes: object) -> Roster:
    return replace(child(degraded=True, cycle=RULES.stalled_cycles), **changes)  # type: ignore[arg-type]


STALLED_BALLOT = ballot_number(2 * RULES.stalled_cycles, 0)


def test_a_degraded_roster_needs_one_vote_of_any_member() -> None:
    check(certify(degraded(), [D], STALLED_BALLOT))
    for voters, text in (([], "has 0 votes"), ([peer_id("eve")], "could not give or did not sign")):
        with pytest.raises(PeerError, match=text):
            check(certify(degraded(), voters, STALLED_BALLOT))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parent": sha256(b"other")}, "names another parent"),
        ({"run": sha256(b"other")}, "belongs to another run"),
        ({"genesis": sha256(b"other")}, "belongs to another run"),
        ({"k": 7}, "does not follow roster 1"),
        ({"members": ()}, "has no members"),
        ({"members": (member(A), member(A))}, "lists a peer twice"),
        ({"members": (bootstrap(), member(C, trains=False))}, "lists more than one member that does not train"),
        ({"members": (member(A, reduces=False), member(B))}, "lists members that do not reduce before some that do"),
        ({"members": (member(A, since=1), member(B))}, "wrong cycle for the listing of a member"),
        (
            {"members": (member(A), member(peer_id("eve"), since=9))},
            "wrong cycle for the listing of a member",
        ),
        ({"height": 11}, "claims 11 entries, but at most 10 are possible"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_child_must_follow_its_parent(changes: dict[str, object], text: str) -> None:
    with pytest.raises(PeerError, match=text):
        check(certify(child(**changes), [A, B, C, D]))


@pytest.mark.parametrize(
    ("field", "text"),
    [("cycle", "is from cycle 4, before its parent's 5"), ("height", "has absorbed fewer entries than its parent")],
)
def test_height_and_cycle_never_fall_along_a_chain(field: str, text: str) -> None:
    parent = replace(PARENT, **{field: 5})  # type: ignore[arg-type]
    later = replace(child_of(parent, parent.members), **{field: 4})  # type: ignore[arg-type]
    with pytest.raises(PeerError, match=text):
        check(certify(later, [A, B, C]), parent)


@pytest.mark.parametrize("more", [1, (1 << 62) - 1])
def test_a_leader_cannot_claim_an_impossible_height(more: int) -> None:
    ballot, most = ballot_number(3, 0), len(ALL_SPANS) * (1 + 2)
    check_child(child(cycle=1, height=most), PARENT, ballot, RULES)
    with pytest.raises(PeerError, match="but at most 15 are possible"):
        check_child(child(cycle=1, height=most + more), PARENT, ballot, RULES)


def test_a_roster_is_never_dated_after_its_ballot() -> None:
    check_child(child(cycle=5), PARENT, ballot_number(10, 0), RULES)
    with pytest.raises(PeerError, match="is from cycle 6, but its ballot is from cycle 5"):
        check_child(child(cycle=6), PARENT, ballot_number(11, 3), RULES)


def test_a_newcomer_is_listed_since_its_rosters_cycle_and_a_new_incarnation_keeps_its_own() -> None:
    again = member(A, incarnation=2)
    check_child(child(cycle=5, members=(again, member(BOOT, since=5))), PARENT, ballot_number(10, 0), RULES)


def test_only_the_founder_named_in_the_manifest_is_listed_without_training() -> None:
    named = replace(RULES, founder=BOOT)
    check_child(child(members=(bootstrap(), member(A))), PARENT, 0, named)
    with pytest.raises(PeerError, match="does not train and did not found the run"):
        check_child(child(members=(member(A, trains=False), member(B))), PARENT, 0, named)


def test_a_peer_that_the_manifest_does_not_list_is_on_no_roster() -> None:
    unlisted = (*PARENT.members, member(BOOT, counts=False))
    with pytest.raises(PeerError, match="names a peer that the manifest does not list"):
        check_child(child(members=unlisted), PARENT, 0, replace(RULES, listed=PARENT.peers()))
    check_child(child(), PARENT, 0, replace(RULES, listed=frozenset({A})))  # the founder need not be listed


def test_a_degraded_roster_is_valid_only_after_a_stall() -> None:
    check_child(degraded(), PARENT, STALLED_BALLOT, RULES)
    with pytest.raises(PeerError, match="is degraded 2 cycles after its parent; a stall takes 3"):
        check_child(degraded(cycle=2), PARENT, STALLED_BALLOT, RULES)


def test_a_degraded_roster_lists_no_new_members_and_makes_none_count() -> None:
    parent = listing(member(A), fresh(B, since=0))
    for members in ((member(A), member(C, since=3)), (member(A), member(B))):
        later = child_of(parent, members, degraded=True, cycle=3)
        with pytest.raises(PeerError, match="is degraded, but lists members that its parent does not list or"):
            check_child(later, parent, STALLED_BALLOT, RULES)


# -- the founding


def test_a_founding_roster_is_signed_by_the_organiser() -> None:
    check_founding(founding(), RUN, ORGANISER, verify)
    with pytest.raises(PeerError, match="not signed by the organiser"):
        check_founding(replace(founding(), votes=((ORGANISER, bytes(64)),)), RUN, ORGANISER, verify)
    with pytest.raises(PeerError, match="belongs to another run"):
        check_founding(founding(), sha256(b"other"), ORGANISER, verify)
    with pytest.raises(PeerError, match="not the first link"):
        check_founding(roster_1(2), RUN, ORGANISER, verify)


@pytest.mark.parametrize("changes", [{"height": 7}, {"k": 1}, {"degraded": True}, {"members": (fresh(A),)}])
def test_a_founding_roster_holds_nothing_that_its_founder_could_choose(changes: dict[str, object]) -> None:
    roster = replace(founding_roster(RUN, sha256(b"genesis"), member(A)), **changes)  # type: ignore[arg-type]
    signature = sign_as(ORGANISER, founding_statement(roster.digest()))
    with pytest.raises(PeerError, match="not the first link of a chain"):
        check_founding(
            CertifiedRoster(roster=roster, ballot=0, votes=((ORGANISER, signature),)), RUN, ORGANISER, verify
        )


def test_only_the_named_founder_can_found_a_run() -> None:
    (founder,) = founding().roster.members
    check_founding(founding(), RUN, ORGANISER, verify, founder.peer)
    with pytest.raises(PeerError, match="may found this run"):
        check_founding(founding(), RUN, ORGANISER, verify, ORGANISER)


@pytest.mark.parametrize("trains", [True, False])
def test_a_founder_reduces_and_counts_from_the_founding_if_it_trains(trains: bool) -> None:
    roster = founding_roster(RUN, sha256(b"genesis"), member(A, reduces=False, counts=False, trains=trains), cycle=4)
    assert roster.members == (member(A, since=4, counts=trains, trains=trains, place=NO_PLACE),)
    assert roster.bootstrap == (None if trains else A)
    assert roster.voters == {A}


def test_a_run_founded_before_its_round_0_begins_in_cycle_0() -> None:
    roster = founding_roster(RUN, sha256(b"genesis"), member(A), cycle=-3)
    assert (roster.k, roster.cycle, roster.members) == (0, 0, (member(A, place=NO_PLACE),))
    signature = sign_as(ORGANISER, founding_statement(roster.digest()))
    check_founding(CertifiedRoster(roster=roster, ballot=0, votes=((ORGANISER, signature),)), RUN, ORGANISER, verify)


# -- places, reducers, leaders


def test_members_are_found_by_peer() -> None:
    assert PARENT.member(B) == member(B)
    assert PARENT.member(peer_id("stranger")) is None
    assert PARENT.position(B) == 1
    assert PARENT.position(peer_id("stranger")) is None


def test_the_size_of_a_roster_is_its_size_in_a_message() -> None:
    one, two = (certify(child(), voters).num_bytes() for voters in ([A], [A, B]))
    assert two - one == 32 + 64


def test_all_members_reduce_if_none_is_reachable() -> None:
    assert reducers(listing(member(A), member(B), member(C, reduces=False))) == (A, B)
    assert reducers(listing(member(A, reduces=False), member(B, reduces=False))) == (A, B)


def test_reducers_lead_and_voters_among_them_first() -> None:
    crowd = [member(peer_id(f"m{n}"), counts=n < 20, reduces=n >= 15, since=n) for n in range(40)]
    both = {m.peer for m in crowd[15:20]}
    leaders = listing(*crowd).leaders
    assert len(leaders) == MOST_LEADERS
    assert both < leaders <= {m.peer for m in crowd if m.reduces}
    assert len(listing(*(member(m.peer) for m in crowd[:20])).leaders) == MOST_LEADERS
    assert PARENT.leaders == {A, B, C, D}


@given(st.integers(0, 10_000))
def test_turns_go_to_reducers_then_to_a_non_member_founder_then_to_any_voter(round_index: int) -> None:
    roster = listing(member(A), member(B), member(C, reduces=False), member(D, reduces=False))
    order = lead_order(roster, round_index, BOOT)
    assert len(order) == LEAD_TURNS
    assert set(order[:-2]) == {A, B}
    assert order[-2] == BOOT, "should nobody who reduces be left, the founder sees the others"
    assert order[-1] in roster.voters
    assert set(lead_order(roster, round_index, A)[:-1]) == {A, B}


def test_exactly_the_voters_get_the_last_turn_in_some_cycle() -> None:
    roster = listing(*(member(peer, reduces=peer == A) for peer in ids(4)), fresh(peer_id("eve")))
    assert {lead_order(roster, r, A)[-1] for r in range(80)} == {A, B, C, D}
    assert {lead_order(PARENT, r, A)[0] for r in range(50)} == {A, B, C, D}


def test_any_member_can_lead_a_stalled_run() -> None:
    roster = listing(member(A), *(fresh(peer) for peer in (B, C, D)))
    orders = [lead_order(roster, r, A, degraded=True) for r in range(50)]
    assert {len(order) for order in orders} == {LEAD_TURNS}
    assert all(set(order) == {A, B, C, D} for order in orders), "four members have four turns"
    assert len({order[0] for order in orders}) == 4
    outside = [lead_order(roster, r, BOOT, degraded=True) for r in range(50)]
    assert all(order[-2] == BOOT for order in outside), "a founder that is no member may be all that they can reach"
    assert {peer for order in outside for peer in order} == {A, B, C, D, BOOT}
