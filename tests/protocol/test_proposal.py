"""The next roster as it follows from promises: who is dropped, listed, counts and reduces, and when one follows."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest
from fake_run import ALL_SPANS, ballot_number, peer_id, run_rules
from hypothesis import given, settings
from hypothesis import strategies as st
from made import NO_SIGNATURE, declaration, founding, ids, member, proof_of, roster_of

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.membership.proposal import (
    FEWEST_NEWCOMERS,
    FRESH_CYCLES,
    REDUCES_AFTER_CYCLES,
    REFRESH_CYCLES,
    is_bootstrap_needed,
    next_roster,
)
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import Promise, View
from p2p_diloco.protocol.wire.entry import pack_included
from p2p_diloco.protocol.wire.member import FULL_SHARE, NO_PLACE, Declaration, Member
from p2p_diloco.protocol.wire.roster import MOST_MEMBERS, Roster, check_child, grid_order

RULES = run_rules()
A, B, C, D, E, *_ = ids(8)
BOOT = peer_id("boot")
NEW = [peer_id(f"new {number}") for number in range(12)]
CYCLE = 20
FOUR = roster_of(4)


def ballot_in(cycle: int) -> int:
    return ballot_number(cycle * RULES.clock.num_fragments, 0)


def listing(*members: Member, **changes: object) -> Roster:
    return replace(FOUR, members=members, **changes)  # type: ignore[arg-type]


def fresh(peer: PeerId, **changes: object) -> Member:
    return member(peer, counts=False, **changes)  # type: ignore[arg-type]


def bootstrap(**changes: object) -> Member:
    return member(BOOT, counts=False, trains=False, **changes)  # type: ignore[arg-type]


def said(
    voter: PeerId,
    parent: Roster = FOUR,
    *,
    absent: Collection[PeerId] = (),
    heard: Collection[PeerId] | None = None,
    counting: Collection[PeerId] = (),
    idle: Collection[PeerId] = (),
    height: int = 0,
    declared: Iterable[Declaration] = (),
    cycle: int = CYCLE,
) -> Promise:
    """A promise of a voter that hears all members except those it would drop, unless specified otherwise."""

    def bitmap(named: Collection[PeerId]) -> bytes:
        return pack_included({n for n, m in enumerate(parent.members) if m.peer in named}, len(parent.members))

    return Promise(
        parent=parent.digest(),
        degraded=False,
        ballot=ballot_in(cycle),
        voted=None,
        view=View(
            absent=bitmap(absent),
            heard=bitmap(parent.peers() - set(absent) if heard is None else heard),
            counting=bitmap(counting),
            idle=bitmap(idle),
            height=height,
            declarations=tuple(declared),
        ),
        voter=voter,
        signature=NO_SIGNATURE,
    )


def child(
    parent: Roster,
    *promises: Promise,
    before: Roster | None = None,
    degraded: bool = False,
    rules: RunRules = RULES,
    founder: PeerId = BOOT,
) -> Roster:
    found = next_roster(parent, promises, rules, founder, before=before, degraded=degraded)
    assert found is not None
    check_child(found, parent, promises[0].ballot, rules)
    return found


def nothing_follows(
    parent: Roster,
    *promises: Promise,
    before: Roster | None = None,
    rules: RunRules = RULES,
    degraded: bool = False,
) -> bool:
    return next_roster(parent, promises, rules, BOOT, before=before, degraded=degraded) is None


def applies(peer: PeerId, **changes: object) -> Declaration:
    return declaration(peer, **{"cycle": CYCLE, **changes})


def listed(roster: Roster, peer: PeerId) -> Member:
    found = roster.member(peer)
    assert found is not None
    return found


# -- when there is a next roster at all


def test_no_roster_follows_without_promises_or_changes() -> None:
    assert nothing_follows(FOUR)
    assert nothing_follows(FOUR, said(A), said(B), said(C))
    assert nothing_follows(FOUR, said(A, height=9, counting=FOUR.peers()), said(B, height=9, counting=FOUR.peers()))


def test_the_grid_is_redrawn_every_sixty_four_cycles() -> None:
    words = [said(peer, cycle=REFRESH_CYCLES) for peer in (A, B, C)]
    refreshed = child(FOUR, *words)
    assert refreshed.cycle == REFRESH_CYCLES
    assert refreshed.members == grid_order(FOUR.members, FOUR.run, 1)
    assert nothing_follows(FOUR, *(said(peer, cycle=REFRESH_CYCLES - 1) for peer in (A, B, C)))
    later = [said(peer, refreshed, cycle=2 * REFRESH_CYCLES - 1) for peer in (A, B, C)]
    assert nothing_follows(refreshed, *later), "not before the next sixty-four"


@pytest.mark.parametrize(
    ("before", "said_by_each", "is_told"),
    [
        (6, (9, 9, 9), True),
        (6, (9, 9, 6), True),  # the lower median
        (6, (9, 6, 6), False),
        (6, (6, 6, 6), False),
        (5, (9, 9, 9), False),  # the roster in force already shows some
    ],
)
def test_the_first_entries_since_the_previous_roster_make_a_new_roster(
    before: int, said_by_each: tuple[int, int, int], is_told: bool
) -> None:
    """Otherwise a line that continues would be worth nothing next to another until the grid is redrawn."""
    parent = replace(FOUR, height=6)
    words = [said(peer, parent, height=height) for peer, height in zip((A, B, C), said_by_each, strict=True)]
    earlier = replace(FOUR, k=FOUR.k - 1, height=before)
    if not is_told:
        assert nothing_follows(parent, *words, before=earlier)
        return
    found = child(parent, *words, before=earlier)
    assert (found.members, found.height) == (parent.members, 9)
    later = [said(peer, found, height=12) for peer in (A, B, C)]
    assert nothing_follows(found, *later, before=parent), "once"


def test_the_first_entries_after_the_founding_make_no_roster() -> None:
    start = founding().roster
    assert nothing_follows(start, said(start.members[0].peer, start, height=9))


def test_each_grid_is_drawn_differently() -> None:
    parent = listing(*map(member, ids(8)))
    drawings = (REFRESH_CYCLES * number for number in range(1, 8))
    assert len({child(parent, *(said(p, parent, cycle=c) for p in ids(5))).members for c in drawings}) > 5


def test_members_keep_their_places_between_two_grids() -> None:
    order = listing(member(D), member(B), member(A), member(C))
    later = child(order, *(said(peer, order, declared=[applies(NEW[0], reachable=False)]) for peer in (A, B, C)))
    assert [m.peer for m in later.members] == [D, B, A, C, NEW[0]]


@pytest.mark.parametrize(
    ("heights", "expected"),
    [((4, 7, 7), 7), ((1, 7, 9), 7), ((7, 9), 7), ((0, 0, 0), 5), ((5, 1 << 60, 1 << 60), 5 + 22 * len(ALL_SPANS))],
)
def test_the_height_is_the_majoritys_within_the_possible_bounds(heights: tuple[int, ...], expected: int) -> None:
    parent, change = replace(FOUR, height=5), [applies(NEW[0])]
    words = [said(peer, parent, height=h, declared=change) for peer, h in zip(ids(4), heights, strict=False)]
    assert child(parent, *words).height == expected


def test_a_roster_that_follows_is_the_next_link_of_the_chain() -> None:
    later = child(FOUR, *(said(peer, declared=[applies(NEW[0])]) for peer in (A, B, C)))
    assert (later.k, later.parent, later.run) == (FOUR.k + 1, FOUR.digest(), FOUR.run)
    assert (later.genesis, later.degraded) == (FOUR.genesis, False)


def test_a_roster_has_the_cycle_of_its_ballot_and_is_never_before_its_parent() -> None:
    words = [said(peer, declared=[applies(NEW[0])]) for peer in (A, B, C)]
    assert child(FOUR, *words).cycle == CYCLE
    late = replace(FOUR, cycle=CYCLE + 1)
    assert child(late, *(said(peer, late, declared=[applies(NEW[0])]) for peer in (A, B, C))).cycle == CYCLE + 1


# -- dropping members


@pytest.mark.parametrize(
    ("num_promises", "num_absent", "is_dropped"), [(4, 2, False), (4, 3, True), (3, 2, False), (3, 3, True)]
)
def test_a_member_is_dropped_if_more_than_half_of_the_electorate_miss_it(
    num_promises: int, num_absent: int, is_dropped: bool
) -> None:
    five = listing(*map(member, ids(4)), fresh(E, reduces=False))
    words = [said(p, five, absent=[E] if n < num_absent else []) for n, p in enumerate(ids(num_promises))]
    if is_dropped:
        assert child(five, *words).peers() == set(ids(4))
    else:
        assert nothing_follows(five, *words)


def test_a_reachable_member_is_dropped_if_one_voter_misses_it_and_none_hears_it() -> None:
    quiet = FOUR.peers() - {D}
    missed, unheard, heard = (said(A, absent=[D]), said(B, heard=quiet), said(B))
    assert child(FOUR, missed, unheard, said(C, heard=quiet)).peers() == quiet
    assert nothing_follows(FOUR, missed, heard, said(C, heard=quiet))
    assert nothing_follows(FOUR, said(A, heard=quiet), unheard, said(C, heard=quiet)), "somebody must miss it"
    hidden = listing(*map(member, (A, B, C)), member(D, reduces=False))
    words = [replace(word, parent=hidden.digest()) for word in (missed, unheard, said(C, heard=quiet))]
    assert nothing_follows(hidden, *words), "who can only dial out need not be heard by all"


def test_a_leaving_member_is_dropped_if_one_voter_shows_its_declaration() -> None:
    assert child(FOUR, said(A), said(B, declared=[applies(D, leaving=True)]), said(C)).peers() == {A, B, C}


def test_a_leaving_declared_by_an_earlier_incarnation_drops_no_member() -> None:
    parent = listing(*map(member, (A, B, C)), member(D, incarnation=2))
    assert nothing_follows(parent, said(A, parent, declared=[applies(D, leaving=True)]), said(B, parent))


def test_a_bootstrap_cut_off_from_all_trainers_drops_no_member() -> None:
    lonely = listing(bootstrap(), fresh(A), fresh(B))
    assert nothing_follows(lonely, said(BOOT, lonely, absent=[A, B]))
    assert child(lonely, said(BOOT, lonely, absent=[A])).peers() == {BOOT, B}


def test_the_last_member_that_leaves_stays_on_the_roster() -> None:
    lone = listing(member(A))
    assert nothing_follows(lone, said(A, lone, declared=[applies(A, leaving=True)]))


# -- listing members


def test_one_voter_that_holds_an_application_is_enough() -> None:
    later = child(FOUR, said(A), said(B, declared=[applies(NEW[0], incarnation=3, share=5)]), said(C))
    assert listed(later, NEW[0]) == fresh(NEW[0], incarnation=3, since=CYCLE, reduces=False)


BAD_APPLICATIONS: list[tuple[str, Declaration]] = [
    ("of three cycles ago", applies(NEW[0], cycle=CYCLE - FRESH_CYCLES - 1)),
    ("of a cycle that is not near", applies(NEW[0], cycle=CYCLE + 2)),
    ("of who leaves again", applies(NEW[0], leaving=True)),
    ("of no incarnation", applies(NEW[0], incarnation=0)),
    ("of another who does not train", applies(NEW[0], trains=False)),
    ("of a peer that the manifest does not list", applies(NEW[1])),
]


@pytest.mark.parametrize("word", [case[1] for case in BAD_APPLICATIONS], ids=[case[0] for case in BAD_APPLICATIONS])
def test_an_invalid_application_is_ignored(word: Declaration) -> None:
    rules = replace(RULES, listed=FOUR.peers() | {NEW[0]})
    assert nothing_follows(FOUR, *(said(peer, declared=[word]) for peer in (A, B, C)), rules=rules)
    assert child(FOUR, said(A, declared=[applies(NEW[0])]), rules=rules).peers() == FOUR.peers() | {NEW[0]}


@pytest.mark.parametrize("cycle", [CYCLE - FRESH_CYCLES, CYCLE, CYCLE + 1])
def test_an_application_is_valid_for_two_cycles_and_a_clock_may_be_ahead(cycle: int) -> None:
    assert NEW[0] in child(FOUR, said(A, declared=[applies(NEW[0], cycle=cycle)])).peers()


def test_an_applicant_that_has_since_declared_its_leaving_is_not_listed() -> None:
    words = (said(A, declared=[applies(NEW[0])]), said(B, declared=[applies(NEW[0], leaving=True, cycle=CYCLE - 1)]))
    assert nothing_follows(FOUR, *words)


@pytest.mark.parametrize(("num_members", "quota"), [(1, 2), (4, 2), (14, 2), (15, 3), (40, 8)])
def test_one_roster_lists_two_newcomers_or_a_fifth_of_the_members(num_members: int, quota: int) -> None:
    parent = listing(*(member(peer_id(f"m{number}")) for number in range(num_members)))
    voters = [m.peer for m in parent.members]
    later = child(parent, *(said(peer, parent, declared=map(applies, NEW)) for peer in voters))
    assert len(later.members) == num_members + quota
    assert quota >= FEWEST_NEWCOMERS


def test_the_founder_lists_all_present_peers_at_once() -> None:
    boot = founding().roster
    later = child(boot, said(BOOT, boot, declared=map(applies, NEW)))
    assert later.peers() == {BOOT, *NEW}
    assert later.members == grid_order(later.members, later.run, 0)


def test_reachable_applicants_are_listed_first_and_others_in_an_order_that_no_peer_chooses() -> None:
    words = [applies(peer, reachable=number in (5, 8)) for number, peer in enumerate(NEW)]
    for declared in (words, words[::-1]):
        assert child(FOUR, said(A, declared=declared)).peers() - FOUR.peers() == {NEW[5], NEW[8]}
    chosen = set()
    for height in range(20):
        parent = replace(FOUR, height=height)
        later = child(parent, *(said(peer, parent, declared=map(applies, NEW)) for peer in (A, B, C)))
        chosen.add(frozenset(later.peers() - FOUR.peers()))
    assert len(chosen) > 10, "the draw depends on the parent"


def test_there_is_room_for_the_maximum_of_members_and_the_bootstrap() -> None:
    crowd = [member(peer_id(f"m{number}"), reduces=False) for number in range(MOST_MEMBERS - 3)]
    parent = listing(*crowd)
    voters = sorted(parent.voters)[:17]
    later = child(parent, *(said(peer, parent, declared=map(applies, [*NEW, BOOT])) for peer in voters))
    assert len(later.members) == MOST_MEMBERS - 1
    boot, hidden = applies(BOOT, trains=False), [applies(peer, reachable=False) for peer in NEW]
    full = child(parent, *(said(peer, parent, declared=[*hidden, boot]) for peer in voters))
    assert len(full.members) == MOST_MEMBERS
    assert full.bootstrap == BOOT


def test_a_full_roster_lists_no_new_members() -> None:
    crowd = [member(peer_id(f"m{number}"), reduces=False) for number in range(MOST_MEMBERS - 1)]
    parent = listing(bootstrap(), *crowd)
    assert len(parent.members) == MOST_MEMBERS
    words = [applies(peer, reachable=False) for peer in NEW]
    assert nothing_follows(parent, *(said(peer, parent, declared=words) for peer in sorted(parent.voters)[:17]))


# -- declarations of members


def test_a_new_incarnation_keeps_its_place_and_its_seniority() -> None:
    parent = listing(*map(member, (A, B, C)), member(D, since=3))
    later = child(parent, said(A, parent), said(B, parent, declared=[applies(D, incarnation=2)]), said(C, parent))
    assert later.members == (*parent.members[:3], replace(parent.members[3], incarnation=2))


def test_a_declaration_of_an_earlier_incarnation_changes_nothing() -> None:
    parent = listing(*map(member, (A, B, C)), member(D, incarnation=2))
    words = [said(peer, parent, declared=[applies(D, reachable=False, share=1)]) for peer in (A, B, C)]
    assert nothing_follows(parent, *words)


def test_an_old_declaration_of_this_incarnation_changes_nothing() -> None:
    """Each peer begins as one that only dials out: a voter that kept that declaration could take *reduces* from any."""
    old = applies(D, reachable=False, share=1, cycle=CYCLE - FRESH_CYCLES - 1)
    assert nothing_follows(FOUR, said(A), said(B, declared=[old]), said(C))


def test_the_newest_of_several_declarations_is_used() -> None:
    words = [applies(D, reachable=False, cycle=CYCLE - 1), applies(D, share=5), applies(D, share=2, cycle=CYCLE - 2)]
    for order in itertools.permutations(words):
        later = child(FOUR, *(said(p, declared=[one]) for p, one in zip((A, B, C), order, strict=True)))
        assert listed(later, D) == member(D, share=5)


def test_two_declarations_of_one_cycle_resolve_alike_in_any_order_of_promises() -> None:
    """A peer may change twice in a cycle; a leader must not choose which of its declarations counts."""
    one, other = said(A, declared=[applies(D, share=2)]), said(B, declared=[applies(D, share=5)])
    assert child(FOUR, one, other, said(C)) == child(FOUR, other, one, said(C))


@pytest.mark.parametrize(("before", "declared", "expected"), [(8, 7, 8), (8, 6, 6), (3, 4, 3), (3, 5, 5), (3, 0, 1)])
def test_a_share_changes_by_two_steps_or_not_at_all(before: int, declared: int, expected: int) -> None:
    parent = listing(*map(member, (A, B, C)), member(D, share=before))
    words = [said(A, parent, declared=[applies(D, share=declared), applies(NEW[0])]), said(B, parent), said(C, parent)]
    assert listed(child(parent, *words), D).share == expected
    only_share = said(A, parent, declared=[applies(D, share=declared)])
    assert nothing_follows(parent, only_share) is (before == expected)


# -- counting members


@pytest.mark.parametrize(("num_promises", "num_saying"), [(4, 3), (3, 2), (2, 2), (1, 1)])
def test_a_member_comes_to_count_if_more_than_half_of_the_promises_report_it(
    num_promises: int, num_saying: int
) -> None:
    parent = listing(*map(member, (A, B, C)), fresh(D))
    for enough in (True, False):
        num = num_saying if enough else num_saying - 1
        words = [said(p, parent, counting=[D] if n < num else []) for n, p in enumerate([A, B, C, D][:num_promises])]
        if enough:
            assert listed(child(parent, *words), D).counts
        else:
            assert nothing_follows(parent, *words)


def test_a_member_that_counts_keeps_counting_and_the_bootstrap_never_counts() -> None:
    parent = listing(bootstrap(), member(A), fresh(B))
    later = child(parent, *(said(peer, parent, counting=[BOOT, B]) for peer in (BOOT, A)))
    assert {m.peer for m in later.members if m.counts} == {A, B}


# -- the bootstrap


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], True),
        ([member(A), member(B)], True),
        ([member(A), member(B), fresh(C)], True),
        ([member(A), member(B), member(C)], False),
        ([member(A), member(B, reduces=False), member(C, reduces=False)], True),
        ([member(A), member(B), member(C, reduces=False), fresh(D)], False),
        ([member(A, reduces=False), member(B, reduces=False), *map(member, (C, D))], False),
    ],
)
def test_the_bootstrap_is_needed_while_fewer_than_three_others_count_or_fewer_than_two_reduce(
    others: list[Member], expected: bool
) -> None:
    assert is_bootstrap_needed(others) is expected
    parent = listing(*sorted([bootstrap(), *others], key=lambda m: not m.reduces))
    stays = nothing_follows(parent, *(said(m.peer, parent) for m in parent.members if m.peer in parent.voters))
    assert stays is expected


def test_the_bootstrap_comes_back_when_it_is_needed_and_it_alone_need_not_train() -> None:
    three = listing(member(A), member(B), member(C))
    words = [applies(BOOT, trains=False), applies(NEW[0])]
    assert child(three, said(A, three, declared=words)).peers() == {A, B, C, NEW[0]}
    two = listing(member(A), member(B), fresh(C))
    later = child(two, said(A, two, declared=[*words, *map(applies, NEW[1:4])]))
    assert later.bootstrap == BOOT
    assert len(later.members) == 6, "it takes no newcomer's place"


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("num_reducing", [1, 2])
def test_a_listed_bootstrap_reduces_at_once_without_proofs(num_reducing: int, reachable: bool) -> None:
    parent = listing(member(A), member(B, reduces=num_reducing == 2), fresh(C, reduces=False))
    word = applies(BOOT, trains=False, reachable=reachable)
    assert listed(child(parent, said(A, parent, declared=[word])), BOOT) == bootstrap(since=CYCLE)


def test_a_founder_that_trains_is_treated_like_any_newcomer() -> None:
    later = child(FOUR, said(A, declared=[applies(BOOT), *map(applies, NEW)]))
    assert len(later.members) == 6
    assert later.bootstrap is None


def test_the_bootstrap_stays_if_the_reducers_lose_their_role() -> None:
    parent = listing(bootstrap(), member(A), member(B), *(member(peer, reduces=False) for peer in (C, D)))
    without = listing(*parent.members[1:])
    words = [said(peer, without, idle=[A, B]) for peer in (A, B, C)]
    assert nothing_follows(without, *words), "they keep it, since nobody else can be reached by all"
    words = [said(peer, parent, idle=[A, B]) for peer in (A, B, C)]
    later = child(parent, *words)
    assert later.bootstrap == BOOT
    assert listed(later, BOOT).reduces


def test_nobody_loses_its_role_if_nobody_else_can_reduce() -> None:
    """Else all members would average, and behind routers few of them are linked with each other."""
    parent = listing(bootstrap(), member(A), *(member(peer, reduces=False) for peer in (B, C, D)))
    assert nothing_follows(parent, *(said(p, parent, idle=[A, BOOT]) for p in (A, B, C)))
    later = child(parent, *(said(p, parent, idle=[A]) for p in (A, B, C)))
    assert {m.peer for m in later.members if m.reduces} == {BOOT}


def test_the_bootstrap_stays_if_all_reachable_members_have_lost_their_role() -> None:
    parent = listing(bootstrap(), *(member(peer, reduces=False) for peer in (A, B, C)))
    assert nothing_follows(
        parent, *(said(p, parent, idle=[A, B], declared=[applies(A), applies(B)]) for p in (A, B, C))
    )


# -- reducers


def reducing(roster: Roster) -> set[PeerId]:
    return {m.peer for m in roster.members if m.reduces}


@pytest.mark.parametrize(("age", "expected"), [(REDUCES_AFTER_CYCLES - 1, False), (REDUCES_AFTER_CYCLES, True)])
def test_a_member_reduces_after_eight_cycles_while_two_others_reduce(age: int, expected: bool) -> None:
    parent = listing(member(A), member(B), member(C, reduces=False), member(D, reduces=False, since=CYCLE - age))
    words = [said(A, parent, declared=[applies(D), applies(NEW[0])]), said(B, parent), said(C, parent)]
    later = child(parent, *words)
    assert (D in reducing(later)) is expected
    assert NEW[0] not in reducing(later)


def test_if_fewer_reduce_the_senior_reachable_members_do() -> None:
    parent = listing(member(A), *(member(peer, reduces=False, since=15) for peer in (B, C)), fresh(D, reduces=False))
    later = child(parent, said(A, parent, declared=[applies(B), applies(D)]), said(B, parent), said(C, parent))
    assert reducing(later) == {A, D}, "D has been listed for longest of those who can be reached"
    alone = listing(member(A), member(B, reduces=False))
    assert reducing(child(alone, said(A, alone, declared=map(applies, NEW[:2])))) > {A}


def test_a_member_no_longer_reachable_declares_it_and_gets_a_full_share() -> None:
    parent = listing(member(A), member(B), member(C), member(D, share=2))
    later = child(parent, said(A, parent, declared=[applies(D, reachable=False, share=2)]), said(B, parent))
    assert listed(later, D) == member(D, reduces=False, share=FULL_SHARE)


@pytest.mark.parametrize(("num_saying", "expected"), [(0, True), (1, True), (2, False), (3, False)])
def test_an_owner_stops_reducing_if_more_than_half_of_the_promises_report_it(num_saying: int, expected: bool) -> None:
    words = [
        said(peer, idle=[D] if n < num_saying else [], declared=[applies(NEW[0])]) for n, peer in enumerate((A, B, C))
    ]
    assert (D in reducing(child(FOUR, *words))) is expected


@pytest.mark.parametrize(("num_saying", "expected"), [(0, True), (1, True), (2, False)])
def test_an_owner_reduces_again_if_two_thirds_of_the_promises_do_not_report_it(num_saying: int, expected: bool) -> None:
    parent = listing(*map(member, (A, B, C)), member(D, reduces=False))
    words = [
        said(p, parent, idle=[D] if n < num_saying else [], declared=[applies(D)]) for n, p in enumerate((A, B, C))
    ]
    if expected:
        assert D in reducing(child(parent, *words))
    else:
        assert nothing_follows(parent, *words)


# -- one for each public address

HERE, THERE = b"here....", b"there..."


def at(peer: PeerId, place: bytes, **changes: object) -> Declaration:
    return applies(peer, proofs=(proof_of(peer, cycle=CYCLE, place=place),), **changes)


def test_only_the_senior_member_of_a_public_address_reduces() -> None:
    parent = listing(
        member(A), member(B, reduces=False), *(member(p, reduces=False, since=n) for n, p in enumerate((C, D), 3))
    )
    words = [at(B, HERE), at(C, HERE), at(D, THERE)]
    later = child(parent, said(A, parent, declared=words), said(B, parent), said(C, parent))
    assert reducing(later) == {A, B, D}
    assert [listed(later, peer).place for peer in (A, B, C, D)] == [member(A).place, HERE, NO_PLACE, THERE]


def test_a_reducer_keeps_its_role_when_a_senior_member_moves_to_its_address() -> None:
    parent = listing(member(A, since=4, place=HERE), member(B), member(C, reduces=False))
    assert nothing_follows(parent, *(said(p, parent, declared=[at(C, HERE)]) for p in (A, B, C)))


def test_an_owner_that_lost_its_role_keeps_its_address_occupied() -> None:
    parent = listing(member(A), member(D, place=HERE), member(B, reduces=False), member(C, reduces=False))
    words = [said(p, parent, idle=[D], declared=[at(B, HERE), at(NEW[0], HERE)]) for p in (A, B, C)]
    later = child(parent, *words)
    assert reducing(later) == {A}
    assert listed(later, D).place == HERE
    again = [said(p, later, idle=[D], declared=[at(B, HERE), at(C, THERE)]) for p in (A, B, C)]
    assert reducing(child(later, *again)) == {A, C}
    over = child(later, *(said(p, later, declared=[at(B, HERE)]) for p in (A, B, C)))
    assert reducing(over) == {A, B}, "when that is over, others may"
    assert listed(over, D).place == NO_PLACE


def test_an_owner_that_lost_its_role_takes_it_from_no_reducer_at_its_address() -> None:
    parent = listing(member(A, place=HERE), member(B), member(C, reduces=False, place=HERE), member(D))
    words = [said(p, parent, idle=[C], declared=[applies(NEW[0], reachable=False)]) for p in (A, B, D)]
    assert A in reducing(child(parent, *words))


def test_without_public_addresses_all_reachable_members_reduce() -> None:
    parent = listing(member(A), *(member(peer, reduces=False) for peer in (B, C, D)))
    words = [at(peer, NO_PLACE) for peer in (B, C, D)]
    assert reducing(child(parent, said(A, parent, declared=words), said(B, parent), said(C, parent))) == {A, B, C, D}


def test_the_bootstrap_stays_if_all_possible_reducers_are_on_one_machine() -> None:
    parent = listing(bootstrap(), member(A, place=HERE), *(member(peer, reduces=False) for peer in (B, C)))
    assert nothing_follows(parent, *(said(p, parent, declared=[at(B, HERE), at(C, HERE)]) for p in (A, B, C)))


def test_repeated_claims_without_enough_proofs_change_nothing() -> None:
    """If only the bootstrap were reachable, fresh identities that prove each other would own spans at once."""
    parent = listing(
        bootstrap(), *(member(peer, reduces=False) for peer in (A, B)), *(fresh(p, reduces=False) for p in NEW)
    )
    words = [applies(p, proofs=(proof_of(p, q, cycle=CYCLE),)) for p, q in itertools.pairwise(NEW)]
    assert nothing_follows(parent, *(said(p, parent, declared=words) for p in (A, B, BOOT)))
    listing_them = child(FOUR, *(said(p, declared=words) for p in (A, B, C)))
    assert reducing(listing_them) == FOUR.peers()


# -- continuing without a majority


def test_a_degraded_roster_lists_exactly_the_promisers_and_the_peers_they_hear() -> None:
    eight = listing(*map(member, ids(8)))
    words = [said(A, eight, heard=[A, B], absent=[A, B]), said(C, eight, heard=[])]
    later = child(eight, *words, degraded=True)
    assert later.degraded
    assert later.peers() == {A, B, C}


def test_a_degraded_roster_lists_no_new_members_and_makes_none_count() -> None:
    parent = listing(member(A), fresh(B), member(C))
    words = [said(A, parent, heard=[A, B], counting=[B], declared=[applies(NEW[0]), applies(C, incarnation=2)])]
    assert child(parent, *words, degraded=True).members == (member(A), fresh(B))


def test_a_degraded_roster_does_not_list_leaving_members() -> None:
    later = child(FOUR, said(A, declared=[applies(D, leaving=True), applies(C, incarnation=2)]), degraded=True)
    assert later.members == (member(A), member(B), member(C, incarnation=2))


def test_a_degraded_roster_follows_even_without_other_changes_and_may_list_only_a_bootstrap() -> None:
    assert child(FOUR, said(A), degraded=True).peers() == FOUR.peers()
    parent = listing(bootstrap(), member(A), member(B))
    assert child(parent, said(BOOT, parent, heard=[]), degraded=True).peers() == {BOOT}


def test_no_roster_follows_if_all_remaining_members_leave() -> None:
    words = [said(A, heard=[A], declared=[applies(A, leaving=True)])]
    assert nothing_follows(FOUR, *words, degraded=True)


# -- properties for any promises

PEERS = [BOOT, *ids(6), *NEW[:4]]


@st.composite
def parents(draw: st.DrawFn) -> Roster:
    flags = st.tuples(st.booleans(), st.booleans(), st.integers(0, CYCLE), st.integers(1, 8))
    members = []
    for peer in draw(st.lists(st.sampled_from(ids(6)), min_size=1, unique=True)):
        counts, reduces, since, share = draw(flags)
        share = share if reduces else FULL_SHARE
        members.append(member(peer, counts=counts, reduces=reduces, since=since, share=share, incarnation=2))
    if draw(st.booleans()) and is_bootstrap_needed(members):
        members.append(bootstrap(incarnation=2))
    cycle = draw(st.sampled_from((CYCLE, CYCLE - 1, CYCLE - 10)))
    members = [replace(m, since=min(m.since, cycle)) for m in members]
    ordered = sorted(members, key=lambda m: not m.reduces)
    return listing(*ordered, cycle=cycle, height=draw(st.integers(0, 9)))


@st.composite
def words_on(draw: st.DrawFn, parent: Roster) -> tuple[Promise, ...]:
    """Promises of a majority of the electorate; a declaration is the same wherever it is shown."""
    voters = draw(st.permutations(sorted(parent.voters)))
    num = draw(st.integers(len(voters) // 2 + 1, len(voters)))
    some = st.lists(st.sampled_from(sorted(parent.peers())), unique=True)
    known = [
        applies(peer, incarnation=incarnation, cycle=cycle, leaving=leaving, trains=peer != BOOT, **rest)
        for peer in draw(st.lists(st.sampled_from(PEERS), unique=True))
        for incarnation, leaving in draw(st.sets(st.tuples(st.integers(0, 3), st.booleans()), max_size=2))
        for cycle in draw(st.sets(st.integers(CYCLE - 4, CYCLE + 2), max_size=2))
        for rest in [{"reachable": draw(st.booleans()), "share": draw(st.integers(0, 8))}]
    ]
    shown = st.lists(st.sampled_from(known), max_size=4) if known else st.just([])
    return tuple(
        said(
            voter,
            parent,
            absent=draw(some),
            heard=draw(some),
            counting=draw(some),
            idle=draw(some),
            height=draw(st.integers(0, 200)),
            declared=draw(shown),
        )
        for voter in voters[:num]
    )


@settings(deadline=None, max_examples=100)
@given(st.data(), st.booleans())
def test_the_next_roster_is_valid_and_independent_of_the_order_of_promises(data: st.DataObject, degraded: bool) -> None:
    parent = data.draw(parents())
    words = data.draw(words_on(parent))
    found = next_roster(parent, words, RULES, BOOT, before=None, degraded=degraded)
    for order in itertools.islice(itertools.permutations(words), 6):
        assert next_roster(parent, order, RULES, BOOT, before=None, degraded=degraded) == found
    if found is not None and (not degraded or found.cycle >= parent.cycle + RULES.stalled_cycles):
        check_child(found, parent, words[0].ballot, RULES)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_members_are_dropped_and_listed_only_for_the_stated_reasons(data: st.DataObject) -> None:
    parent = data.draw(parents())
    words = data.draw(words_on(parent))
    found = next_roster(parent, words, RULES, BOOT, before=None, degraded=False)
    if found is None:
        return

    def num_saying(bitmap: str, peer: PeerId) -> int:
        place = parent.position(peer)
        assert place is not None
        return sum(getattr(word.view, bitmap)[place // 8] >> place % 8 & 1 for word in words)

    declared = [one for word in words for one in word.view.declarations]
    for gone in parent.peers() - found.peers():
        is_missed = 2 * num_saying("absent", gone) > len(parent.voters)
        is_unheard = listed(parent, gone).reduces and not num_saying("heard", gone) and num_saying("absent", gone)
        has_left = any(one.peer == gone and one.leaving and one.incarnation >= 2 for one in declared)
        assert is_missed or is_unheard or has_left or gone == parent.bootstrap
    for come in found.peers() - parent.peers():
        assert any(one.peer == come and not one.leaving and abs(one.cycle - CYCLE) <= 2 for one in declared)
        assert not listed(found, come).counts
    newcomers = {peer for peer in found.peers() - parent.peers() if peer != BOOT}
    assert len(newcomers) <= max(FEWEST_NEWCOMERS, len(parent.members) // 5)
    for each in found.members:
        before = parent.member(each.peer)
        if before is not None:
            assert each.incarnation >= before.incarnation
            assert each.counts >= before.counts
            assert abs(each.share - before.share) != 1 or not (each.reduces and before.reduces)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_bootstrap_is_on_the_roster_while_it_is_needed_and_no_longer(data: st.DataObject) -> None:
    parent = data.draw(parents())
    words = tuple(
        replace(word, view=replace(word.view, absent=bytes(len(word.view.absent)), idle=bytes(len(word.view.idle))))
        for word in data.draw(words_on(parent))
    )
    found = next_roster(parent, words, RULES, BOOT, before=None, degraded=False)
    if found is None:
        return
    is_needed = is_bootstrap_needed(m for m in found.members if m.trains)
    declared = [one for word in words for one in word.view.declarations if one.peer == BOOT]
    if found.bootstrap is not None:
        assert is_needed
        assert listed(found, BOOT).reduces
    elif parent.bootstrap is not None and not any(one.leaving for one in declared):
        assert not is_needed


# -- what a peer declared before it was listed


def test_a_good_bye_from_before_the_listing_removes_no_member() -> None:
    parent = listing(member(A), member(B, incarnation=2, since=10), member(C), member(D), cycle=10)
    old = declaration(B, incarnation=9, leaving=True, cycle=3)
    assert nothing_follows(parent, said(A, parent), said(C, parent, declared=[old]), said(D, parent))


def test_an_expired_application_of_a_greater_incarnation_does_not_hide_a_new_one() -> None:
    new, old = applies(E, incarnation=2), declaration(E, incarnation=9, cycle=3)
    roster = child(FOUR, said(A, declared=[new]), said(B, declared=[new]), said(C, declared=[old]))
    assert roster.member(E) is not None


def test_a_declaration_from_before_the_listing_does_not_hide_a_good_bye() -> None:
    parent = listing(member(A), member(B, incarnation=2, since=10), member(C), member(D), cycle=10)
    bye, old = applies(B, incarnation=2, leaving=True), declaration(B, incarnation=9, cycle=3)
    promises = said(A, parent, declared=[bye]), said(D, parent, declared=[bye]), said(C, parent, declared=[old])
    assert child(parent, *promises).member(B) is None
