"""Where a span's log stands, and how an entry moves it on. The one text of the chain rule."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.ids import Digest, sha256

GENESIS_ROUND = -1
"""The round of a span that has absorbed no entry yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanHead:
    """The tip of one span's log.

    Attributes:
        digest: chain digest d, which identifies the entries absorbed. At founding: the content digest of the start.
        height: number of entries absorbed since founding.
        round: round of the last entry; `GENESIS_ROUND` before the first.
        roster: digest of the roster that the last entry named; the founding roster's before the first.
        radius: median norm of contributions that the last entry published; at founding, a number that all agree on.
        median_weight: median weight of contributions that the last entry published; at founding, likewise.
    """

    digest: Digest
    height: int
    round: int
    roster: Digest
    radius: float
    median_weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedEntry:
    """What the tip takes from a valid entry.

    Attributes:
        digest: the entry's digest.
        round: the entry's round.
        roster: digest of the roster that it names.
        radius: median norm that it publishes.
        median_weight: median weight that it publishes.
    """

    digest: Digest
    round: int
    roster: Digest
    radius: float
    median_weight: float


def advance_head(head: SpanHead, entry: AbsorbedEntry) -> SpanHead:
    """Return the tip after `entry`: d ← H(d, entry digest), height + 1, and what the entry publishes."""
    return SpanHead(
        digest=sha256(head.digest, entry.digest),
        height=head.height + 1,
        round=entry.round,
        roster=entry.roster,
        radius=entry.radius,
        median_weight=entry.median_weight,
    )
