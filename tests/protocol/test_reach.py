"""Whether others can reach this peer: which peers it asks, and how their answers combine."""

from __future__ import annotations

import pytest
from made import ids

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.membership.reach import (
    ANSWER_SECONDS,
    ENOUGH_PROOFS,
    FIRST_RETRY_SECONDS,
    PROOF_SECONDS,
    RENEW_SECONDS,
    UNSEEN_SECONDS,
    Answer,
    Network,
    Reach,
    network_of,
)

A, B, C, D, E = sorted(ids(5))
PUBLIC, HOME, LOOPBACK = "45.10.0.2", "192.168.1.7", "127.0.0.1"


def answer(host: str = PUBLIC, *, reason: str = "", at: float = 0.0) -> Answer:
    return Answer(host=host, port=31337, reason=reason, at=at)


def asked(*peers: PeerId) -> Reach:
    """Return a peer's reach after it has asked `peers`, each of which is seen from a public address."""
    reach = Reach()
    for peer in peers:
        assert reach.due({peer}, 0.0) in ((peer,), ()), "it asks whom it knows"
    reach.see(dict.fromkeys(peers, (PUBLIC,)))
    return reach


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("127.0.0.1", Network.MACHINE),
        ("::1", Network.MACHINE),
        ("192.168.1.7", Network.SITE),
        ("10.0.0.1", Network.SITE),
        ("100.64.3.4", Network.SITE),
        ("fe80::1%eth0", Network.SITE),
        ("45.10.0.2", Network.WORLD),
        ("2a01:4f8::1", Network.WORLD),
    ],
)
def test_an_address_is_reachable_as_far_as_its_range_implies(host: str, network: Network) -> None:
    assert network_of(host) is network


def test_an_invalid_address_is_reachable_from_nowhere() -> None:
    with pytest.raises(ValueError, match="does not appear to be"):
        network_of("example.org")


def test_no_peer_is_reachable_by_its_own_claim() -> None:
    standing = Reach().standing({A}, {A}, 0.0)
    assert not standing.is_reachable
    assert (standing.proofs, standing.failures, standing.num_proved) == ((), (), 0)


def test_one_proof_makes_a_peer_reachable_and_a_second_is_requested() -> None:
    reach = Reach()
    assert reach.due({A}, 0.0) == (A,)
    reach.take(A, answer())
    assert reach.standing({A}, {A}, 0.0).is_reachable
    assert len(reach.due({A, B, C}, 1.0)) == ENOUGH_PROOFS - 1


def test_enough_provers_whose_answers_count_are_asked() -> None:
    reach = Reach()
    assert reach.due({A, B}, 0.0) == (A, B)
    for peer in (A, B):
        reach.take(peer, answer())
    assert reach.due({A, B, C, D, E}, 1.0, preferred={B, C, D, E}) == (C,)
    reach.take(C, answer())
    assert reach.due({A, B, C, D, E}, 2.0, preferred={B, C, D, E}) == ()
    assert Reach().due({A, B, C, D, E}, 0.0, preferred={D, E}) == (D, E)


def test_an_unrequested_yes_does_not_count() -> None:
    reach = Reach()
    reach.take(A, answer())
    assert not reach.standing({A}, {A}, 0.0).is_reachable


def test_the_answer_of_a_former_member_does_not_count() -> None:
    reach = asked(A)
    reach.take(A, answer())
    standing = reach.standing({B}, {B}, 0.0)
    assert not standing.is_reachable
    assert [proof.host for proof in standing.proofs] == [PUBLIC], "it is still shown"


def test_after_a_no_and_a_yes_others_are_asked_and_the_majority_decides() -> None:
    reach = asked(A, B)
    reach.take(A, answer())
    reach.take(B, answer(reason="timed out"))
    assert not reach.standing({A, B}, {A, B}, 0.0).is_reachable
    assert reach.due({A, B, C, D}, 1.0) == (C, D)
    reach.take(C, answer(at=1.0))
    standing = reach.standing({A, B, C, D}, {A, B}, 2.0)
    assert standing.is_reachable
    assert standing.num_proved == 2
    assert [failure.reason for failure in standing.failures] == ["timed out"]
    assert [proof.at for proof in standing.proofs] == [1.0, 0.0], "the newest first"
    assert standing.proofs[0].place == "45.10.0.2:31337"
    assert answer("2a01:4f8::1").place == "[2a01:4f8::1]:31337"
    reach.take(D, answer(reason="refused", at=2.0))
    assert not reach.standing({A, B, C, D}, {A, B}, 2.0).is_reachable, "two against two prove nothing"


