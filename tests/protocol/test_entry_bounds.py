"""Bounds on an entry's numbers, whoever signs it: no honest entry is refused, and no other can end training."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fake_run import run_rules, sign_as, verify
from hypothesis import given, settings
from hypothesis import strategies as st
from made import SPAN, entry_on, head_of, ids, roster_of

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import PeerId
from p2p_diloco.outer.state import genesis_state
from p2p_diloco.protocol.grid import Grid, fold_roster
from p2p_diloco.protocol.round.round import (
    ROW_MEAN_SLACK,
    UNKNOWN_NORM_RATIO,
    MeanInputs,
    OwnerRound,
    ReducerRound,
    gather_contributions,
    row_members,
)
from p2p_diloco.protocol.wire.entry import Entry, build_entry, check_entry, next_head, pack_included
from p2p_diloco.protocol.wire.messages import Opening, RowMean, SpanOffer
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.span_log import (
    FOUNDING_WEIGHT,
    MAX_NORM_RATIO,
    MAX_WEIGHT_RATIO,
    RADIUS_BOUNDS,
    RADIUS_MOVED,
    REJECT_NORM_RATIO,
    WEIGHT_MOVED,
    SpanHead,
    as_float32,
)

CLIP, KAPPA, INVALID = MAX_WEIGHT_RATIO, MAX_NORM_RATIO, REJECT_NORM_RATIO
RULES = replace(run_rules(), entry_limit=INVALID, contribution_limit=KAPPA, weight_clip=CLIP)
ROSTER = roster_of(5)
GRID = fold_roster(ROSTER, 16)
MOST_LENGTHENED = 1.324
"""Maximum lengthening by rounding to four bits: 63 elements of a block are a little over half a step, and its scale was
rounded up."""
reproducible = settings(deadline=None, derandomize=True, database=None, max_examples=150)
radii = st.just(0.0) | st.floats(0, 2.0**126, width=32)
heads = st.builds(lambda radius, weight: replace(head_of(radius=radius), median_weight=weight), radii, radii)
honest = st.lists(
    st.tuples(st.integers(1, 2**62), st.integers(1, 2**40), st.just(0.0) | st.floats(0, 2.0**126, width=32)),
    min_size=5,
    max_size=5,
)


def owner_of(grid: Grid) -> PeerId:
    owner = grid.owner(SPAN)
    assert owner is not None
    return owner


def check(entry: Entry, head: SpanHead, norm: float = 0.0, roster: Roster = ROSTER, grid: Grid = GRID) -> None:
    check_entry(entry, head, roster, grid, RULES, norm, verify)


def collected(
    told: list[tuple[int, int, float]], head: SpanHead, *, roster: Roster = ROSTER, grid: Grid = GRID, row: int = 0,
    newcomers: frozenset[PeerId] = frozenset(),
) -> ReducerRound:  # fmt: skip
    """Return what a reducer holds from members that report (tokens, steps, norm), in roster order."""
    found = ReducerRound(
        round=0,
        fragment=0,
        roster=roster,
        roster_digest=roster.digest(),
        grid=grid,
        row=row,
        members=row_members(roster, grid, row),
        reduced=(SPAN,),
        newcomers=newcomers,
    )
    for (_, member), (tokens, steps, norm) in zip(found.members.items(), told, strict=False):
        offer = SpanOffer(index=SPAN.index, parent=head.digest, sends=True, norm=norm)
        found.openings[member.peer] = Opening(
            round=0, roster=roster.digest(), incarnation=1, tokens=tokens, steps=steps, spans=(offer,)
        )
        found.payloads[member.peer, SPAN] = b"vector"
    return found


def entry_by(gathered: MeanInputs, sound: frozenset[PeerId], head: SpanHead, roster: Roster, grid: Grid) -> Entry:
    made = build_entry(roster, roster.digest(), 0, SPAN, head, gathered.inclusion_of(sound), b"mean")
    assert isinstance(made, Entry), made
    return replace(made, signature=sign_as(owner_of(grid), made.statement()))


@given(head=heads, told=honest, unsound=st.sets(st.integers(0, 4), max_size=4), num_new=st.integers(0, 2))
@reproducible
def test_an_honest_entry_is_never_refused_in_any_state_of_its_span(
    head: SpanHead, told: list[tuple[int, int, float]], unsound: set[int], num_new: int
) -> None:
    """The next entry is valid for all earlier entries, all reports of contributors, and all new or dropped members.

    So there is no state after which a span never gets entries again.
    """
    newcomers = frozenset(ids(5)[:num_new])
    gathered = gather_contributions(collected(told, head, newcomers=newcomers), SPAN, head, RULES)
    assert isinstance(gathered, MeanInputs)
    sound = frozenset(peer for place, peer in enumerate(ids(5)) if place not in unsound)
    if not sound:
        return
    longest = gathered.reduce.norm_limit * MOST_LENGTHENED
    check(entry_by(gathered, sound, head, ROSTER, GRID), head, longest)


@given(head=heads, told=honest.flatmap(lambda row: st.just(row * 2)), lie=st.none() | st.floats(1, 2.0**126, width=32))
@reproducible
def test_an_honest_owner_of_a_grid_is_never_refused_whatever_one_row_sends(
    head: SpanHead, told: list[tuple[int, int, float]], lie: float | None
) -> None:
    roster = roster_of(6)
    grid = fold_roster(roster, 2)
    whole = collected(told, head, roster=roster, grid=grid)
    owner = OwnerRound(collection=whole, owned=(SPAN,))
    for row in range(2):
        gathered = gather_contributions(
            collected(told[3 * row :], head, roster=roster, grid=grid, row=row), SPAN, head, RULES
        )
        assert isinstance(gathered, MeanInputs)
        found = gathered.inclusion_of(frozenset(part.peer for part in gathered.reduce.parts))
        weights = found.weights if lie is None or row else (lie, 1.0, 1.0)
        owner.add(RowMean(
            round=0, span=SPAN, roster=roster.digest(), parent=head.digest, row=row,
            present=pack_included(set(found.present), 6), included=pack_included(set(found.places), 6),
            weights=weights, norms=found.norms, tokens=found.tokens, payload=b"mean",
        ))  # fmt: skip
    finished = owner.gather(SPAN, head, RULES)
    assert isinstance(finished, MeanInputs)
    senders = frozenset(part.peer for part in finished.reduce.parts)
    longest = finished.reduce.norm_limit * MOST_LENGTHENED
    assert finished.reduce.norm_limit <= ROW_MEAN_SLACK * KAPPA * head.radius
    check(entry_by(finished, senders, head, roster, grid), head, longest, roster, grid)


FOUNDED = genesis_state(np.zeros(2**14, np.float32), ROSTER.digest()).head
ONE_RMS = 2.0**7
"""Norm of a vector of the test's size whose root mean square is 1."""


