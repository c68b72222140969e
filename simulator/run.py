"""The simulated run: its founder, its rules, its initial state, and signatures that cost almost nothing.

A signature is a hash here. It binds signer and statement, which is all that the rules need, and Ed25519 would slow down
a swarm of two dozen. Peer records keep their real signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, sha256
from p2p_diloco.outer.mean import mark_radial
from p2p_diloco.outer.state import SpanState, content_digest, genesis_state
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.member import NO_PLACE, Member, ReachProof
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, founding_roster, founding_statement
from p2p_diloco.signing import SigningKey
from p2p_diloco.span.reduce import Codecs

RUN = sha256(b"a simulated run")
MANIFEST = b"a simulated manifest"
ROUND_SECONDS = 4.0
SPAN_ELEMENTS = 8
ROUND_ZERO = 1_000_000.0
"""True Unix seconds at which round 0 begins."""


@cache
def key_named(name: str) -> SigningKey:
    """Return the key of a peer, the same in every simulation."""
    return SigningKey(sha256(b"key of", name.encode()))


ORGANISER = key_named("organiser").peer


@lru_cache(maxsize=1 << 16)
def sign_as(peer: PeerId, statement: bytes) -> bytes:
    """Return 64 bytes that `verify` accepts only for the same peer and statement."""
    return sha256(b"signed by", peer, statement) * 2


def signer(peer: PeerId) -> Callable[[bytes], bytes]:
    """Return the signing function of `peer`, as the rules use it."""
    return lambda statement: sign_as(peer, statement)


def verify(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """Return whether `peer` has signed `statement`."""
    return signature == sign_as(peer, statement)


def codecs_of(name: str, radial_spans: frozenset[SpanId] = frozenset()) -> Codecs:
    """Return the codecs of a run whose contributions and entries use codec `name`."""
    codec = codec_named(name)
    return Codecs(
        contribution=codec,
        row_mean=codec_named("int8") if name == "int4" else codec,
        entry=codec,
        rounds_stochastically=False,
        radial={span: mark_radial(0, SPAN_ELEMENTS, ()) for span in radial_spans},
    )


def run_rules(
    *,
    num_spans: tuple[int, ...] = (3, 2),
    codecs: Codecs | None = None,
    group_size: int = 16,
    stalled_cycles: int = 2,
    scrub_cycles: int = 8,
    heartbeat_seconds: float = 1.0,
    round_seconds: float = ROUND_SECONDS,
    span_elements: int = SPAN_ELEMENTS,
    has_strangers: bool = False,
) -> RunRules:
    """Return the rules of a run, with the limits of a new one.

    Args:
        num_spans: number of spans of each fragment.
        codecs: determine the payload sizes; 4 bits unless given.
        has_strangers: whether members are strangers. What simulated peers learn has no common direction, so some
            contributions are then left out in most rounds.
    """
    codecs = codecs if codecs is not None else codecs_of("int4")
    spans = [SpanId(fragment, index) for fragment, count in enumerate(num_spans) for index in range(count)]
    return RunRules(
        run=RUN,
        organiser=ORGANISER,
        clock=RoundClock(start_seconds=ROUND_ZERO, round_seconds=round_seconds, num_fragments=len(num_spans)),
        num_spans=num_spans,
        span_elements=dict.fromkeys(spans, span_elements),
        payload_bytes=dict.fromkeys(spans, codecs.contribution.encoded_bytes(span_elements)),
        row_mean_bytes=dict.fromkeys(spans, codecs.row_mean.encoded_bytes(span_elements)),
        entry_bytes=dict.fromkeys(spans, codecs.entry.encoded_bytes(span_elements)),
        group_size=group_size,
        least_stalled_cycles=stalled_cycles,
        heartbeat_seconds=heartbeat_seconds,
        retained_cycles=16,
        scrub_cycles=scrub_cycles,
        has_strangers=has_strangers,
    )


def start_vector(span: SpanId, elements: int) -> Vector:
    """Return the initial anchor of a span; spans differ, so that none can pass for another."""
    steps = (np.arange(elements) % SPAN_ELEMENTS).astype(np.float32)
    start_N: Vector = (steps + np.float32(1 + span.index + 10 * span.fragment)) / np.float32(64)
    return start_N


def start_states(rules: RunRules, founding: Roster) -> dict[SpanId, SpanState]:
    """Return the initial states of all spans."""
    return {
        span: genesis_state(start_vector(span, elements), founding.digest())
        for span, elements in rules.span_elements.items()
    }


def found_run(rules: RunRules, founder: Member, cycle: int) -> CertifiedRoster:
    """Return roster 0, signed by the organiser."""
    starts = [start_vector(span, elements) for span, elements in rules.span_elements.items()]
    genesis = sha256(*(content_digest(start_N, start_N * 0, ZERO_DIGEST) for start_N in starts))
    roster = founding_roster(rules.run, genesis, founder, cycle)
    signature = sign_as(ORGANISER, founding_statement(roster.digest()))
    return CertifiedRoster(roster=roster, ballot=0, votes=((ORGANISER, signature),))


@lru_cache(maxsize=1 << 12)
def proof_of(peer: PeerId, prover: PeerId, cycle: int, place: bytes = NO_PLACE) -> ReachProof:
    """Return the proof by `prover` that it has dialled `peer`."""
    unsigned = ReachProof(prover=prover, place=place, cycle=cycle, signature=bytes(64))
    return replace(unsigned, signature=sign_as(prover, unsigned.statement(RUN, peer)))
