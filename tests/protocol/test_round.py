"""What a reducer takes, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import peer_id
from hypothesis import given
from hypothesis import strategies as st
from made import SPAN, founding, head_of, ids, member, roster_of

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.messages import Opening
from p2p_diloco.protocol.round import (
    Collection,
    EncodedSpan,
    FragmentContribution,
    ReductionRules,
    as_float32,
    build_entry,
    collect_parts,
    contribution_messages,
    lower_median,
    newcomers_of,
    refuse_opening,
    split_by_owner,
    still_expected,
)
from p2p_diloco.protocol.wire import MOST_COUNTED

ROSTER = roster_of(3)
A, B, C = ids(3)
HEAD = head_of(radius=1.0)
RULES = ReductionRules(weight_clip=4.0, radius_limit=2.0)


def contribution(parent: Digest = HEAD.digest, **changes: int) -> FragmentContribution:
    spans = (EncodedSpan(span=SPAN, parent=parent, norm=1.0, payload=b"vector"),)
    found = FragmentContribution(round=0, fragment=0, tokens=100, steps=10, spans=spans)
    return replace(found, **changes)  # type: ignore[arg-type]


def opening(parent: Digest = HEAD.digest, **changes: int) -> Opening:
    found = contribution(parent, **changes)
    return contribution_messages(found, found.spans, ROSTER.digest(), 1)[0]


def collection(*senders: PeerId, newcomers: tuple[PeerId, ...] = ()) -> Collection:
    found = Collection(
        round=0,
        fragment=0,
        roster=ROSTER,
        grid=fold_roster(ROSTER),
        owned=(SPAN,),
        newcomers=frozenset(newcomers),
    )
    for sender in senders:
        found.openings[sender] = opening()
        found.payloads[sender, SPAN] = b"vector"
    return found


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"roster": sha256(b"x")}, "names another roster than 1"),
        ({"incarnation": 2}, "is from incarnation 2; the roster lists 1"),
        ({"steps": 0}, "in 0 steps"),
        ({"tokens": 0}, "says 0 tokens"),
    ],
)
def test_openings_that_do_not_fit_are_refused(changes: dict[str, object], text: str) -> None:
    found = refuse_opening(replace(opening(), **changes), A, collection())  # type: ignore[arg-type]
    assert found is not None
    assert text in found


def test_an_opening_counts_once_and_only_for_owned_spans() -> None:
    assert refuse_opening(opening(), A, collection()) is None
    assert "second one" in (refuse_opening(opening(), A, collection(A)) or "")
    assert "not on roster" in (refuse_opening(opening(), peer_id("stranger"), collection()) or "")
    offer = opening().spans[0]
    for spans in ((offer, offer), (replace(offer, index=9),)):
        assert "not owned here" in (refuse_opening(replace(opening(), spans=spans), A, collection()) or "")
    negative = replace(opening(), spans=(replace(offer, norm=-1.0),))
    assert "negative norm" in (refuse_opening(negative, A, collection()) or "")


def test_a_reducer_waits_for_those_who_may_still_come() -> None:
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


def test_more_than_half_must_agree_on_a_parent() -> None:
    assert "0 of 3 members contributed" in str(collect_parts(collection(), SPAN, HEAD, RULES))
    assert "1 of 3 members contributed" in str(collect_parts(collection(A), SPAN, HEAD, RULES))
    found = collect_parts(collection(A, B), SPAN, HEAD, RULES)
    assert not isinstance(found, str)
    assert found[0] == HEAD.digest
    assert [part.peer for part in found[1].parts] == [m.peer for m in ROSTER.members if m.peer in (A, B)]
    assert found[1].norm_limit == 2.0
    behind = collect_parts(collection(A, B), SPAN, head_of(digest=b"behind"), RULES)
    assert behind == "the others build on another parent than this owner holds"


def test_who_builds_on_another_parent_is_left_out() -> None:
    found = collection(A, B, C)
    found.openings[C] = opening(sha256(b"other"))
    reduced = collect_parts(found, SPAN, None, RULES)
    assert not isinstance(reduced, str)
    assert {part.peer for part in reduced[1].parts} == {A, B}
    assert reduced[1].norm_limit == float("inf")


def test_weights_are_quantity_times_quality_clipped_and_0_for_newcomers() -> None:
    found = collection(A, B, C, newcomers=(C,))
    found.openings[B] = opening(tokens=1000)
    head = replace(HEAD, median_weight=1000.0)
    reduced = collect_parts(found, SPAN, head, RULES)
    assert not isinstance(reduced, str)
    assert {part.peer: part.weight for part in reduced[1].parts} == {A: 1000.0, B: 4000.0, C: 0.0}
    fresh = collect_parts(collection(A, B, newcomers=(A, B)), SPAN, HEAD, RULES)
    assert not isinstance(fresh, str)
    assert [part.weight for part in fresh[1].parts] == [1000.0, 1000.0]


def test_an_entry_needs_a_sound_majority_and_some_weight() -> None:
    found = collection(A, B)
    reduced = collect_parts(found, SPAN, HEAD, RULES)
    assert not isinstance(reduced, str)
    parts = reduced[1].parts
    assert "1 of 3 contributions were sound" in str(build_entry(found, HEAD.digest, 1, SPAN, parts[:1], b"m"))
    weightless = [replace(part, weight=0.0) for part in parts]
    assert "weight 0" in str(build_entry(found, HEAD.digest, 1, SPAN, weightless, b"m"))
    entry = build_entry(found, HEAD.digest, 1, SPAN, parts, b"m")
    assert not isinstance(entry, str)
    assert (entry.tokens, entry.median_norm, entry.median_weight) == (200, 1.0, 1000.0)


def test_boasting_contributors_cannot_make_the_owner_fail() -> None:
    found = collection(A, B)
    for peer in (A, B):
        found.openings[peer] = opening(tokens=MOST_COUNTED, steps=1)
    reduced = collect_parts(found, SPAN, HEAD, RULES)
    assert not isinstance(reduced, str)
    entry = build_entry(found, HEAD.digest, 1, SPAN, reduced[1].parts, b"m")
    assert not isinstance(entry, str)
    assert entry.tokens == MOST_COUNTED
    assert entry.digest()


def test_a_contribution_is_dealt_to_the_owners_of_its_spans() -> None:
    spans = tuple(EncodedSpan(span=SpanId(0, i), parent=HEAD.digest, norm=1.0, payload=b"v") for i in range(6))
    shares = split_by_owner(replace(contribution(), spans=spans), fold_roster(ROSTER))
    assert sorted(s.span for share in shares.values() for s in share) == [s.span for s in spans]
    assert split_by_owner(contribution(), fold_roster(roster_of(2, dialable=False, helper=None))) == {}


def test_newcomers_are_those_whose_incarnation_the_parent_lacks() -> None:
    again = replace(ROSTER, members=(member(A), member(B, incarnation=2)))
    assert newcomers_of(again, ROSTER) == {B}
    assert newcomers_of(ROSTER, founding().roster) == {A, B, C}
    assert newcomers_of(ROSTER, None) == {A, B, C}


@given(st.lists(st.floats(0, 1e30), min_size=1))
def test_the_median_is_one_of_the_values(values: list[float]) -> None:
    median = lower_median(values)
    assert median in values
    assert sum(value <= median for value in values) * 2 >= len(values)


@given(st.floats(allow_nan=False))
def test_numbers_are_as_the_wire_carries_them(value: float) -> None:
    assert as_float32(as_float32(value)) == as_float32(value)
