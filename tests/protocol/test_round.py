"""What a reducer accepts, and what results from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import peer_id, run_rules
from hypothesis import given
from hypothesis import strategies as st
from made import NAMES, SPAN, founding, head_of, ids, member, roster_of

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.actions import Stage
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.round.round import (
    EncodedSpan,
    FragmentContribution,
    MeanInputs,
    ReducerRound,
    contribution_messages,
    gather_contributions,
    newcomers_of,
    refuse_opening,
    row_members,
    split_by_reducer,
    still_expected,
)
from p2p_diloco.protocol.wire.entry import build_entry
from p2p_diloco.protocol.wire.frames import MOST_COUNTED
from p2p_diloco.protocol.wire.messages import Opening
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.span_log import SpanHead

ROSTER = roster_of(3)
A, B, C = ids(3)
HEAD = head_of(radius=1.0)
RULES = run_rules()


def contribution(parent: Digest = HEAD.digest, **changes: int) -> FragmentContribution:
    spans = (EncodedSpan(span=SPAN, parent=parent, norm=1.0, payload=b"vector"),)
    found = FragmentContribution(round=0, fragment=0, tokens=100, steps=10, spans=spans)
    return replace(found, **changes)  # type: ignore[arg-type]


def opening(parent: Digest = HEAD.digest, **changes: int) -> Opening:
    found = contribution(parent, **changes)
    return contribution_messages(found, found.spans, ROSTER.digest(), 1)[0]


def held_back(parent: Digest = HEAD.digest) -> Opening:
    found = contribution(parent)
    return contribution_messages(found, (), ROSTER.digest(), 1, {SPAN: parent})[0]


def collection(*senders: PeerId, newcomers: tuple[PeerId, ...] = (), roster: Roster = ROSTER) -> ReducerRound:
    grid = fold_roster(roster, 3)
    found = ReducerRound(
        round=0,
        fragment=0,
        roster=roster,
        roster_digest=roster.digest(),
        grid=grid,
        row=0,
        members=row_members(roster, grid, 0),
        reduced=(SPAN,),
        newcomers=frozenset(newcomers),
    )
    for sender in senders:
        found.openings[sender] = opening()
        found.payloads[sender, SPAN] = b"vector"
    return found


def gathered(found: ReducerRound, head: SpanHead | None = HEAD) -> MeanInputs:
    result = gather_contributions(found, SPAN, head, RULES)
    assert isinstance(result, MeanInputs), result
    return result


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"roster": sha256(b"x")}, "names a different roster; roster 1 is in force here"),
        ({"incarnation": 2}, "is from incarnation 2; the roster lists 1"),
        ({"steps": 0}, "in 0 steps"),
        ({"tokens": 0}, "claims 0 tokens"),
    ],
)
def test_invalid_openings_are_refused(changes: dict[str, object], text: str) -> None:
    found = refuse_opening(replace(opening(), **changes), A, collection())  # type: ignore[arg-type]
    assert found is not None
    assert text in found


def test_an_opening_counts_once_and_only_for_spans_reduced_here() -> None:
    assert refuse_opening(opening(), A, collection()) is None
    assert "second one" in (refuse_opening(opening(), A, collection(A)) or "")
    assert "not on roster" in (refuse_opening(opening(), peer_id("stranger"), collection()) or "")
    offer = opening().spans[0]
    for spans in ((offer, offer), (replace(offer, index=9),)):
        assert "not reduced here" in (refuse_opening(replace(opening(), spans=spans), A, collection()) or "")
    negative = replace(opening(), spans=(replace(offer, norm=-1.0),))
    assert "negative norm" in (refuse_opening(negative, A, collection()) or "")


def test_a_reducer_waits_for_contributions_that_may_still_arrive() -> None:
    found = collection(A, B)
    assert still_expected(found, SPAN, frozenset())
    assert not still_expected(found, SPAN, frozenset({C}))
    found.refused.add(C)
    assert not still_expected(found, SPAN, frozenset())
    half = collection(A, B)
    half.openings[C] = replace(opening(), spans=())
    assert not still_expected(half, SPAN, frozenset())
    half.openings[C] = opening()
    assert still_expected(half, SPAN, frozenset())
    half.openings[C] = held_back()
    assert not still_expected(half, SPAN, frozenset()), "C said that it sends nothing"


def test_more_than_half_must_agree_on_a_parent() -> None:
    assert gather_contributions(collection(), SPAN, HEAD, RULES) == "no members were present"
    assert gather_contributions(collection(A), SPAN, HEAD, RULES) == (
        "1 of 3 voters were there on one parent; more than half are needed"
    )
    found = gathered(collection(A, B))
    assert found.parent == HEAD.digest
    assert found.reduce.stage is Stage.WHOLE
    assert [part.peer for part in found.reduce.parts] == [m.peer for m in ROSTER.members if m.peer in (A, B)]
    assert found.reduce.norm_limit == 2.0
    behind = gather_contributions(collection(A, B), SPAN, head_of(digest=b"behind"), RULES)
    assert behind == "the others follow a different parent than this owner"


def test_a_present_majority_and_a_single_contribution_are_enough() -> None:
    for others in (opening(), held_back()):
        found = collection(A)
        found.openings[B] = others
        result = gathered(found)
        assert [part.peer for part in result.reduce.parts] == [A]
        inclusion = result.inclusion_of(frozenset({A}))
        assert [ROSTER.members[place].peer for place in inclusion.places] == [A]
        assert {ROSTER.members[place].peer for place in inclusion.present} == {A, B}
        unsound = result.inclusion_of(frozenset())
        assert (unsound.present, unsound.places) == (inclusion.present, ())


def test_without_any_contribution_the_span_is_skipped() -> None:
    found = collection()
    found.openings[A], found.openings[B] = opening(), held_back()
    reason = gather_contributions(found, SPAN, HEAD, RULES)
    assert reason == "no contribution arrived; 2 of 3 voters were there"


def test_a_member_without_an_opening_for_a_span_is_not_present_for_it() -> None:
    found = collection(A)
    found.openings[B] = replace(opening(), spans=(replace(opening().spans[0], index=9),))
    assert "1 of 3 voters were there" in str(gather_contributions(found, SPAN, HEAD, RULES))


def test_a_contribution_on_a_minority_parent_is_in_no_mean() -> None:
    found = collection(A)
    found.openings[A] = opening(sha256(b"other"))
    found.openings[B], found.openings[C] = opening(), opening()
    assert "no contribution arrived; 2 of 3" in str(gather_contributions(found, SPAN, HEAD, RULES))
    found.payloads[C, SPAN] = b"vector"
    inclusion = gathered(found).inclusion_of(frozenset({A, B, C}))
    assert {ROSTER.members[place].peer for place in inclusion.present} == {B, C}
    assert {ROSTER.members[place].peer for place in inclusion.places} == {C}


def test_a_newcomer_has_weight_if_no_other_contribution_arrived() -> None:
    found = collection(A, newcomers=(A,))
    found.openings[B] = opening()
    result = gathered(found, replace(HEAD, median_weight=50.0))
    assert [part.weight for part in result.reduce.parts] == [50.0]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=len(NAMES)
    ),
    st.booleans(),
)
def test_in_one_row_only_a_parent_named_by_a_majority_of_voters_gets_a_child(
    members: list[tuple[int, bool, bool, bool]], stands_there: bool
) -> None:
    """Members: the parent that they name (0: none), whether they send, whether that arrives, and whether they count."""
    roster = roster_of(len(members))
    listed = zip(roster.members, members, strict=True)
    roster = replace(roster, members=tuple(replace(each, counts=counts) for each, (*_, counts) in listed))
    held = sha256(b"other") if stands_there else HEAD.digest
    found = replace(collection(roster=roster), grid=fold_roster(roster, 16), members=dict(enumerate(roster.members)))
    parents = {1: HEAD.digest, 2: sha256(b"other")}
    for member_, (parent, sends, arrives, _) in zip(roster.members, members, strict=True):
        if parent:
            found.openings[member_.peer] = opening(parents[parent]) if sends else held_back(parents[parent])
            if sends and arrives:
                found.payloads[member_.peer, SPAN] = b"vector"
    result = gather_contributions(found, SPAN, replace(HEAD, digest=held), RULES)
    heads = [parents.get(parent) for parent, *_ in members]
    came = {p for p, (parent, sends, arrives, _) in enumerate(members) if parent and sends and arrives}
    voters = roster.voter_places

    def has_majority(parent: Digest) -> bool:
        return 2 * sum(heads[place] == parent for place in voters) > len(voters)

    if isinstance(result, str):
        assert not has_majority(held) or not any(heads[place] == held for place in came)
        return
    inclusion = result.inclusion_of(roster.peers())
    assert result.parent == held
    assert has_majority(held)
    assert inclusion.present == tuple(place for place, head in enumerate(heads) if head == held)
    assert inclusion.places == tuple(place for place in inclusion.present if place in came)
    assert inclusion.places


def with_voters(roster: Roster, *voters: PeerId) -> Roster:
    return replace(roster, members=tuple(replace(each, counts=each.peer in voters) for each in roster.members))


def test_members_without_a_vote_block_no_entry_in_one_row() -> None:
    """Any number of them may be absent, or follow another parent."""
    eight = with_voters(roster_of(8), A, B, C)
    found = replace(collection(A, B, roster=eight), grid=fold_roster(eight, 16), members=dict(enumerate(eight.members)))
    assert {part.peer for part in gathered(found).reduce.parts} == {A, B}, "the others are away"
    for peer in ids(8)[3:]:
        found.openings[peer] = opening(sha256(b"other"))
        found.payloads[peer, SPAN] = b"vector"
    result = gathered(found)
    assert result.parent == HEAD.digest
    assert {part.peer for part in result.reduce.parts} == {A, B}
    del found.openings[B]
    assert "1 of 3 voters were there" in str(gather_contributions(found, SPAN, HEAD, RULES))
    for peer in ids(8)[3:]:
        found.openings[peer] = opening()
    assert "1 of 3 voters were there" in str(gather_contributions(found, SPAN, HEAD, RULES)), "they make no majority"


def test_members_without_a_vote_choose_no_parent_for_a_row_of_a_grid_that_has_voters() -> None:
    six = roster_of(6)
    grid = fold_roster(six, 3)
    (voter, *crowd), silent = grid.rows[0], grid.rows[1]
    found = collection(roster=with_voters(six, voter, *silent[:2]))
    for peer in crowd:
        found.openings[peer] = opening(sha256(b"other"))
        found.payloads[peer, SPAN] = b"vector"
    assert gathered(found).parent == sha256(b"other"), "while no voter of the row is there"
    found.openings[voter] = opening()
    result = gathered(found)
    assert result.parent == HEAD.digest
    assert result.reduce.parts == ()
    assert [six.members[place].peer for place in result.inclusion_of(frozenset()).present] == [voter]


def test_a_reducer_of_one_row_needs_the_parent_as_its_tip() -> None:
    for head in (None, head_of(digest=b"behind")):
        assert gather_contributions(collection(A, B, C), SPAN, head, RULES) == (
            "the others follow a different parent than this owner"
        )


def test_a_row_of_a_grid_uses_the_parent_that_most_of_its_members_name() -> None:
    six = roster_of(6)
    found = collection(roster=six)
    here = [member.peer for member in found.members.values()]
    assert len(here) == 3
    for peer in here[:2]:
        found.openings[peer] = opening(sha256(b"other"))
        found.payloads[peer, SPAN] = b"vector"
    result = gathered(found)
    assert (result.parent, result.reduce.stage) == (sha256(b"other"), Stage.ROW)
    assert result.reduce.norm_limit == float("inf"), "what this peer does not hold has no radius here"
    del found.openings[here[0]]
    found.openings[here[2]] = opening()
    found.payloads[here[2], SPAN] = b"vector"
    assert gathered(found).parent == HEAD.digest, "of equally many the one that is held here"
    assert gathered(found).inclusion_of(frozenset(here)).places == (list(found.members)[2],)
    other = next(m.peer for m in six.members if m.peer not in here)
    assert "is in row 1, not in row 0" in str(refuse_opening(replace(opening(), roster=six.digest()), other, found))


def test_a_contribution_on_another_parent_is_left_out() -> None:
    found = collection(A, B, C)
    found.openings[C] = opening(sha256(b"other"))
    assert {part.peer for part in gathered(found).reduce.parts} == {A, B}


def test_weights_are_tokens_clipped_for_newcomers_at_the_median() -> None:
    found = collection(A, B, C, newcomers=(C,))
    found.openings[B] = found.openings[C] = opening(tokens=1000)
    result = gathered(found, replace(HEAD, median_weight=200.0))
    assert {part.peer: part.weight for part in result.reduce.parts} == {A: 100.0, B: 800.0, C: 200.0}
    result = gathered(found, replace(HEAD, median_weight=20.0))
    assert {part.peer: part.weight for part in result.reduce.parts} == {A: 80.0, B: 80.0, C: 20.0}
    fresh = gathered(collection(A, B, newcomers=(A, B)), replace(HEAD, median_weight=20.0))
    assert [part.weight for part in fresh.reduce.parts] == [20.0, 20.0], "also in a row that has no others"


def test_exaggerated_weights_cannot_make_the_owner_fail() -> None:
    found = collection(A, B)
    for peer in (A, B):
        found.openings[peer] = opening(tokens=MOST_COUNTED, steps=1)
    inclusion = gathered(found).inclusion_of(frozenset({A, B}))
    entry = build_entry(ROSTER, ROSTER.digest(), 0, SPAN, HEAD, inclusion, b"m")
    assert not isinstance(entry, str)
    assert entry.tokens == MOST_COUNTED
    assert entry.digest()


def test_a_contribution_is_split_among_the_reducers_of_its_row() -> None:
    spans = tuple(EncodedSpan(span=SpanId(0, i), parent=HEAD.digest, norm=1.0, payload=b"v") for i in range(6))
    shares = split_by_reducer(replace(contribution(), spans=spans), fold_roster(ROSTER, 16), 0)
    assert sorted(s.span for share in shares.values() for s in share) == [s.span for s in spans]


def test_newcomers_are_those_whose_incarnation_the_parent_lacks() -> None:
    again = replace(ROSTER, members=(member(A), member(B, incarnation=2)))
    assert newcomers_of(again, ROSTER, 1, 1) == {B}
    assert newcomers_of(ROSTER, founding().roster, 1, 1) == {A, B, C}
    assert newcomers_of(ROSTER, None, 1, 1) == {A, B, C}


def test_newcomers_are_new_only_in_the_first_cycle_of_a_roster() -> None:
    """A roster may now stay in force forever."""
    late = replace(ROSTER, cycle=7)
    assert [newcomers_of(late, founding().roster, cycle, 8) for cycle in (7, 8, 9, 70)] == [{A, B, C}] * 2 + [set()] * 2
