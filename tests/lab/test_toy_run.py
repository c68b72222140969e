"""The run that the lab plays."""

from __future__ import annotations

from lab_swarms import INT8

from p2p_diloco.lab.toy_run import (
    ORGANISER,
    RUN,
    found_run,
    peer_named,
    sign_as,
    signer,
    start_states,
    toy_rules,
    verify,
)
from p2p_diloco.protocol.member import Member
from p2p_diloco.protocol.roster import check_founding


def test_a_signature_binds_signer_and_statement() -> None:
    ann, bob = peer_named("ann"), peer_named("bob")
    signature = signer(ann)(b"so")
    assert len(signature) == 64
    assert verify(ann, b"so", signature)
    assert not verify(bob, b"so", signature)
    assert not verify(ann, b"not so", signature)
    assert sign_as(ann, b"so") == signature


def test_the_run_is_founded_by_the_organiser_and_spans_start_apart() -> None:
    rules = toy_rules(num_spans=(2, 1), span_elements=8, codecs=INT8)
    founding = found_run(rules, Member(peer=peer_named("boot"), incarnation=1, can_be_dialled=True))
    check_founding(founding, RUN, ORGANISER, verify)
    states = start_states(rules, founding.roster)
    assert set(states) == set(rules.span_elements)
    assert len({state.head.digest for state in states.values()}) == 3
    assert rules.payload_bytes[next(iter(states))] == INT8.contribution.encoded_bytes(8)
