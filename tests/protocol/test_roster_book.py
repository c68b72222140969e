"""All certified rosters that a peer knows, and which is in force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ORGANISER, RUN, verify
from made import book_with, certify, child_of, entry_on, founding, head_of, ids, roster_1

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.ballot import ballot_number
from p2p_diloco.protocol.roster import CertifiedRoster, Roster
from p2p_diloco.protocol.roster_book import Governance, RosterBook


def chain_of(first: CertifiedRoster, length: int, **changes: object) -> list[CertifiedRoster]:
    chain = [first]
    for _ in range(length):
        parent = chain[-1].roster
        chain.append(certify(child_of(parent, parent.members, **changes), parent.peers()))
    return chain


def test_a_chain_is_taken_in_order_and_its_end_is_in_force() -> None:
    book = book_with(founding())
    chain = chain_of(roster_1(3), 30)
    for certified in chain:
        assert book.add(certified)
        assert book.in_force == certified.roster
    assert not book.add(chain[4])
    assert book.chain() == [founding(), *chain]
    grid = book.grid()
    assert grid is not None
    assert grid.rows == (tuple(ids(3)),)
    assert book.parent_of(chain[3].roster) == chain[2].roster
    assert book.parent_of(founding().roster) is None
    assert chain[3].roster.digest() in book


def test_an_empty_book_has_nothing_in_force() -> None:
    book = RosterBook(run=RUN, organiser=ORGANISER, group_size=16, verify=verify)
    assert book.in_force is None
    assert book.grid() is None
    assert book.landmarks() == ()
    assert book.after(()) == ()


def test_a_round_goes_by_the_newest_roster_that_was_agreed_on_before_it() -> None:
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


def test_a_senior_branch_takes_over_and_the_old_one_leaves_the_chain() -> None:
    trunk = chain_of(roster_1(3), 3)
    book = book_with(founding(), *trunk)
    split = trunk[1]
    ours = chain_of(split, 5)[1:]
    theirs = chain_of(split, 2, included_total=9)[1:]
    for certified in [*ours, *theirs]:
        book.add(certified)
    assert book.in_force == theirs[-1].roster
    assert book.is_on_chain(theirs[0].roster.digest())
    assert book.is_on_chain(split.roster.digest())
    assert not book.is_on_chain(ours[0].roster.digest())
    assert not book.is_on_chain(trunk[2].roster.digest())
    assert ours[-1].roster.digest() in book
    assert book.chain() == [founding(), *trunk[:2], *theirs]


def test_two_peers_find_where_their_chains_part_and_a_long_branch_comes_in_pieces() -> None:
    trunk = chain_of(roster_1(2), 60)
    ours = book_with(founding(), *trunk, *chain_of(trunk[-1], 40, regrid=1, included_total=5)[1:])
    branch = chain_of(trunk[30], 90)[1:]
    end = certify(child_of(branch[-1].roster, branch[-1].roster.members, included_total=9), branch[-1].roster.peers())
    theirs = book_with(founding(), *trunk[:31], *branch, end)
    replies = 0
    while ours.in_force != theirs.in_force:
        reply = theirs.after(ours.landmarks())
        assert reply
        for certified in reply:
            ours.add(certified)
        replies += 1
        assert replies < 10
    assert ours.chain() == theirs.chain()
    assert theirs.after(ours.landmarks()) == ()


def test_who_knows_nothing_gets_the_chain_from_its_beginning() -> None:
    book = book_with(founding(), *chain_of(roster_1(2), 50))
    assert book.after(())[0] == founding()
    assert book.after((sha256(b"never heard of"),)) == book.after(())
    assert len(book.landmarks()) <= 64


def test_whose_contributions_an_entry_includes_is_read_off_the_roster_that_it_names() -> None:
    book = book_with(founding(), roster_1(3))
    roster, owner = roster_1(3).roster, ids(1)[0]
    for places in ((0, 2), (0, 2), (1,)):
        entry = entry_on(head_of(), roster, owner, places=places)
        assert book.included_in(entry) == {roster.members[place].peer for place in places}


def certified_in(roster: Roster, voters: list[PeerId], round_index: int) -> CertifiedRoster:
    return certify(roster, voters, ballot=ballot_number(round_index, 0))


def test_each_round_of_a_long_chain_goes_by_the_roster_that_was_agreed_on_last_before_it() -> None:
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


def test_the_earlier_of_two_certificates_of_one_roster_governs_and_is_handed_on() -> None:
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
    book.add(certified_in(child_of(parent, parent.members, included_total=9), ids(3), 6))
    assert book.add(certified_in(branch, ids(3), 5))
    assert book.governance(branch.digest(), 7) is Governance.OTHER


def test_an_earlier_certificate_needs_as_many_votes_as_any() -> None:
    child = child_of(roster_1(3).roster, roster_1(3).roster.members)
    book = book_with(founding(), roster_1(3), certified_in(child, ids(3), 7))
    with pytest.raises(PeerError, match="2 are needed"):
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
    book.add(certified_in(child_of(parent, parent.members, included_total=9), ids(3), 5))
    assert book.governance(branch.digest(), 6) is Governance.OTHER
    assert book.governance(sha256(b"unknown"), 6) is Governance.UNKNOWN
