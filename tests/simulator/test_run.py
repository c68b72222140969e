"""The simulated run."""

from __future__ import annotations

from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import check_founding
from simulator.run import ORGANISER, RUN, found_run, key_named, run_rules, signer, start_states, verify


def test_a_signature_binds_signer_and_statement() -> None:
    ann, bob = key_named("ann").peer, key_named("bob").peer
    signature = signer(ann)(b"so")
    assert len(signature) == 64
    assert verify(ann, b"so", signature)
    assert not verify(bob, b"so", signature)
    assert not verify(ann, b"not so", signature)


def test_the_run_is_founded_by_the_organiser_and_spans_start_apart() -> None:
    rules = run_rules(num_spans=(2, 1))
    founding = found_run(rules, Member(peer=key_named("boot").peer, incarnation=1), 0)
    check_founding(founding, RUN, ORGANISER, verify)
    states = start_states(rules, founding.roster)
    assert set(states) == set(rules.span_elements)
    assert len({state.head.digest for state in states.values()}) == 3
