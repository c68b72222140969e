"""The values that the rules of the protocol use, from the manifest or constant, in one record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2p_diloco.ids import Digest, PeerId, SpanId, format_peer_id
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.span_log import MAX_NORM_RATIO, MAX_WEIGHT_RATIO, REJECT_NORM_RATIO

HEARTBEAT_SECONDS = 1.0
"""Interval between a peer's heartbeats, or the length of a round if that is shorter."""
STALLED_CYCLES = 3
SCRUB_CYCLES = 8
SHORTEST_PIECE_SECONDS = 15.0
SHORTEST_STALL_SECONDS = 20.0
ABSENT_CYCLES = 4
SHORTEST_ABSENCE_SECONDS = 20.0
CLOSED_SECONDS = 5.0
"""Time for which a closed link must stay closed: on a long line, dialling again takes three to four seconds."""


LIMITS_OF_TOKENS: Mapping[str, Any] = {
    "has_strangers": False,
    "weight_clip": 256.0,
    "contribution_limit": 16.0,
    "entry_limit": 24.0,
}
"""Rules of a run in which each island counts by the tokens that it reports: limits are for mistakes, not for liars. An
island that is 64 times as fast as most keeps within them (docs/decisions/weights-and-influence.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """The rules of a run. Values with a default are the same in all runs, except in experiments.

    Attributes:
        organiser: the peer whose key founds the run.
        founder: the only peer that may found it; None: any peer that has that key.
        span_elements: elements of each span, the same on all peers.
        payload_bytes: bytes of an encoded contribution to each span.
        row_mean_bytes: bytes of an encoded mean of a row.
        entry_bytes: bytes of an encoded entry of each span.
        heartbeat_seconds: interval between a peer's heartbeats; see `silence_seconds`.
        listed: the only peers that may be members; None: every peer may.
        retained_cycles: cycles whose entries are kept on disk for peers that catch up.
        least_stalled_cycles: cycles without entries after which a quarter of the electorate may continue alone.
        scrub_cycles: interval, in cycles, at which contents are compared.
        has_strangers: whether what members say about their tokens may lower their weight only.
        weight_clip: largest weight of a contribution, as a multiple of the last published median.
        contribution_limit, entry_limit: largest accepted norms, as multiples of the last published radius.
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
    heartbeat_seconds: float
    retained_cycles: int
    least_stalled_cycles: int = STALLED_CYCLES
    scrub_cycles: int = SCRUB_CYCLES
    has_strangers: bool = True
    weight_clip: float = MAX_WEIGHT_RATIO
    contribution_limit: float = MAX_NORM_RATIO
    entry_limit: float = REJECT_NORM_RATIO
    listed: frozenset[PeerId] | None = None
    founder: PeerId | None = None

    def may_be_member(self, peer: PeerId) -> bool:
        """Return whether the organiser lets `peer` take part; the founder always may."""
        return self.listed is None or peer in self.listed or peer == self.founder

    @property
    def num_all_spans(self) -> int:
        """Number of spans of all fragments: the maximum number of entries in a cycle."""
        return sum(self.num_spans)

    @property
    def cycle_seconds(self) -> float:
        """Length of a cycle."""
        return self.clock.round_seconds * self.clock.num_fragments

    @property
    def stalled_cycles(self) -> int:
        """Number of cycles without an entry after which the run is stalled; only cycles spent awake count."""
        return max(self.least_stalled_cycles, math.ceil(SHORTEST_STALL_SECONDS / self.cycle_seconds))

    @property
    def absence_rounds(self) -> int:
        """Rounds without an entry for which a member was present after which it counts as gone.

        On lines that people have, a member may miss some rounds in a row, and a roster costs all members a part of one.
        """
        least = math.ceil(SHORTEST_ABSENCE_SECONDS / self.clock.round_seconds)
        return max(ABSENT_CYCLES * self.clock.num_fragments, least)

    @property
    def closed_seconds(self) -> float:
        """Time after which a member whose link was closed, and not opened again, counts as gone."""
        return max(self.cycle_seconds, self.silence_seconds, CLOSED_SECONDS)

    @property
    def silence_seconds(self) -> float:
        """Time without a heartbeat after which a peer counts as silent."""
        return max(3.0 * self.heartbeat_seconds, self.clock.round_seconds)

    @property
    def piece_seconds(self) -> float:
        """Time without an answer after which a donor of spans is replaced by another; long enough for thin links."""
        return max(SHORTEST_PIECE_SECONDS, self.silence_seconds)


def explain_unlisted(peer: PeerId) -> str:
    """Return the message for a peer that is not on the list of a run that lists its peers."""
    return (
        f"this run accepts listed peers only, and {format_peer_id(peer)} is not one of them; send this peer id to "
        "whoever gave you the invite: the list is part of the run, so a new run.toml must name it under [trust] peers"
    )
