"""The owner's part of a round in a grid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import run_rules
from made import SPAN, head_of, roster_of

from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.protocol.actions import Stage
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.round.round import (
    ROW_MEAN_SLACK,
    MeanInputs,
    OwnerRound,
    ReducerRound,
    refuse_row_mean,
    row_members,
)
from p2p_diloco.protocol.wire.entry import pack_included
from p2p_diloco.protocol.wire.messages import RowMean
from p2p_diloco.protocol.wire.roster import Roster

ROSTER = roster_of(6)
GRID = fold_roster(ROSTER, 2)
HEAD = head_of(radius=1.0)
RULES = run_rules()
ROWS = range(len(GRID.rows))


def finish(roster: Roster = ROSTER) -> OwnerRound:
    collection = ReducerRound(
        round=0,
        fragment=0,
        roster=roster,
        roster_digest=roster.digest(),
        grid=GRID,
        row=0,
        members=row_members(roster, GRID, 0),
        reduced=(SPAN,),
        newcomers=frozenset(),
    )
    return OwnerRound(collection=collection, owned=(SPAN,))


def row_mean(row: int, /, parent: Digest = HEAD.digest, **changes: object) -> RowMean:
    places = set(row_members(ROSTER, GRID, row))
    mean = RowMean(
        round=0,
        span=SPAN,
        roster=ROSTER.digest(),
        parent=parent,
        row=row,
        present=pack_included(places, 6),
        included=pack_included(places, 6),
        weights=(2.0,) * len(places),
        norms=(1.0,) * len(places),
        tokens=10,
        payload=b"a mean",
    )
    return replace(mean, **changes)  # type: ignore[arg-type]


def sender(row: int) -> PeerId:
    found = GRID.reducer(SPAN, row)
    assert found is not None
    return found


def test_six_in_groups_of_two_are_two_rows() -> None:
    assert [len(row) for row in GRID.rows] == [3, 3]


def test_an_owner_waits_for_all_rows_and_averages_their_means() -> None:
    owner = finish()
    owner.add(row_mean(0))
    owner.add(row_mean(0, payload=b"again!"))
    assert not owner.is_complete(SPAN)
    owner.add(row_mean(1))
    assert owner.is_complete(SPAN)
    found = owner.gather(SPAN, HEAD, RULES)
    assert isinstance(found, MeanInputs)
    assert found.reduce.stage is Stage.FINISH
    assert [(part.peer, part.payload, part.weight) for part in found.reduce.parts] == [
        (sender(row), b"a mean", 6.0) for row in ROWS
    ]
    assert found.reduce.norm_limit == 2.0 * ROW_MEAN_SLACK
    assert found.inclusion_of(frozenset(map(sender, ROWS))).places == tuple(range(6))
    assert found.inclusion_of(frozenset({sender(1)})).tokens == 10


def test_without_a_majority_on_the_parent_that_the_owner_holds_there_is_no_entry() -> None:
    owner = finish()
    nobody = "0 of 6 voters were there on one parent, in 0 rows; more than half are needed"
    assert owner.gather(SPAN, HEAD, RULES) == nobody
    owner.add(row_mean(0))
    assert "3 of 6 voters were there on one parent, in 1 rows" in str(owner.gather(SPAN, HEAD, RULES))
    owner.add(row_mean(1))
    for head in (None, head_of(digest=b"behind")):
        assert owner.gather(SPAN, head, RULES) == "the others follow a different parent than this owner"


def test_a_row_on_another_parent_is_left_out() -> None:
    owner = finish()
    owner.add(row_mean(0, included=pack_included(set(row_members(ROSTER, GRID, 0)), 6)))
    owner.add(row_mean(1, parent=sha256(b"other")))
    assert "3 of 6 voters were there on one parent, in 2 rows" in str(owner.gather(SPAN, HEAD, RULES))


def test_all_present_members_count_whoever_is_in_the_means() -> None:
    owner = finish()
    for row in ROWS:
        first = min(row_members(ROSTER, GRID, row))
        owner.add(row_mean(row, included=pack_included({first}, 6), weights=(2.0,), norms=(1.0,)))
    found = owner.gather(SPAN, HEAD, RULES)
    assert isinstance(found, MeanInputs)
    everybody = frozenset(map(sender, ROWS))
    firsts = tuple(sorted(min(row_members(ROSTER, GRID, row)) for row in ROWS))
    assert found.inclusion_of(everybody).places == firsts
    assert found.inclusion_of(everybody).present == tuple(range(6))
    assert found.inclusion_of(frozenset({sender(0)})).present == tuple(range(6)), "unsound is not away"


def test_one_present_member_fewer_than_a_majority_is_too_few() -> None:
    owner = finish()
    for row in ROWS:
        places = set(row_members(ROSTER, GRID, row)) - ({min(row_members(ROSTER, GRID, row))})
        owner.add(row_mean(row, present=pack_included(places, 6), included=pack_included(places, 6)))
    assert isinstance(owner.gather(SPAN, HEAD, RULES), MeanInputs), "4 of 6"
    few = finish()
    few.add(row_mean(0))
    assert isinstance(few.gather(SPAN, HEAD, RULES), str), "3 of 6: the other half may say the same of another parent"


def test_a_settled_span_accepts_no_more_means() -> None:
    owner = finish()
    owner.settled.add(SPAN)
    owner.add(row_mean(0))
    assert owner.means == {}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"roster": sha256(b"x")}, "a different roster; roster 1"),
        ({"span": SPAN._replace(index=7)}, "its sender does not reduce"),
        ({"row": 1}, "its sender does not reduce"),
        ({"row": 9}, "its sender does not reduce"),
        ({"included": b""}, "has 3 weights and 3 norms for 0 members"),
        ({"included": b"\0", "weights": (), "norms": ()}, "came with 6 bytes, 0 expected"),
        ({"included": b"", "present": b""}, "names no members as present"),
        ({"included": b"\xff"}, "members that were not there"),
        ({"present": b"\xff"}, "names members that are not in row 0"),
        ({"present": pack_included(set(range(6)), 6)}, "names members that are not in row 0"),
        ({"present": b""}, "members that were not there"),
        ({"weights": (1.0,)}, "has 1 weights and 3 norms for 3 members"),
        ({"norms": (1.0, 1.0, -1.0)}, "a negative norm"),
        ({"weights": (0.0, 0.0, 0.0)}, "do not sum to more than 0"),
        ({"weights": (-1.0, 2.0, 2.0)}, "a negative norm, or weights"),
        ({"payload": b"too long"}, "came with 8 bytes, 6 expected"),
    ],
)
def test_invalid_means_are_refused(changes: dict[str, object], text: str) -> None:
    reason = refuse_row_mean(row_mean(0, **changes), sender(0), finish(), 6)  # type: ignore[arg-type]
    assert reason is not None
    assert text in reason


def test_a_mean_is_accepted_only_from_the_reducer_of_its_row() -> None:
    assert refuse_row_mean(row_mean(0), sender(0), finish(), 6) is None
    assert refuse_row_mean(row_mean(0), sender(1), finish(), 6) is not None


def with_voters(*voters: PeerId) -> Roster:
    return replace(ROSTER, members=tuple(replace(each, counts=each.peer in voters) for each in ROSTER.members))


def test_a_row_without_voters_blocks_no_entry_and_makes_no_majority() -> None:
    """Its members may be silent or on their own parent, however many they are."""
    roster = with_voters(*GRID.rows[0])
    for other in (None, row_mean(1, parent=sha256(b"other"))):
        owner = finish(roster=roster)
        owner.add(row_mean(0))
        if other is not None:
            owner.add(other)
        found = owner.gather(SPAN, HEAD, RULES)
        assert isinstance(found, MeanInputs)
        assert found.parent == HEAD.digest
        assert [part.peer for part in found.reduce.parts] == [sender(0)]
    crowd = finish(roster=roster)
    crowd.add(row_mean(1))
    assert crowd.gather(SPAN, HEAD, RULES) == (
        "0 of 3 voters were there on one parent, in 1 rows; more than half are needed"
    )


def test_the_voters_of_all_rows_together_choose_the_parent() -> None:
    """The number of members does not decide: one voter brings three of them here, two voters bring two."""
    first, second = (sorted(row_members(ROSTER, GRID, row)) for row in ROWS)
    peers = [each.peer for each in ROSTER.members]
    owner = finish(roster=with_voters(peers[first[0]], *(peers[place] for place in second[:2])))
    two = pack_included(set(second[:2]), 6)
    owner.add(row_mean(0, parent=sha256(b"other")))
    owner.add(row_mean(1, present=two, included=two, weights=(2.0, 2.0), norms=(1.0, 1.0)))
    found = owner.gather(SPAN, HEAD, RULES)
    assert isinstance(found, MeanInputs)
    assert found.inclusion_of(frozenset({sender(1)})).present == tuple(second[:2])


def test_members_without_a_vote_that_contributed_are_in_the_mean() -> None:
    owner = finish(roster=with_voters(*GRID.rows[0]))
    for row in ROWS:
        owner.add(row_mean(row))
    found = owner.gather(SPAN, HEAD, RULES)
    assert isinstance(found, MeanInputs)
    assert found.inclusion_of(frozenset(map(sender, ROWS))).places == tuple(range(6))


def only_there(row: int) -> RowMean:
    return row_mean(row, included=b"", weights=(), norms=(), tokens=0, payload=b"")


def test_a_row_without_contributions_reports_presence_and_blocks_no_entry() -> None:
    owner = finish()
    owner.add(row_mean(0))
    silent = only_there(1)
    assert refuse_row_mean(silent, sender(1), owner, 6) is None
    owner.add(silent)
    found = owner.gather(SPAN, HEAD, RULES)
    assert isinstance(found, MeanInputs)
    assert [(part.peer, part.weight) for part in found.reduce.parts] == [(sender(0), 6.0)]
    inclusion = found.inclusion_of(frozenset({sender(0)}))
    assert inclusion.present == tuple(range(6))
    assert inclusion.places == tuple(sorted(row_members(ROSTER, GRID, 0)))


def test_without_any_contribution_there_is_no_entry() -> None:
    """As when first steps still compile: all members are present, without contributions."""
    owner = finish()
    for row in ROWS:
        owner.add(only_there(row))
    assert owner.gather(SPAN, HEAD, RULES) == "no contribution arrived; 6 of 6 voters were there"
