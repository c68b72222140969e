"""The tip of a span's log, and how an entry advances it. The only definition of the chain rule."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.ids import Digest, sha256

GENESIS_ROUND = -1
"""Round of a span that has not absorbed any entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanHead:
    """The tip of one span's log.

    Attributes:
        digest: chain digest d, which identifies the entries absorbed. At founding: the content digest of the start.
        height: number of entries absorbed since founding.
        round: round of the last entry; `GENESIS_ROUND` before the first.
        roster: digest of the roster named in the last entry; the founding roster's before the first.
        radius: median norm of contributions published in the last entry; a constant at founding.
        median_weight: median weight of contributions published in the last entry; a constant at founding.
    """

    digest: Digest
    height: int
    round: int
    roster: Digest
    radius: float
    median_weight: float

    def norm_limit(self, ratio: float) -> float:
        """Return the largest norm that is accepted on top of this tip: a multiple of the published radius."""
        return ratio * self.radius


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedEntry:
    """The values of a valid entry that become part of the tip.

    Attributes:
        digest: the entry's digest.
        round: the entry's round.
        roster: digest of the roster named in it.
        radius: median norm published in it.
        median_weight: median weight published in it.
    """

    digest: Digest
    round: int
    roster: Digest
    radius: float
    median_weight: float


def advance_head(head: SpanHead, entry: AbsorbedEntry) -> SpanHead:
    """Return the tip after `entry`: d ← H(d, entry digest), height + 1, and the entry's published values."""
    return SpanHead(
        digest=sha256(head.digest, entry.digest),
        height=head.height + 1,
        round=entry.round,
        roster=entry.roster,
        radius=entry.radius,
        median_weight=entry.median_weight,
    )
