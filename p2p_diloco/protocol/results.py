"""Results of the work that the shell does for the rules: values that go into `PeerEngine.take_result`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.protocol.actions import ReduceSpan
from p2p_diloco.protocol.round.influence import Agreement
from p2p_diloco.protocol.round.round import FragmentContribution
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.span_log import SpanHead


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryChecked:
    """An entry whose payload the codec found sound, with the exact norm of the payload."""

    sender: PeerId
    entry: Entry
    payload_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryCompared:
    """Agreement of an entry with this peer's contribution to it."""

    entry: Entry
    agreement: Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanReduced:
    """Result of a `ReduceSpan`.

    Attributes:
        sound: the senders whose parts count; empty if there is no mean.
        measured: norms of the parts of contributors; a norm that one claims counts only as far as they allow.
        against: senders whose parts are left out because they point against the others.
    """

    order: ReduceSpan
    sound: frozenset[PeerId] = frozenset()
    payload: bytes | memoryview = b""
    payload_norm: float = 0.0
    measured: Mapping[PeerId, float] = field(default_factory=dict)
    against: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentCompared:
    """Result of a `CompareContent`: the number of equal spans, and those at the same tip whose content differs."""

    peer: PeerId
    fragment: int
    num_equal: int
    differing: tuple[SpanId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRebuilt:
    """Result of a `RebuildSpan`.

    Attributes:
        head: the tip at which the span was rebuilt; None if the disk does not reach it.
        state: the bytes that the span should have; None if it has them.
    """

    span: SpanId
    head: SpanHead | None = None
    state: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRebuilt:
    """Result of a `RebuildParent`: the span's head before `tip`, and its bytes; None for both if it failed."""

    span: SpanId
    tip: Digest
    parent: SpanHead | None = None
    state: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanHashed:
    """Result of a `HashSpan`: the content digest of a transferred span."""

    span: SpanId
    head: SpanHead
    content: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanDamaged:
    """A span to which a valid entry could not be applied: its memory is damaged, while its log has moved on."""

    span: SpanId
    reason: str


RepairResult = ContentCompared | SpanRebuilt | ParentRebuilt | SpanHashed | SpanDamaged
Result = EntryChecked | EntryCompared | SpanReduced | FragmentContribution | RepairResult