@pytest.mark.parametrize("grid", [GRID, fold_roster(ROSTER, 2)], ids=["one row", "two rows"])
def test_the_first_entry_of_a_span_is_too_short_to_ruin_a_model(grid: Grid) -> None:
    """This holds for every owner and all contributors: a first entry has limits too."""
    check(entry_on(FOUNDED, ROSTER, owner_of(grid), median_norm=FOUNDED.radius, median_weight=FOUNDING_WEIGHT), FOUNDED,
          0.37 * ONE_RMS, ROSTER, grid)  # fmt: skip
    for huge in (0.38 * ONE_RMS, 2.0**64, math.inf):
        entry = entry_on(FOUNDED, ROSTER, owner_of(grid), median_norm=FOUNDED.radius, median_weight=FOUNDING_WEIGHT)
        with pytest.raises(PeerError, match=r"has norm \S+, beyond the limit 48"):
            check(entry, FOUNDED, huge, ROSTER, grid)
    lone = collected([(1000, 10, 3e38)], FOUNDED, roster=roster_of(1), grid=fold_roster(roster_of(1), 16))
    gathered = gather_contributions(lone, SPAN, FOUNDED, RULES)
    assert isinstance(gathered, MeanInputs)
    assert gathered.reduce.norm_limit == KAPPA * FOUNDED.radius, "nor is the only contribution that came"


@pytest.mark.parametrize("rms", [1e-4, 3e-3, 0.3, 3.0, 30.0, 1000.0])
@pytest.mark.parametrize("tokens", [10, 1000, 10**5, 10**8])
def test_a_run_whose_norms_are_far_from_the_founding_radius_gets_an_entry_in_every_round(
    rms: float, tokens: int
) -> None:
    """Senders clip longer contributions, and the limits reach the right values within a few entries."""
    norm, head = as_float32(rms * ONE_RMS), FOUNDED
    heads = []
    for _ in range(40):
        gathered = gather_contributions(collected([(tokens, 10, norm)] * 5, head), SPAN, head, RULES)
        assert isinstance(gathered, MeanInputs)
        entry = entry_by(gathered, frozenset(ids(5)), head, ROSTER, GRID)
        check(entry, head, min(norm, gathered.reduce.norm_limit) * MOST_LENGTHENED)
        head = replace(next_head(head, entry), round=-1)
        heads.append(head)
    weight = as_float32(tokens)
    num_entries = math.ceil(abs(math.log(norm / FOUNDED.radius, RADIUS_MOVED)))
    assert all(later.radius == norm for later in heads[num_entries:])
    num_entries = math.ceil(abs(math.log(weight / FOUNDING_WEIGHT, WEIGHT_MOVED)))
    assert all(later.median_weight == weight for later in heads[num_entries:])


