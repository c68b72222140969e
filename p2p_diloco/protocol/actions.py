"""Actions that the rules request from the shell, which performs them in the order given."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.protocol.membership.histories import Activity
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import Message, SignedContentRequest
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.span_log import SpanHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send `message` to a linked peer; useless after `deadline` (swarm seconds)."""

    to: PeerId
    message: Message
    deadline: float


def sends(to: Iterable[PeerId], message: Message, deadline: float) -> list[Send]:
    """Return the actions that send one message to several peers, in the order of their names."""
    return [Send(to=peer, message=message, deadline=deadline) for peer in sorted(to)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBallots:
    """Write `ballots` to disk before performing any later action of the same list."""

    ballots: Ballots


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRoster:
    """Remember a certified roster, and write it to disk if it is in force.

    Other lines stay in memory: the next start would judge them anew, without what this peer had observed of its own.
    """

    certified: CertifiedRoster
    is_in_force: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepActivity:
    """Write to disk how long this peer's own line of rosters has been active; once a cycle."""

    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContribution:
    """Ask the island for its contribution to a round, at its next step border; useless after `deadline`.

    `spans`: the spans of the fragment to contribute; None: all.
    """

    round: int
    fragment: int
    deadline: float
    spans: frozenset[SpanId] | None = None


class Stage(enum.Enum):
    """A step of averaging. A run of one row needs only one, from contributions to the entry."""

    WHOLE = "contributions to the entry"
    ROW = "contributions to the mean of their row"
    FINISH = "row means to the entry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A contribution to a span, or a row's mean of it, with its weight; `peer` is the sender."""

    peer: PeerId
    payload: bytes | memoryview
    weight: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSpan:
    """Average `parts` (roster order); drop those that are not finite or longer than `norm_limit`; encode the mean.

    `norm_limit` is infinite if the reducer does not hold the parent and fewer than three contributions arrived.
    `rounding_seed` makes the encoding reproducible by any peer; the mean of a row is rounded to nearest. `levels`: no
    weight of a row counts for more than their median.
    """

    round: int
    span: SpanId
    stage: Stage
    parts: tuple[Part, ...]
    norm_limit: float
    rounding_seed: bytes
    levels: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyEntry:
    """Apply a valid entry to the outer state at the next step border. Entries of a span arrive in parent order.

    `own`: this peer's encoded contribution, to be compared with the entry that includes it; None: nothing to compare.
    """

    entry: Entry
    own_included: bool
    own: bytes | memoryview | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceSpan:
    """Replace a span's bytes (anchor, then momentum, float32 little-endian) at `head`, after all entries so far.

    `state` changes owner: the sender no longer reads or writes it.
    `is_mended`: the same log with corrected bytes. Otherwise it may be another branch, and the span's stored entries
    are given up.
    `is_adoption`: the change was reported, and the new log may be shorter.
    """

    span: SpanId
    head: SpanHead
    state: bytes | memoryview
    is_mended: bool = False
    is_adoption: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpan:
    """Send a piece of a span, as this peer holds it, to `to`; at most `most_bytes`."""

    to: PeerId
    span: SpanId
    version: Digest
    offset: int
    most_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeEntry:
    """Send the entry of `span` that follows `parent` from this peer's disk to `to`, or `EntryAbsent`."""

    to: PeerId
    span: SpanId
    parent: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildSpan:
    """Compute from this peer's checkpoint and entries what a span's bytes should be; answer with `SpanRebuilt`."""

    span: SpanId


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildParent:
    """Compute from this peer's checkpoint and entries the state of a span before the entry that led to `tip`.

    Answer with `ParentRebuilt`.
    """

    span: SpanId
    tip: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class HashSpan:
    """Compute the content digest of a transferred span before the span is used; answer with `SpanHashed`.

    `state` is as in `ReplaceSpan`, but the engine keeps it.
    """

    span: SpanId
    head: SpanHead
    state: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeContent:
    """Hash a fragment's spans and send the digests to `to`; signed, as the answer to `question`, if there is one."""

    to: PeerId
    fragment: int
    question: SignedContentRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareContent:
    """Hash a fragment's spans and report which differ from `peer`'s at equal chain digests.

    `link` is the peer that sent `digests`: `peer` itself, or another one that forwarded its signed answer.
    """

    peer: PeerId
    link: PeerId
    fragment: int
    digests: tuple[tuple[Digest, Digest], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """The result of a round that is over.

    Attributes:
        num_spans, num_entries: spans of the fragment, and how many of them got an entry.
        num_included: included contributions, summed over those entries.
        num_ready: ready peers known to this one, all of which could have been included.
        num_members: members of the round's roster that train.
    """

    round: int
    num_spans: int
    num_entries: int
    num_included: int
    num_ready: int
    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An event to report to the user; `topic` is a stable word, `text` a sentence."""

    topic: str
    text: str


Action = (
    Send | KeepBallots | KeepRoster | KeepActivity | RequestContribution | ReduceSpan | ApplyEntry | ReplaceSpan
    | ServeSpan | ServeEntry | ServeContent | CompareContent | RebuildSpan | RebuildParent | HashSpan | RoundClosed
    | Report
)  # fmt: skip
