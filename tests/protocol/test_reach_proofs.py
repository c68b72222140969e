"""The value of proofs of reachability: whose count, how many are needed, for how long and for which place."""

from __future__ import annotations

import math

import pytest
from fake_run import RUN, peer_id, run_rules
from made import child_of, declaration, founding, ids, member, proof_of

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.membership.reach import PROOF_SECONDS
from p2p_diloco.protocol.membership.reach_proofs import ReachJudge, place_of, proofs_to_declare, provers_for
from p2p_diloco.protocol.wire.member import NO_PLACE, Declaration, Member
from p2p_diloco.protocol.wire.roster import Roster

RULES = run_rules()
A, B, C, D, E, *_ = ids(8)
BOOT, NEW, ACCOMPLICE = peer_id("boot"), peer_id("new"), peer_id("accomplice")
CYCLE = 1000
OLDEST = CYCLE - math.ceil(PROOF_SECONDS / RULES.cycle_seconds) - 2


def listing(*members: Member) -> Roster:
    return child_of(founding().roster, members)


def hidden(peer: PeerId, *, counts: bool = True) -> Member:
    return member(peer, counts=counts, reduces=False)


def word(peer: PeerId, *provers: PeerId, cycle: int = CYCLE, place: bytes = NO_PLACE) -> Declaration:
    proofs = tuple(proof_of(peer, prover, cycle=cycle, place=place) for prover in provers)
    return declaration(peer, reachable=False, cycle=CYCLE, proofs=proofs)


def judge(parent: Roster, founder: PeerId = BOOT) -> ReachJudge:
    return ReachJudge(parent=parent, rules=RULES, founder=founder, cycle=CYCLE)


FOUR = listing(*map(hidden, (A, B, C, D)))
TWO = listing(hidden(A), hidden(B), *(hidden(peer, counts=False) for peer in (C, D, ACCOMPLICE)))


@pytest.mark.parametrize(
    ("parent", "provers", "expected"),
    [
        (FOUR, (), False),
        (FOUR, (BOOT,), True),
        (FOUR, (A,), False),
        (FOUR, (A, B), True),
        (FOUR, (A, A), False),
        (FOUR, (A, ACCOMPLICE), False),
        (FOUR, (NEW, NEW), False),
        (TWO, (A,), True),
        (TWO, (C, D), False),
        (TWO, (C, ACCOMPLICE), False),
        (TWO, (ACCOMPLICE, A), True),
    ],
)
def test_a_newcomer_needs_a_proof_of_the_founder_or_of_enough_members_that_count(
    parent: Roster, provers: tuple[PeerId, ...], expected: bool
) -> None:
    assert judge(parent).is_reachable(word(NEW, *provers)) is expected


def test_no_peer_proves_itself() -> None:
    assert not judge(FOUR).is_proved(word(A, A, B)), "it counts, but not for itself"
    assert judge(FOUR).is_proved(word(A, B, C))
    assert not judge(TWO).is_proved(word(A, A))


def test_proofs_for_a_private_address_need_members_that_count() -> None:
    """The rule cannot tell a proof from within one machine from one of a home network that all share.

    Such a lie takes members that count, two of them if three or more do; a fresh identity on the same machine is not
    believed. An owner that no peer can reach loses *reduces* by the log, after two cycles.
    """
    assert place_of(RUN, "127.0.0.1") == place_of(RUN, "192.168.0.7") == NO_PLACE
    assert not judge(FOUR).is_proved(word(NEW, A, ACCOMPLICE))
    assert judge(FOUR).is_proved(word(NEW, A, B))


@pytest.mark.parametrize(
    ("cycle", "expected"), [(OLDEST - 1, False), (OLDEST, True), (CYCLE + 1, True), (CYCLE + 2, False)]
)
def test_a_proof_is_valid_for_an_hour_and_a_clock_may_be_ahead(cycle: int, expected: bool) -> None:
    assert judge(FOUR).is_reachable(word(NEW, BOOT, cycle=cycle)) is expected


def test_a_reducer_continues_by_its_own_declaration_and_stops_without_it() -> None:
    parent = listing(member(A), member(B), hidden(C))
    assert judge(parent).is_reachable(word(A, ACCOMPLICE, cycle=OLDEST - 9))
    assert not judge(parent).is_reachable(word(A))
    assert not judge(parent).is_reachable(word(C, ACCOMPLICE)), "who has lost it must be proved again"


def test_the_only_member_needs_no_proofs() -> None:
    assert judge(listing(member(A)), founder=A).is_reachable(word(A))
    assert not judge(listing(member(A), hidden(B)), founder=A).is_reachable(word(A))


def test_if_no_other_member_counts_any_member_proves_the_founder_and_a_member_that_counts() -> None:
    young = listing(member(A), hidden(B, counts=False), hidden(C, counts=False))
    assert provers_for(A, young, founder=A) == {B, C}
    assert provers_for(B, young, founder=A) == {A}
    assert judge(young, founder=A).is_proved(word(A, B))
    assert not judge(young, founder=A).is_proved(word(B, C))
    assert provers_for(A, young, founder=BOOT) == {BOOT}


def test_a_peer_declares_only_the_founders_proof_or_two_of_members_that_count() -> None:
    proofs = [proof_of(NEW, prover) for prover in (C, ACCOMPLICE, B, A, BOOT)]
    assert [each.prover for each in proofs_to_declare(proofs, NEW, TWO, BOOT)] == [BOOT]
    assert [each.prover for each in proofs_to_declare(proofs[:-1], NEW, TWO, BOOT)] == [B, A]
    assert [each.prover for each in proofs_to_declare(proofs[:3], NEW, TWO, BOOT)] == [B, C]
    assert proofs_to_declare([], NEW, TWO, BOOT) == ()


def test_the_place_is_taken_from_proofs_that_count() -> None:
    here, there = sha256(b"here")[:8], b"\xff" * 8
    proofs = (proof_of(NEW, BOOT, cycle=CYCLE, place=here), proof_of(NEW, ACCOMPLICE, cycle=CYCLE, place=there))
    assert judge(FOUR).place(declaration(NEW, cycle=CYCLE, proofs=proofs)) == here
    assert judge(FOUR).place(word(NEW, ACCOMPLICE, place=there)) == NO_PLACE
    assert judge(FOUR).place(word(NEW)) == NO_PLACE


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("45.10.0.2", "45.10.0.2", True),
        ("45.10.0.2", "45.10.0.3", False),
        ("45.10.0.2", "::ffff:45.10.0.2", True),
        ("2a01:4f8:1:2::1", "2a01:4f8:1:2:ffff::9%eth0", True),
        ("2a01:4f8:1:2::1", "2a01:4f8:1:3::1", False),
    ],
)
def test_a_place_is_an_address_or_the_prefix_of_one_site(one: str, other: str, is_same: bool) -> None:
    assert (place_of(RUN, one) == place_of(RUN, other)) is is_same
    assert NO_PLACE not in (place_of(RUN, one), place_of(RUN, other))
    assert place_of(RUN, one) != place_of(sha256(b"another run"), one)


@pytest.mark.parametrize("host", ["127.0.0.1", "192.168.1.7", "10.0.0.1", "::1", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_a_private_address_is_not_a_place(host: str) -> None:
    assert place_of(RUN, host) == NO_PLACE


def test_an_invalid_address_has_no_place() -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        place_of(RUN, "example.org")
