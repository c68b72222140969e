"""The run that the lab plays: who founds it, its rules, its start, and signatures that cost next to nothing.

Nobody in the lab forges, so a signature is a hash: it binds signer and statement, which is all that the rules ask of
it, and a swarm of sixty is not held up by Ed25519.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState, content_digest, genesis_state
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.member import Member
from p2p_diloco.protocol.roster import CertifiedRoster, Roster, founding_roster, founding_statement
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.swarm.vector_work import Codecs

RUN = sha256(b"a run in the lab")
ROUND_SECONDS = 8.0


def peer_named(name: str) -> PeerId:
    """Return the id of a peer, the same in every run."""
    return PeerId(sha256(b"peer", name.encode()))


ORGANISER = peer_named("organiser")


@lru_cache(maxsize=1 << 16)
def sign_as(peer: PeerId, statement: bytes) -> bytes:
    """Return 64 bytes that only `verify` of the same peer and statement takes."""
    return sha256(b"signed by", peer, statement) * 2


def signer(peer: PeerId) -> Callable[[bytes], bytes]:
    """Return the key of `peer`, as the rules use one."""
    return lambda statement: sign_as(peer, statement)


def verify(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    """Tell whether `peer` has signed `statement`."""
    return signature == sign_as(peer, statement)


def toy_rules(
    *,
    num_spans: tuple[int, ...],
    span_elements: int,
    codecs: Codecs,
    group_size: int = 16,
    void_cycles: int = 8,
    scrub_cycles: int = 8,
    heartbeat_seconds: float = 1.0,
    round_seconds: float = ROUND_SECONDS,
) -> RunRules:
    """Return the rules of a run whose round 0 begins at second 0.

    Args:
        num_spans: spans of each fragment.
        span_elements: elements of every span; a few, for the rules never look into a vector.
        codecs: payload sizes follow from them.
    """
    spans = [SpanId(fragment, index) for fragment, count in enumerate(num_spans) for index in range(count)]
    return RunRules(
        run=RUN,
        organiser=ORGANISER,
        clock=RoundClock(start_seconds=0.0, round_seconds=round_seconds, num_fragments=len(num_spans)),
        num_spans=num_spans,
        span_elements=dict.fromkeys(spans, span_elements),
        payload_bytes=dict.fromkeys(spans, codecs.contribution.encoded_bytes(span_elements)),
        row_mean_bytes=dict.fromkeys(spans, codecs.row_mean.encoded_bytes(span_elements)),
        entry_bytes=dict.fromkeys(spans, codecs.entry.encoded_bytes(span_elements)),
        group_size=group_size,
        void_cycles=void_cycles,
        heartbeat_seconds=heartbeat_seconds,
        weight_clip=4.0,
        contribution_limit=2.0,
        entry_limit=3.0,
        retained_cycles=16,
        scrub_cycles=scrub_cycles,
    )


def found_run(rules: RunRules, founder: Member) -> CertifiedRoster:
    """Return roster 0, signed by the organiser."""
    starts = (start_vector(span, elements) for span, elements in rules.span_elements.items())
    genesis = sha256(*(content_digest(start_N, start_N * 0, ZERO_DIGEST) for start_N in starts))
    roster = founding_roster(rules.run, genesis, founder)
    signature = sign_as(ORGANISER, founding_statement(roster.digest()))
    return CertifiedRoster(roster=roster, ballot=0, votes=((ORGANISER, signature),))


def start_vector(span: SpanId, elements: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return where a span starts; spans differ, so that none can pass for another."""
    steps = np.arange(elements, dtype=np.float32)
    return (steps + np.float32(1 + span.index + 10 * span.fragment)) / np.float32(64)


def start_states(rules: RunRules, founding: Roster) -> dict[SpanId, SpanState]:
    """Return all spans as founded."""
    return {
        span: genesis_state(start_vector(span, elements), founding.digest())
        for span, elements in rules.span_elements.items()
    }
