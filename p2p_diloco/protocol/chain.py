"""The logs of all spans without their vectors: what is absorbed, what waits for a parent, what others may ask for.

Strictly in parent order: an entry whose parent is missing waits while the parent is fetched, and is never applied.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, SpanHead, SpanId, sha256
from p2p_diloco.protocol.entry import HEAD_LAYOUT, Entry, EntryRules, check_entry, is_signed_by_owner, next_head
from p2p_diloco.protocol.grid import Grid
from p2p_diloco.protocol.roster import Roster, Verify
from p2p_diloco.protocol.wire import to_bytes

MOST_WAITING_PER_SPAN = 16


class EntryFate(enum.Enum):
    """What became of an entry."""

    ABSORBED = "absorbed"
    KNOWN = "known"
    WAITS = "waits for its parent"
    LACKS_ROSTER = "names a roster that is not known here"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryVerdict:
    """The fate of an entry, all entries absorbed because of it, in order, and the reason of a refusal."""

    fate: EntryFate
    absorbed: tuple[Entry, ...] = ()
    reason: str = ""


class ChainBook:
    """The heads of all spans and the entries kept for those who missed them. A state machine without I/O.

    Args:
        rules: what the manifest says about entries.
        retained_cycles: how many cycles' entries are kept here for others; older ones lie on the shell's disk.
    """

    def __init__(self, *, rules: EntryRules, retained_cycles: int, verify: Verify) -> None:
        self.heads: dict[SpanId, SpanHead] = {}
        self._rules = rules
        self._verify = verify
        self._retained_rounds = retained_cycles * rules.clock.num_fragments
        self._kept: dict[SpanId, dict[Digest, Entry]] = {}
        self._waiting: dict[SpanId, dict[Digest, tuple[Entry, float]]] = {}
        self._digests: dict[int, Digest] = {}

    def set_head(self, span: SpanId, head: SpanHead) -> None:
        """Let a span stand where a transfer, a checkpoint or the founding puts it.

        Entries kept for others are dropped: they may belong to a branch that was given up.
        """
        self.heads[span] = head
        self._digests.pop(span.fragment, None)
        self._kept.pop(span, None)

    def drop_head(self, span: SpanId) -> None:
        """Hold a span no more: its log belongs to a branch that was given up."""
        self.heads.pop(span, None)
        self._digests.pop(span.fragment, None)
        self._kept.pop(span, None)
        self._waiting.pop(span, None)

    def is_known(self, entry: Entry) -> bool:
        """Tell, before its payload costs any work, whether an entry says nothing new."""
        head = self.heads.get(entry.span)
        if head is None or entry.height <= head.height:
            return True
        return entry.parent != head.digest and entry.parent in self._waiting.get(entry.span, {})

    def offer(self, entry: Entry, payload_norm: float, rosters: Mapping[Digest, tuple[Roster, Grid]]) -> EntryVerdict:
        """Judge an entry; absorb it and all that waited for it when the predicate holds."""
        if self.is_known(entry):
            return EntryVerdict(fate=EntryFate.KNOWN)
        if entry.roster not in rosters:
            return EntryVerdict(fate=EntryFate.LACKS_ROSTER)
        if entry.parent != self.heads[entry.span].digest:
            return self._wait(entry, payload_norm, rosters[entry.roster][1])
        try:
            self._absorb(entry, payload_norm, rosters)
        except PeerError as error:
            return EntryVerdict(fate=EntryFate.REFUSED, reason=str(error))
        return EntryVerdict(fate=EntryFate.ABSORBED, absorbed=(entry, *self._absorb_waiting(entry.span, rosters)))

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        """Return the kept entry of `span` whose parent is `parent`, for a peer that missed it."""
        return self._kept.get(span, {}).get(parent)

    def fragment_heads(self, fragment: int, num_spans: int) -> tuple[SpanHead, ...] | None:
        """Return the heads of a fragment in span order, or None while one is missing."""
        heads = [self.heads.get(SpanId(fragment, index)) for index in range(num_spans)]
        found = tuple(head for head in heads if head is not None)
        return found if len(found) == num_spans else None

    def fragment_digest(self, fragment: int, num_spans: int) -> Digest | None:
        """Return a digest over a fragment's heads, or None while one is missing; computed once after each change."""
        digest = self._digests.get(fragment)
        if digest is None:
            heads = self.fragment_heads(fragment, num_spans)
            if heads is not None:
                digest = self._digests[fragment] = heads_digest(heads)
        return digest

    def _wait(self, entry: Entry, payload_norm: float, grid: Grid) -> EntryVerdict:
        if not is_signed_by_owner(entry, grid, self._verify):
            reason = f"the entry for {entry.span} in round {entry.round} is not signed by its owner"
            return EntryVerdict(fate=EntryFate.REFUSED, reason=reason)
        waiting = self._waiting.setdefault(entry.span, {})
        if len(waiting) >= MOST_WAITING_PER_SPAN:
            waiting.clear()
        waiting[entry.parent] = (entry, payload_norm)
        return EntryVerdict(fate=EntryFate.WAITS)

    def _absorb(self, entry: Entry, payload_norm: float, rosters: Mapping[Digest, tuple[Roster, Grid]]) -> None:
        head = self.heads[entry.span]
        roster, grid = rosters[entry.roster]
        check_entry(entry, head, roster, grid, self._rules, payload_norm, self._verify)
        self.heads[entry.span] = next_head(head, entry)
        self._digests.pop(entry.span.fragment, None)
        kept = self._kept.setdefault(entry.span, {})
        kept[entry.parent] = entry
        for parent in [p for p, old in kept.items() if old.round <= entry.round - self._retained_rounds]:
            del kept[parent]

    def _absorb_waiting(self, span: SpanId, rosters: Mapping[Digest, tuple[Roster, Grid]]) -> list[Entry]:
        waiting = self._waiting.get(span, {})
        absorbed: list[Entry] = []
        while (candidate := waiting.pop(self.heads[span].digest, None)) is not None:
            try:
                self._absorb(*candidate, rosters)
            except PeerError:
                break
            absorbed.append(candidate[0])
        height = self.heads[span].height
        for parent in [p for p, (entry, _) in waiting.items() if entry.height <= height]:
            del waiting[parent]
        return absorbed


class Remedy(enum.Enum):
    """What a span needs, compared with where another peer's stands."""

    NOTHING = "nothing"
    REPLAY = "the entries after mine"
    TRANSFER = "the whole span"


def choose_remedy(mine: SpanHead | None, theirs: SpanHead) -> Remedy:
    """Compare a span with another peer's at a closed boundary. Both sides, asked about the other, agree on who moves.

    More entries behind it wins, since each needed a majority that named its parent; then the later round; then the
    smaller digest. A replay that turns out impossible, because the other side has no child of my head, becomes a
    transfer.
    """
    if mine is None:
        return Remedy.TRANSFER
    if mine.digest == theirs.digest or theirs.height < mine.height:
        return Remedy.NOTHING
    if theirs.height > mine.height:
        return Remedy.REPLAY
    they_win = (-theirs.round, theirs.digest) < (-mine.round, mine.digest)
    return Remedy.TRANSFER if they_win else Remedy.NOTHING


def heads_digest(heads: Sequence[SpanHead]) -> Digest:
    """Return a digest over a fragment's heads, all fields: a donor may have lied about a height or a radius."""
    return sha256(*(to_bytes(head, HEAD_LAYOUT) for head in heads))
