"""All that the rules take from the manifest and from this peer's settings, in one value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId, SpanId, format_peer_id
from p2p_diloco.protocol.clock import RoundClock

SHORTEST_PIECE_SECONDS = 15.0
SHORTEST_STALL_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """The part of the manifest that the protocol needs.

    Attributes:
        organiser: whose key founds the run.
        founder: the only peer that may found it; None: whoever has that key.
        span_elements: elements of each span, the same on all peers.
        payload_bytes: bytes of an encoded contribution to each span.
        row_mean_bytes: bytes of an encoded mean of a row.
        entry_bytes: bytes of an encoded entry of each span.
        heartbeat_seconds: how often a peer says that it lives; silent after three of them and a round.
        listed: the only peers that may be members; None: everybody may.
        retained_cycles: cycles whose entries are kept on disk for those who catch up.
        void_cycles: after so many cycles without entries a quarter of the electorate may go on without the rest.
        scrub_cycles: contents are compared once in so many cycles.
        contribution_limit, entry_limit: norms refused beyond these multiples of the last published radius.
    """

    run: Digest
    organiser: PeerId
    clock: RoundClock
    num_spans: tuple[int, ...]
    span_elements: dict[SpanId, int]
    payload_bytes: dict[SpanId, int]
    row_mean_bytes: dict[SpanId, int]
    entry_bytes: dict[SpanId, int]
    group_size: int
    void_cycles: int
    heartbeat_seconds: float
    weight_clip: float
    contribution_limit: float
    entry_limit: float
    retained_cycles: int
    scrub_cycles: int = 8
    listed: frozenset[PeerId] | None = None
    founder: PeerId | None = None

    def may_be_member(self, peer: PeerId) -> bool:
        """Return whether the organiser lets `peer` take part; who founds the run always may."""
        return self.listed is None or peer in self.listed or peer == self.founder

    @property
    def num_all_spans(self) -> int:
        """Spans of all fragments: so many entries are made in a cycle at most."""
        return sum(self.num_spans)

    @property
    def cycle_seconds(self) -> float:
        """How long a cycle takes."""
        return self.clock.round_seconds * self.clock.num_fragments

    @property
    def stalled_cycles(self) -> int:
        """After so many cycles without an entry, sat through awake, the run is stalled."""
        return max(self.void_cycles, math.ceil(SHORTEST_STALL_SECONDS / self.cycle_seconds))

    @property
    def silence_seconds(self) -> float:
        """After this long without a heartbeat a peer counts as silent."""
        return max(3.0 * self.heartbeat_seconds, self.clock.round_seconds)

    @property
    def piece_seconds(self) -> float:
        """After this long without an answer a donor of spans is left for another one; thin links need their time."""
        return max(SHORTEST_PIECE_SECONDS, self.silence_seconds)


def explain_unlisted(peer: PeerId) -> str:
    """Return what a peer is told that is not on the list of a run that lists its peers."""
    return (
        f"this run takes listed peers only, and {format_peer_id(peer)} is not one of them; send this peer id to "
        "whoever gave you the invite: the list is part of the run, so a new run.toml must name it under [trust] peers"
    )
