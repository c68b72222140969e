"""Actions that the rules ask the shell to perform, in the order given."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.log.head import SpanHead
from p2p_diloco.protocol.membership.histories import Liveliness
from p2p_diloco.protocol.wire.ballot import Ballots
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import Message, SignedContentRequest
from p2p_diloco.protocol.wire.roster import CertifiedRoster


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send `message` to a linked peer; worthless after `deadline` (swarm seconds)."""

    to: PeerId
    message: Message
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBallots:
    """Put `ballots` on disk before any later action of the same list is played."""

    ballots: Ballots


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRoster:
    """Put a certified roster on disk."""

    certified: CertifiedRoster


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLiveliness:
    """Put on disk since when this peer's own line of rosters goes on; once a cycle."""

    liveliness: Liveliness


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSnapshot:
    """Ask the island for its contribution to a round, at its next step border; worthless after `deadline`.

    `spans`: of the fragment, those to contribute; None: all.
    """

    round: int
    fragment: int
    deadline: float
    spans: frozenset[SpanId] | None = None


class Stage(enum.Enum):
    """A step of averaging. A run of one row goes from contributions to the entry in one step."""

    WHOLE = "contributions to the entry"
    ROW = "contributions to the mean of their row"
    FINISH = "row means to the entry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One contribution to one span, or one row's mean of it, as it is weighed; `peer` is who sent it."""

    peer: PeerId
    payload: bytes | memoryview
    weight: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSpan:
    """Average `parts` (roster order); drop those that are not finite or longer than `norm_limit`; encode the mean.

    `norm_limit` is infinite where a reducer does not hold the parent and fewer than three contributions came.
    `rounding_seed` makes the encoding one that anyone can redo; the mean of a row is rounded to nearest.
    """

    round: int
    span: SpanId
    stage: Stage
    parts: tuple[Part, ...]
    norm_limit: float
    rounding_seed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyEntry:
    """Absorb a valid entry into the outer state at the next step border. Entries of a span come in parent order."""

    entry: Entry
    own_included: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceSpan:
    """Take a span's bytes (anchor, then momentum, float32 little-endian) at `head`, behind all entries handed over.

    `state` is handed over: nobody else writes to it, or reads it, any more.
    `is_mended`: the same log, put right; otherwise it may be another branch, and entries kept of the span are given up.
    `is_adoption`: an announced one, after which the log may be shorter.
    """

    span: SpanId
    head: SpanHead
    state: bytes | memoryview
    is_mended: bool = False
    is_adoption: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSpan:
    """Send a piece of a span, as this peer holds it, to `to`; no more than `most_bytes` of it."""

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
    """Work out from a checkpoint and own entries what a span's bytes should be; answer with `span_rebuilt`."""

    span: SpanId


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildParent:
    """Work out from a checkpoint and own entries what a span was before the entry that led to `tip`.

    Answer with `parent_rebuilt`.
    """

    span: SpanId
    tip: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class HashSpan:
    """Return the content digest of a span that was transferred, before anything takes it; answer with `span_hashed`.

    `state` is as in `ReplaceSpan`, but stays with the engine.
    """

    span: SpanId
    head: SpanHead
    state: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeContent:
    """Hash a fragment's spans and send the digests to `to`; as `question` asks, where they are to be signed."""

    to: PeerId
    fragment: int
    question: SignedContentRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareContent:
    """Hash a fragment's spans and say where they differ from `peer`'s at equal chain digests.

    `link` is who has sent them: the peer itself, or another one that carried what it signed.
    """

    peer: PeerId
    link: PeerId
    fragment: int
    digests: tuple[tuple[Digest, Digest], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """A round is over: what came of it.

    Attributes:
        num_spans, num_entries: spans of the fragment, and how many of them got an entry.
        num_included: included contributions, summed over those entries.
        num_ready: ready peers known here, those that could have been included.
        num_members: members on the roster of the round that train.
    """

    round: int
    num_spans: int
    num_entries: int
    num_included: int
    num_ready: int
    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something that people may want to know; `topic` is a stable word, `text` a sentence."""

    topic: str
    text: str


Action = (
    Send | KeepBallots | KeepRoster | KeepLiveliness | TakeSnapshot | ReduceSpan | ApplyEntry | ReplaceSpan | ServeSpan
    | ServeEntry | ServeContent | CompareContent | RebuildSpan | RebuildParent | HashSpan | RoundClosed | Report
)  # fmt: skip
