"""A run is founded the same way on whatever machine founds it."""

from __future__ import annotations

import numpy as np
import pytest
from small_run import ORGANISER, peer_key, small_plan

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import GENESIS_ROUND, sha256
from p2p_diloco.island.model import build_model
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.protocol.member import Member
from p2p_diloco.protocol.roster import CertifiedRoster
from p2p_diloco.protocol.roster_book import RosterBook
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.trainer.founding import found_roster, genesis_digest, genesis_states, make_start
from p2p_diloco.trainer.run_plan import RunPlan

FOUNDER = Member(peer=peer_key("founder").peer, incarnation=1, counts=True)


def found(plan: RunPlan, organiser: SigningKey = ORGANISER, cycle: int = 0) -> CertifiedRoster:
    return found_roster(plan, FOUNDER, organiser, genesis_digest(make_start(plan)), cycle)


def book_of(plan: RunPlan) -> RosterBook:
    return RosterBook(rules=plan.rules, verify=is_signed_by)


def test_two_builds_have_one_genesis() -> None:
    assert genesis_digest(make_start(small_plan())) == genesis_digest(make_start(small_plan()))


def test_another_seed_is_another_genesis() -> None:
    assert genesis_digest(make_start(small_plan())) != genesis_digest(make_start(small_plan({"model.seed": 1})))


def test_the_genesis_of_a_shape_never_changes() -> None:
    # Found by running it once: a change means that peers of two versions would found different runs.
    assert genesis_digest(make_start(small_plan())).hex()[:16] == GOLDEN


def test_the_start_covers_every_parameter() -> None:
    plan = small_plan()
    start = make_start(plan)
    assert {span: len(vector_N) for span, vector_N in start.items()} == plan.rules.span_elements
    assert all(np.isfinite(vector_N).all() for vector_N in start.values())


def test_a_model_at_its_start_need_not_be_built_again() -> None:
    plan = small_plan()
    parameters = LocalParameters(build_model(plan.shape, plan.manifest.model.seed), plan.fragments)
    start = make_start(plan, parameters)
    assert genesis_digest(start) == genesis_digest(make_start(plan))
    states = genesis_states(start, found(plan).roster)
    for span, place in plan.places.items():
        zeros_N = np.zeros(place.stop - place.start, np.float32)
        parameters.write(span.fragment, place.start, place.stop, zeros_N)
    assert any(state.anchor_N.any() for state in states.values()), "states are copies"


def test_roster_0_is_valid_and_puts_the_founder_in_force() -> None:
    plan = small_plan()
    book = book_of(plan)
    assert book.add(found(plan))
    assert book.in_force is not None
    assert (book.in_force.k, book.in_force.members) == (0, (FOUNDER,))


def test_nobody_but_the_organiser_founds() -> None:
    plan = small_plan()
    with pytest.raises(PeerError):
        book_of(plan).add(found(plan, organiser=peer_key("stranger")))


@pytest.mark.parametrize(("cycle", "expected"), [(-3, 0), (0, 0), (7, 7)])
def test_a_run_founded_before_its_clock_starts_begins_in_cycle_0(cycle: int, expected: int) -> None:
    assert found(small_plan(), cycle=cycle).roster.cycle == expected


def test_spans_begin_at_the_founding_roster_with_nothing_absorbed() -> None:
    plan = small_plan()
    start, roster = make_start(plan), found(plan).roster
    states = genesis_states(start, roster)
    assert set(states) == set(plan.places)
    for span, state in states.items():
        assert state.head.roster == roster.digest()
        assert (state.head.height, state.head.round) == (0, GENESIS_ROUND)
        assert np.array_equal(state.anchor_N, start[span])
        assert not state.momentum_N.any()


def test_the_genesis_digest_is_that_of_the_chains() -> None:
    plan = small_plan()
    start = make_start(plan)
    states = genesis_states(start, found(plan).roster)
    assert genesis_digest(start) == sha256(*(states[span].head.digest for span in sorted(states)))


GOLDEN = "b9b94cc29e78f32c"