@pytest.mark.parametrize("radius", [0.0, 1e-30, RADIUS_BOUNDS[0], 1.0, RADIUS_BOUNDS[1], 3e38])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 30.0])
def test_any_radius_returns_to_the_honest_value_within_a_hundred_entries(radius: float, norm: float) -> None:
    head, told = head_of(radius=as_float32(radius)), [(1000, 10, as_float32(norm))] * 5
    for _ in range(100):
        gathered = gather_contributions(collected(told, head), SPAN, head, RULES)
        assert isinstance(gathered, MeanInputs)
        entry = entry_by(gathered, frozenset(ids(5)), head, ROSTER, GRID)
        check(entry, head)
        # The same round again and again: only what the head publishes matters here.
        head = replace(next_head(head, entry), round=-1)
    assert head.radius == as_float32(norm)


@pytest.mark.parametrize("number", ["norm", "weight"])
@pytest.mark.parametrize(
    ("factor", "is_taken"), [(0.0, False), (-1.03, False), (-1.0, True), (1.0, True), (1.03, False), (1e30, False)]
)
def test_published_medians_change_by_a_factor_at_most(number: str, factor: float, is_taken: bool) -> None:
    """A norm by half, a weight by four; negative factors are those downwards."""
    head = replace(head_of(radius=1.0), median_weight=1000.0)
    most = {"norm": RADIUS_MOVED, "weight": WEIGHT_MOVED}[number] * abs(factor)
    moved = as_float32(1 / most if factor < 0 else min(most, 1e30))
    changes = {"median_norm": moved if number == "norm" else 1.0}
    changes |= {"median_weight": as_float32(1000.0 * moved) if number == "weight" else 1000.0}
    entry = entry_on(head, ROSTER, owner_of(GRID), **changes)  # type: ignore[arg-type]
    if is_taken:
        return check(entry, head)
    with pytest.raises(PeerError, match=rf"publishes a median {number} of \S+, which is not between"):
        check(entry, head)


@pytest.mark.parametrize(
    ("radius", "weight"), [(2.0**41, 1000.0), (3e38, 1000.0), (2.0**-21, 1000.0), (1.0, 0.0), (1.0, 3e38)]
)
def test_no_entry_publishes_an_absurd_number_in_any_state_of_its_span(radius: float, weight: float) -> None:
    head = replace(head_of(radius=radius), median_weight=weight)
    with pytest.raises(PeerError, match="publishes a median"):
        check(entry_on(head, ROSTER, owner_of(GRID), median_norm=radius, median_weight=weight), head)


@pytest.mark.parametrize(("claimed", "published"), [(1e-30, 1.2), (1e30, 1.5)])
def test_what_was_measured_bounds_the_norms_that_contributors_claim(claimed: float, published: float) -> None:
    """All five send vectors of norm 1.2 after an entry of radius 1, and claim another one."""
    head = head_of(radius=1.0)
    gathered = gather_contributions(collected([(10, 1, claimed)] * 5, head), SPAN, head, RULES)
    assert isinstance(gathered, MeanInputs)
    measured = dict.fromkeys(ids(5), 1.2)
    inclusion = gathered.inclusion_of(frozenset(ids(5)), measured)
    made = build_entry(ROSTER, ROSTER.digest(), 0, SPAN, head, inclusion, b"mean")
    assert isinstance(made, Entry)
    assert made.median_norm == pytest.approx(published)


def test_norms_of_0_do_not_affect_the_median_norm() -> None:
    head = head_of(radius=3.0)
    silent = gather_contributions(collected([(10, 1, 0.0)] * 5, head), SPAN, head, RULES)
    assert isinstance(silent, MeanInputs)
    assert entry_by(silent, frozenset(ids(5)), head, ROSTER, GRID).median_norm == 3.0


def test_a_liar_about_tokens_weighs_at_most_four_times_the_founding_weight_at_first() -> None:
    told = [(10**15, 1, 1.0), *[(10**6, 10, 1.0)] * 4]
    gathered = gather_contributions(collected(told, FOUNDED), SPAN, FOUNDED, RULES)
    assert isinstance(gathered, MeanInputs)
    assert [part.weight for part in gathered.reduce.parts] == [CLIP * FOUNDING_WEIGHT] * 5


def in_a_row(told: list[tuple[int, int, float]], num_members: int) -> ReducerRound:
    """Return what the reducer of the last of two rows holds."""
    roster = roster_of(num_members)
    return collected(told, head_of(radius=1.0), roster=roster, grid=fold_roster(roster, 2), row=1)