def test_a_no_is_rechecked_with_growing_pauses_and_a_yes_is_renewed_before_it_expires() -> None:
    reach = asked(A)
    reach.take(A, answer(reason="refused"))
    first = ANSWER_SECONDS + FIRST_RETRY_SECONDS
    assert reach.due({A}, first - 1.0) == ()
    assert reach.due({A}, first) == (A,)
    assert reach.due({A}, first + first) == (), "the pause has doubled"
    assert reach.due({A}, first + ANSWER_SECONDS + 2 * FIRST_RETRY_SECONDS) == (A,)
    reach.take(A, answer(at=200.0))
    assert reach.due({A}, 199.0 + RENEW_SECONDS) == ()
    assert reach.due({A}, 200.0 + RENEW_SECONDS) == (A,)
    assert reach.standing({A}, {A}, 199.0 + PROOF_SECONDS).is_reachable
    assert not reach.standing({A}, {A}, 200.0 + PROOF_SECONDS).is_reachable


def test_other_addresses_need_other_proofs() -> None:
    reach = asked(A)
    reach.take(A, answer())
    reach.forget()
    assert not reach.standing({A}, {A}, 0.0).is_reachable
    assert reach.due({A}, 0.0) == (A,)


@pytest.mark.parametrize(
    ("proved_at", "seen_from", "is_reachable"),
    [
        (LOOPBACK, (LOOPBACK, LOOPBACK), True),
        (LOOPBACK, (LOOPBACK, HOME), False),
        (HOME, (HOME, LOOPBACK), True),
        (HOME, (HOME, PUBLIC), False),
        (PUBLIC, (HOME, PUBLIC), True),
        (PUBLIC, (LOOPBACK, LOOPBACK), True),
    ],
)
def test_a_proof_counts_within_the_range_of_its_address(
    proved_at: str, seen_from: tuple[str, str], is_reachable: bool
) -> None:
    reach = asked(A)
    reach.take(A, answer(proved_at))
    reach.see({A: (seen_from[0],), B: (seen_from[1],), C: ()})
    assert reach.standing({A, B}, {A, B}, 0.0).is_reachable is is_reachable


def test_answers_from_outside_and_inside_a_shared_network_do_not_outweigh_each_other() -> None:
    reach = asked(A, B)
    reach.take(A, answer(HOME))
    reach.take(B, answer(PUBLIC, reason="timed out"))
    reach.see({A: (HOME,), B: (PUBLIC,)})
    assert not reach.standing({A, B}, {A, B}, 0.0).is_reachable
    reach.take(B, answer(HOME))
    reach.see({B: (PUBLIC, HOME)})
    assert reach.standing({A, B}, {A, B}, 0.0).is_reachable, "the nearest address of each counts"


def test_a_member_that_was_never_linked_counts_as_elsewhere_after_a_while() -> None:
    reach = asked(A)
    reach.take(A, answer(HOME))
    reach.see({A: (HOME,)})
    assert reach.standing({A}, {A, B}, 0.0).is_reachable
    assert reach.standing({A}, {A, B}, UNSEEN_SECONDS - 1.0).is_reachable
    assert not reach.standing({A}, {A, B}, UNSEEN_SECONDS).is_reachable
    assert reach.standing({A}, {A}, UNSEEN_SECONDS).is_reachable, "it is no member any more"
    assert not reach.standing({A}, {A, B}, UNSEEN_SECONDS + 1.0).is_reachable, "it returns, and is as far as before"
    reach.see({B: (HOME,)})
    assert reach.standing({A}, {A, B}, UNSEEN_SECONDS + 2.0).is_reachable


def test_a_dead_member_keeps_its_place() -> None:
    reach = asked(A)
    reach.take(A, answer(HOME))
    reach.see({A: (HOME,), B: (HOME,)})
    reach.see({A: (HOME,)})
    for now in (0.0, 2 * UNSEEN_SECONDS):
        assert reach.standing({A}, {A, B}, now).is_reachable


def test_proofs_within_too_small_a_network_lead_to_further_requests() -> None:
    reach = asked(A, B)
    for peer in (A, B):
        reach.take(peer, answer(LOOPBACK))
    reach.standing({A, B}, {A, B}, 0.0)
    assert reach.due({A, B, C, D, E}, 1.0) == (C, D)
