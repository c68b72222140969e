"""Credit: the tokens that entries include, per member, so that all peers that follow the log get the same sums.

An entry names the members in its mean with their weights, and the sum of their tokens. These tokens are divided among
them in proportion to the weights, in whole numbers that sum to the entry's tokens. A member's tokens of a cycle are in
the entries of all spans, so the sum over entries is in *token-spans*: tokens times spans. It is divided by the number
of spans only to be shown. Only entries that this peer has checked and absorbed count, and no peer's own report does.

With weights by tokens that are not clipped, the parts are the tokens that the members reported. Among strangers weights
are levelled, and so are the parts. An owner can sign a wrong sum of tokens, which then counts for all in its entry.

Sums are kept in blocks of cycles. Two peers that have followed all spans through a whole block have equal sums for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry, places_in
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.span_log import SpanHead, chain_digest

BLOCK_CYCLES = 256
MOST_BLOCKS, MOST_SUMS = 1024, 1 << 15
"""Maximum number of blocks that are kept, and of members' sums in all of them; the oldest blocks are dropped."""
_FLOAT32_BITS = 149
"""Every float32 is a whole multiple of two to the power of minus this."""


@functools.lru_cache(maxsize=64)  # most entries of a round have the same weights and tokens
def divide_tokens(tokens: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Divide tokens in proportion to float32 weights, exactly; the parts sum to `tokens`.

    Parts are rounded down, and what remains goes in ones to those that lost most; of equals, to the first.
    """
    shares = [int(math.ldexp(weight, _FLOAT32_BITS)) for weight in weights]
    whole = sum(shares)
    parts, losses = map(list, zip(*(divmod(tokens * share, whole) for share in shares), strict=True))
    by_loss = sorted(range(len(shares)), key=lambda place: (-losses[place], place))
    for place in by_loss[: tokens - sum(parts)]:
        parts[place] += 1
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """The last entry of a span that was counted: its chain digest, height and round."""

    digest: Digest
    height: int
    round: int


@dataclass(slots=True)
class Block:
    """The sums of one block, in token-spans, and a bit for each of its cycles of which entries may be missing."""

    sums: dict[PeerId, int] = field(default_factory=dict)
    missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCredit:
    """The counts of a peer, from which its next start goes on.

    Attributes:
        followed: the last cycle in which this peer held all spans at the tips of the others; -1 before the first.
        line: digest of the roster that was in force.
    """

    blocks: Mapping[int, Block] = field(default_factory=dict)
    tips: Mapping[SpanId, Tip] = field(default_factory=dict)
    followed: int = -1
    line: Digest | None = None

    def is_complete(self, block: int) -> bool:
        """Return whether a block is over, with all its entries counted; late ones have a cycle to arrive."""
        return block in self.blocks and not self.blocks[block].missing and self.followed > (block + 1) * BLOCK_CYCLES

    def missing(self, block: int) -> list[int]:
        """Return the cycles of a block of which entries may be missing."""
        bits = self.blocks[block].missing
        return [cycle for place, cycle in enumerate(cycles_of(block)) if bits >> place & 1]

    def covered(self, block: int) -> list[int]:
        """Return the other cycles of a block that are over, as far as this peer has followed the run."""
        missing = {*self.missing(block)}
        return [cycle for cycle in cycles_of(block) if cycle < self.followed and cycle not in missing]


def cycles_of(block: int) -> range:
    """Return the cycles of a block."""
    return range(block * BLOCK_CYCLES, (block + 1) * BLOCK_CYCLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """The parts of an entry that was counted, to take it back if another child of its parent wins."""

    parent: Digest
    cycle: int
    roster: Roster
    included: bytes
    tokens: int
    weights: tuple[float, ...]


class CreditBook:
    """Sums the tokens of absorbed entries. A state machine without I/O."""

    def __init__(self, rules: RunRules) -> None:
        self._rules = rules
        self._blocks: dict[int, Block] = {}
        self._tips: dict[SpanId, Tip] = {}
        self._last: dict[SpanId, _Counted] = {}
        self._followed = -1
        self._line: Digest | None = None

    def recall(self, saved: SavedCredit) -> None:
        """Go on from what an earlier start has saved."""
        self._blocks, self._tips = dict(saved.blocks), dict(saved.tips)
        self._followed, self._line = saved.followed, saved.line

    def saved(self) -> SavedCredit:
        """Return a copy of the counts, to be saved."""
        blocks = {number: Block(dict(block.sums), block.missing) for number, block in sorted(self._blocks.items())}
        return SavedCredit(blocks=blocks, tips=dict(self._tips), followed=self._followed, line=self._line)

    def entry_absorbed(self, entry: Entry, roster: Roster) -> None:
        """Count an entry that this peer has absorbed, of a known roster."""
        span, tip, last = entry.span, self._tips.get(entry.span), self._last.get(entry.span)
        if tip is None or tip.digest != entry.parent:
            if last is not None and last.parent == entry.parent:
                self._add(last, -1)  # another child of its parent has won
            else:
                self._jump(span, Tip(digest=entry.parent, height=entry.height - 1, round=entry.round - 1))
        counted = _Counted(
            parent=entry.parent,
            cycle=self._rules.clock.cycle(entry.round),
            roster=roster,
            included=entry.included,
            tokens=entry.tokens,
            weights=entry.weights,
        )
        self._add(counted, 1)
        self._last[span] = counted
        digest = chain_digest(entry.parent, entry.digest())
        self._tips[span] = Tip(digest=digest, height=entry.height, round=entry.round)

    def replay(
        self, heads: Mapping[SpanId, SpanHead], entry_after: Callable[[SpanId, Digest], Entry | None], book: RosterBook
    ) -> None:
        """Count the entries on this peer's disk that an earlier start has absorbed and not saved the sums of."""
        for span, head in heads.items():
            while (tip := self._tips.get(span)) is not None and tip.height < head.height:
                entry = entry_after(span, tip.digest)
                if entry is None or entry.parent != tip.digest or entry.roster not in book:
                    break
                self.entry_absorbed(entry, book.roster(entry.roster))

    def look(self, book: RosterBook, heads: Mapping[SpanId, SpanHead], cycle: int, *, is_level: bool) -> None:
        """Note, in each round, where this peer stands: tips to which no entries have led are gaps.

        Args:
            is_level: whether it lacks no entries that it knows of.
        """
        if cycle < 0 or book.in_force_digest is None:
            return
        if self._line is not None and not book.is_on_chain(self._line):
            self._miss(self._parted_in(book, self._line), cycle)
        self._line = book.in_force_digest
        for span, head in heads.items():
            tip, last = self._tips.get(span), self._last.get(span)
            is_step_back = last is not None and last.parent == head.digest  # the other child follows
            if (tip is None or tip.digest != head.digest) and not is_step_back:
                self._jump(span, Tip(digest=head.digest, height=head.height, round=head.round))
        if len(heads) == self._rules.num_all_spans:
            self._followed = cycle if is_level else self._followed
        elif self._blocks:
            self._miss(cycle, cycle)
        while len(self._blocks) > 1 and (
            len(self._blocks) > MOST_BLOCKS or sum(len(block.sums) for block in self._blocks.values()) > MOST_SUMS
        ):
            del self._blocks[min(self._blocks)]

    def _parted_in(self, book: RosterBook, line: Digest) -> int:
        """Return the first cycle whose entries may be of a line of rosters that this peer has given up."""
        parting = book.parting(line)
        return self._rules.clock.cycle(self._rules.clock.agreed_in(parting[2][0].ballot) + 1) if parting else 0

    def _jump(self, span: SpanId, to: Tip) -> None:
        """Note that a span was taken from others at a tip: entries before it are missing, or did not lead there."""
        tip, last = self._tips.get(span), self._rules.clock.cycle(to.round)
        self._tips[span] = to
        self._last.pop(span, None)
        if tip is not None:
            self._miss(self._rules.clock.cycle(min(tip.round, to.round)), last)
        elif to.height > 0:
            self._miss(last - last % BLOCK_CYCLES, last)

    def _miss(self, first: int, last: int) -> None:
        first = max(first, last - MOST_BLOCKS * BLOCK_CYCLES, 0)
        for number in range(first // BLOCK_CYCLES, last // BLOCK_CYCLES + 1):
            begin = number * BLOCK_CYCLES
            low, high = max(first - begin, 0), min(last - begin, BLOCK_CYCLES - 1)
            self._blocks.setdefault(number, Block()).missing |= (1 << high + 1) - (1 << low)

    def _add(self, counted: _Counted, sign: int) -> None:
        sums = self._blocks.setdefault(counted.cycle // BLOCK_CYCLES, Block()).sums
        parts = divide_tokens(counted.tokens, counted.weights)
        for place, tokens in zip(places_in(counted.included), parts, strict=True):
            peer = counted.roster.members[place].peer
            total = sums.pop(peer, 0) + sign * tokens
            if total:
                sums[peer] = total
