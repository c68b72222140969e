"""All certified rosters that a peer knows, and the one in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_run import ballot_number, peer_id, run_rules, verify
from made import book_with, certify, child_of, entry_on, founding, head_of, ids, member, roster_1

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, sha256, short_peer_id
from p2p_diloco.protocol.membership.roster_book import MOST_BRANCH_BYTES, MOST_BRANCHES, Governance, RosterBook
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster


def chain_of(first: CertifiedRoster, length: int, **changes: object) -> list[CertifiedRoster]:
    """Return `first`, and a number of rosters that follow it."""
    chain = [first]
    for _ in range(length):
        parent = chain[-1].roster
        chain.append(certify(child_of(parent, parent.members, **changes), parent.peers()))
    return chain


def test_a_chain_is_accepted_in_order_and_its_last_roster_is_in_force() -> None:
    book = book_with(founding())
    chain = chain_of(roster_1(3), 30)
    for certified in chain:
        assert book.add(certified)
        assert book.in_force == certified.roster
        assert book.in_force_digest == certified.roster.digest()
    assert not book.add(chain[4])
    assert book.chain() == [founding(), *chain]
    grid = book.grid()
    assert grid is not None
    assert grid.rows == (tuple(ids(3)),)
    assert book.parent_of(chain[3].roster) == chain[2].roster
    assert book.parent_of(founding().roster) is None
    assert chain[3].roster.digest() in book
    assert book.founder == peer_id("boot")


def test_an_empty_book_has_nothing_in_force() -> None:
    book = RosterBook(rules=run_rules(), verify=verify)
    assert book.in_force is None
    assert book.grid() is None
    assert book.landmarks() == ()
    assert book.after(()) == ()
    assert book.num_degraded() == 0


def test_a_round_is_governed_by_the_newest_roster_certified_before_it() -> None:
    first = roster_1(3)
    second = certify(child_of(first.roster, first.roster.members), ids(3), ballot=ballot_number(5, 1))
    book = book_with(founding(), first, second)
    of_round_5, of_round_6 = book.governing(5), book.governing(6)
    assert of_round_5 is not None
    assert of_round_6 is not None
    assert (of_round_5[0], of_round_6[0]) == (first.roster, second.roster)
    assert book_with().governing(0) is None


def test_a_roster_whose_parent_is_not_known_is_refused() -> None:
    with pytest.raises(PeerError, match="follows one that is not known here"):
        book_with().add(roster_1(2))


def test_owners_rotate_with_each_cycle_under_one_roster() -> None:
    book = book_with(founding(), roster_1(3))
    digest, num_fragments = roster_1(3).roster.digest(), run_rules().clock.num_fragments
    cycles = [[book.folded(digest, num_fragments * cycle + n)[1] for n in range(num_fragments)] for cycle in range(20)]
    for grids in cycles:
        assert all(grid == grids[0] for grid in grids)
    assert cycles[0][0] == book.grid()
    assert cycles[0][0] != cycles[1][0]
    assert {grids[0].rows for grids in cycles} == {cycles[0][0].rows}
    assert book.folded(digest, 0) == (roster_1(3).roster, cycles[0][0])


def split_book() -> tuple[RosterBook, list[CertifiedRoster], list[CertifiedRoster], list[CertifiedRoster]]:
    """A book that knows a trunk of four, and two lines from its second roster; the longer line is in force."""
    trunk = chain_of(roster_1(3), 1)
    ours = chain_of(trunk[-1], 5)[1:]
    theirs = chain_of(trunk[-1], 2, height=9)[1:]
    book = book_with(founding(), *trunk, *ours)
    for certified in theirs:
        assert book.add(certified, wins=False)
    return book, trunk, ours, theirs


def test_another_line_is_kept_alongside_the_one_in_force() -> None:
    book, trunk, ours, theirs = split_book()
    assert book.in_force == ours[-1].roster
    assert book.chain() == [founding(), *trunk, *ours]
    assert not book.is_on_chain(theirs[-1].roster.digest())
    assert theirs[-1].roster.digest() in book
    assert book.roster(theirs[-1].roster.digest()) == theirs[-1].roster


def test_a_better_line_takes_over_and_the_old_one_leaves_the_chain() -> None:
    book, trunk, ours, theirs = split_book()
    last = chain_of(theirs[-1], 1)[1]
    assert book.add(last, wins=True)
    assert book.in_force == last.roster
    assert book.chain() == [founding(), *trunk, *theirs, last]
    assert not book.is_on_chain(ours[0].roster.digest())
    assert ours[-1].roster.digest() in book
    assert book.add(chain_of(ours[-1], 1)[1], wins=True), "and back"
    assert book.chain()[: len(trunk) + len(ours) + 1] == [founding(), *trunk, *ours]


def test_a_roster_off_the_chain_is_not_in_force_automatically() -> None:
    book, _, ours, theirs = split_book()
    assert book.add(chain_of(theirs[-1], 1)[1])
    assert book.in_force == ours[-1].roster


def test_the_parting_of_two_lines_is_found_with_the_rosters_after_it() -> None:
    book, trunk, ours, theirs = split_book()
    assert book.parting(theirs[-1].roster.digest()) == (trunk[-1].roster, ours, theirs)
    assert book.parting(theirs[0].roster.digest()) == (trunk[-1].roster, ours, theirs[:1])
    assert book.parting(trunk[0].roster.digest()) == (trunk[0].roster, [*trunk[1:], *ours], [])
    assert book.parting(ours[-1].roster.digest()) == (ours[-1].roster, [], [])
    assert book.parting(sha256(b"unknown")) is None


def test_branches_use_bounded_memory_and_the_line_in_force_continues() -> None:
    trunk = chain_of(roster_1(3), 3)
    book = book_with(founding(), *trunk)
    begun = [chain_of(trunk[0], 1, height=n)[1] for n in range(1, 8)] + [
        chain_of(trunk[1], 1, height=n)[1] for n in range(1, 8)
    ]
    begun += [chain_of(trunk[2], 1, height=n)[1] for n in range(1, 8)]
    for certified in begun[:MOST_BRANCHES]:
        assert book.add(certified, wins=False)
    with pytest.raises(PeerError, match=r"of a branch that .+ began has no room beside 16 others"):
        book.add(begun[MOST_BRANCHES], wins=False)
    assert book.add(chain_of(begun[0], 1)[1], wins=False), "one that is known may go on"
    assert book.add(begun[MOST_BRANCHES], wins=True), "one that wins is kept"
    assert book.add(chain_of(begun[MOST_BRANCHES], 1)[1])


def test_rosters_without_a_majority_are_counted() -> None:
    stalled = run_rules().stalled_cycles
    first = roster_1(3)
    second = child_of(first.roster, first.roster.members[:1], degraded=True, cycle=stalled)
    ballot = ballot_number(2 * stalled, 0)
    book = book_with(founding(), first, certify(second, ids(1), ballot))
    assert book.num_degraded() == 1
    book.add(certify(child_of(second, second.members), ids(1), ballot))
    assert book.num_degraded() == 1


def test_one_liar_that_fills_the_book_with_branches_excludes_no_line_of_more_members() -> None:
    """Its first rosters come before those that make it win: refusing them would part two honest halves for good."""
    parting, stalled = roster_1(4).roster, ballot_number(10, 0)
    (liar, *_), halves = ids(4), (ids(4)[:2], ids(4)[2:])

    def degraded_of(peers: list[PeerId], height: int) -> CertifiedRoster:
        members = [m for m in parting.members if m.peer in peers]
        child = child_of(parting, members, degraded=True, cycle=5, height=height)
        return certify(child, peers, ballot=stalled)

    book = book_with(founding(), roster_1(4), degraded_of(halves[0], 20))
    lies = [degraded_of([liar], height) for height in range(MOST_BRANCHES)]
    for lie in lies:
        book.add(lie, wins=False)
    honest = degraded_of(halves[1], 10)
    assert book.add(honest, wins=False)
    assert honest.roster.digest() in book


def test_a_branch_of_invented_members_takes_bounded_memory_and_the_place_of_no_honest_line() -> None:
    """One voter lists members that it has invented, and signs for all of them from then on."""
    parting = roster_1(4).roster
    (liar, *_), crowd = ids(4), [peer_id(f"invented {number}") for number in range(400)]
    book = book_with(founding(), roster_1(4), *chain_of(roster_1(4), 3)[1:])
    alone = child_of(parting, [member(liar)], degraded=True, cycle=5, height=20)
    line = [certify(alone, [liar], ballot_number(10, 0))]
    members = [member(liar), *(member(peer, counts=False, since=6) for peer in crowd)]
    for cycle in range(6, 300):
        child = child_of(line[-1].roster, members, cycle=cycle)
        line.append(certify(child, [liar, *crowd] if cycle > 6 else [liar], ballot_number(2 * cycle, 0)))
    refused = ""
    for certified in line:
        try:
            book.add(certified, wins=False)
        except PeerError as error:
            refused = str(error)
            break
    assert f"that {short_peer_id(liar)} began has no room" in refused
    kept = sum(certified.num_bytes() for certified in line if certified.roster.digest() in book)
    assert kept < MOST_BRANCH_BYTES + 100_000
    halves = [m for m in parting.members if m.peer in ids(4)[2:]]
    honest = certify(child_of(parting, halves, degraded=True, cycle=5), ids(4)[2:], ballot_number(10, 0))
    assert book.add(honest, wins=False)
    assert honest.roster.digest() in book


def test_two_peers_find_the_parting_of_their_chains_and_send_a_long_branch_in_pieces() -> None:
    trunk = chain_of(roster_1(2), 60)
    ours = book_with(founding(), *trunk, *chain_of(trunk[-1], 40, height=5)[1:])
    branch = chain_of(trunk[30], 91)[1:]
    theirs = book_with(founding(), *trunk[:31], *branch)
    replies = 0
    while ours.in_force != theirs.in_force:
        reply = theirs.after(ours.landmarks())
        assert reply
        for certified in reply:
            ours.add(certified, wins=certified == branch[-1])
        replies += 1
        assert replies < 10
    assert ours.chain() == theirs.chain()
    assert theirs.after(ours.landmarks()) == ()


def test_a_common_roster_that_a_reply_began_with_is_a_landmark() -> None:
    chain = chain_of(roster_1(2), 300)
    book = book_with(founding(), *chain)
    odd = chain[33].roster.digest()
    assert odd not in book.landmarks()
    book.add(chain[33])
    assert odd in book.landmarks()


def test_a_peer_without_rosters_gets_the_chain_from_its_start() -> None:
    book = book_with(founding(), *chain_of(roster_1(2), 50))
    assert book.after(())[0] == founding()
    assert book.after((sha256(b"never heard of"),)) == book.after(())
    assert len(book.landmarks()) <= 64


def test_included_members_are_looked_up_in_the_roster_that_an_entry_names() -> None:
    book = book_with(founding(), roster_1(3))
    roster, owner = roster_1(3).roster, ids(1)[0]

    def named(places: Sequence[int]) -> set[PeerId]:
        return {roster.members[place].peer for place in places}

    for places, present in (((0, 2), (0, 1, 2)), ((0, 2), (0, 2)), ((1,), (1, 2))):
        entry = entry_on(head_of(), roster, owner, places=places, present=present)
        assert book.included_in(entry) == named(places)
        assert book.present_at(entry) == named(present)


def certified_in(roster: Roster, voters: list[PeerId], round_index: int) -> CertifiedRoster:
    return certify(roster, voters, ballot=ballot_number(round_index, 0))


def test_each_round_of_a_long_chain_is_governed_by_the_last_roster_certified_before_it() -> None:
    book, parent = book_with(founding(), roster_1(3)), roster_1(3).roster
    agreed_in = {}
    for round_index in (3, 4, 9, 9, 20):
        certified = certified_in(child_of(parent, parent.members), ids(3), round_index)
        book.add(certified)
        parent = certified.roster
        agreed_in[parent.k] = round_index
    for round_index in range(30):
        governing = book.governing(round_index)
        assert governing is not None
        assert governing[0].k == max((k for k, agreed in agreed_in.items() if agreed < round_index), default=1)


def test_the_earlier_of_two_certificates_of_one_roster_governs_and_is_forwarded() -> None:
    child = child_of(roster_1(3).roster, roster_1(3).roster.members)
    later, earlier = certified_in(child, ids(3), 7), certified_in(child, ids(3), 5)
    book = book_with(founding(), roster_1(3), later)
    assert book.governance(child.digest(), 6) is Governance.TOO_LATE_HERE
    assert book.governance(roster_1(3).roster.digest(), 6) is Governance.GOVERNS
    assert book.add(earlier)
    assert book.governance(child.digest(), 6) is Governance.GOVERNS
    assert book.governance(roster_1(3).roster.digest(), 6) is Governance.OTHER
    assert not book.add(later)
    assert book.after((roster_1(3).roster.digest(),)) == (earlier,)
    assert not book.add(replace(founding(), ballot=7))


def test_an_earlier_certificate_of_a_roster_on_a_branch_changes_nothing_on_the_chain() -> None:
    parent = roster_1(3).roster
    branch = child_of(parent, parent.members[:2])
    book = book_with(founding(), roster_1(3), certified_in(branch, ids(3), 7))
    book.add(certified_in(child_of(parent, parent.members, height=9), ids(3), 6), wins=True)
    assert book.add(certified_in(branch, ids(3), 5))
    assert book.governance(branch.digest(), 7) is Governance.OTHER


def test_an_earlier_certificate_needs_as_many_votes_as_any() -> None:
    child = child_of(roster_1(3).roster, roster_1(3).roster.members)
    book = book_with(founding(), roster_1(3), certified_in(child, ids(3), 7))
    with pytest.raises(PeerError, match="more than half are needed"):
        book.add(certified_in(child, ids(1), 5))


def test_a_child_certified_before_its_parent_is_refused_until_an_earlier_certificate_is_known() -> None:
    child = child_of(roster_1(3).roster, roster_1(3).roster.members)
    grandchild = certified_in(child_of(child, child.members), ids(3), 6)
    book = book_with(founding(), roster_1(3), certified_in(child, ids(3), 7))
    with pytest.raises(PeerError, match="was certified in ballot 25, before its parent in ballot 29"):
        book.add(grandchild)
    assert book.lacks_earlier_certificate(grandchild)
    book.add(certified_in(child, ids(3), 5))
    assert not book.lacks_earlier_certificate(grandchild)
    assert book.add(grandchild)


def test_an_unknown_roster_and_one_of_another_branch_govern_no_round() -> None:
    parent = roster_1(3).roster
    branch = child_of(parent, parent.members[:2])
    book = book_with(founding(), roster_1(3), certified_in(branch, ids(3), 5))
    book.add(certified_in(child_of(parent, parent.members, height=9), ids(3), 5), wins=True)
    assert book.governance(branch.digest(), 6) is Governance.OTHER
    assert book.governance(sha256(b"unknown"), 6) is Governance.UNKNOWN