def test_a_reducer_that_does_not_know_the_radius_still_weighs_contributions() -> None:
    """In a grid it may average for its row what it does not hold itself."""
    told = [(10**15, 1, 1.0), *[(1000, 10, 1.0)] * 2]
    gathered = gather_contributions(in_a_row(told, 6), SPAN, None, RULES)
    assert isinstance(gathered, MeanInputs)
    assert len({part.weight for part in gathered.reduce.parts}) == 1


@pytest.mark.parametrize("norm", [1e30, 1e-30, 0.0])
def test_without_a_known_radius_one_liar_about_norms_neither_drowns_nor_excludes_the_others(norm: float) -> None:
    told = [(1000, 10, norm), *[(1000, 10, 1.0)] * 2]
    gathered = gather_contributions(in_a_row(told, 6), SPAN, None, RULES)
    assert isinstance(gathered, MeanInputs)
    assert gathered.reduce.norm_limit == UNKNOWN_NORM_RATIO
    two = gather_contributions(in_a_row(told[:2], 5), SPAN, None, RULES)
    assert isinstance(two, MeanInputs)
    assert two.reduce.norm_limit == float("inf"), "of two nobody knows who lies"


def test_among_strangers_no_weight_exceeds_the_median_of_its_row() -> None:
    head = replace(head_of(radius=1.0), median_weight=1000.0)
    told = collected([(2000, 10, 1.0), (100, 1, 1.0), (90, 1, 1.0)], head)
    gathered = gather_contributions(told, SPAN, head, RULES)
    assert isinstance(gathered, MeanInputs)
    three = frozenset(part.peer for part in gathered.reduce.parts)
    assert gathered.inclusion_of(three).weights == (100.0, 100.0, 90.0)
    entry = partial(entry_on, head, ROSTER, owner_of(GRID), places=(0, 1, 2), median_weight=250.0)
    check(entry(weights=(100.0, 100.0, 90.0)), head)
    with pytest.raises(PeerError, match="has a weight of 101, more than the median of its row, which is 100"):
        check(entry(weights=(101.0, 100.0, 90.0)), head)


def test_among_acquaintances_weights_are_the_tokens() -> None:
    rules = replace(RULES, has_strangers=False)
    head = replace(head_of(radius=1.0), median_weight=1000.0)
    gathered = gather_contributions(collected([(2000, 10, 1.0), *[(10, 1, 1.0)] * 2], head), SPAN, head, rules)
    assert isinstance(gathered, MeanInputs)
    three = frozenset(part.peer for part in gathered.reduce.parts)
    weights = gathered.inclusion_of(three).weights
    assert weights == (2000.0, 10.0, 10.0)
    entry = entry_on(head, ROSTER, owner_of(GRID), places=(0, 1, 2), weights=weights, median_weight=250.0)
    check_entry(entry, head, ROSTER, GRID, rules, 0.0, verify)


def test_a_weight_is_at_most_a_multiple_of_the_last_median() -> None:
    head = replace(head_of(radius=1.0), median_weight=10.0)
    weights = (40.0, 40.0, 40.0, 1.0, 1.0)
    check(entry_on(head, ROSTER, owner_of(GRID), weights=weights, median_weight=40.0), head)
    with pytest.raises(PeerError, match=r"has a weight of 40\.1, beyond the limit 40"):
        check(entry_on(head, ROSTER, owner_of(GRID), weights=(*weights[:2], 40.1, 1.0, 1.0), median_weight=40.0), head)


def test_rows_of_a_grid_are_levelled_separately() -> None:
    roster = roster_of(6)
    grid = fold_roster(roster, 2)
    head = replace(head_of(radius=1.0), median_weight=1000.0)
    first = set(row_members(roster, grid, 0))
    weights = tuple(1000.0 if place in first else 10.0 for place in range(6))
    owner = owner_of(grid)
    check(entry_on(head, roster, owner, weights=weights, median_weight=1000.0), head, 0.0, roster, grid)
    tall = tuple(30.0 if place == min(set(range(6)) - first) else weight for place, weight in enumerate(weights))
    with pytest.raises(PeerError, match="has a weight of 30, more than the median of its row, which is 10"):
        check(entry_on(head, roster, owner, weights=tall, median_weight=1000.0), head, 0.0, roster, grid)


def test_members_that_the_roster_lacks_are_not_weighed() -> None:
    """A bitmap that names members missing from the roster is refused as such: their rows are not looked up."""
    entry = replace(entry_on(head_of(), ROSTER, owner_of(GRID)), included=b"\xff", present=b"\xff", weights=(1.0,) * 8)
    with pytest.raises(PeerError, match="names members that the roster lacks"):
        check(entry, head_of())
