"""Which spans a peer contributes when its upload has a cap: as many as fit a round, those first that waited longest.

Spans are independent logs, so a peer need not send all of a contribution or nothing. What it reduces itself costs it
nothing; what it must hand out to others, as a reducer, comes before its own contribution; it follows all entries.
"""

from __future__ import annotations

from collections import Counter

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.demand import contribution_budget
from p2p_diloco.protocol.round import Collection
from p2p_diloco.protocol.rules import RunRules

ENTRY_HEADER_BYTES = 300
"""Digests, signature, weights and so on: not nothing beside an entry of a small model."""


class Ration:
    """One peer's upload, round by round. A state machine without I/O.

    Attributes:
        bytes_per_second: the cap; None: none.
        backlog_bytes: what is still to go out of what was sent before; kept by the shell.
    """

    def __init__(self, *, rules: RunRules, me: PeerId) -> None:
        self.bytes_per_second: float | None = None
        self.backlog_bytes = 0.0
        self._rules = rules
        self._me = me
        self._offered: dict[SpanId, int] = {}
        self._turns: Counter[SpanId] = Counter()

    def choose(self, collection: Collection, left_out: frozenset[SpanId] = frozenset()) -> frozenset[SpanId] | None:
        """Return the spans to contribute to the round of `collection`, perhaps none; None: all.

        Peers under caps begin at different spans, so that no span lacks all of them at once.
        """
        rules, grid = self._rules, collection.grid
        num_spans = rules.num_spans[collection.fragment]
        first = int.from_bytes(self._me[:4], "little") % num_spans
        spans = [SpanId(collection.fragment, (first + place) % num_spans) for place in range(num_spans)]
        spans = [span for span in spans if span not in left_out]
        if self.bytes_per_second is None:
            return frozenset(spans) if len(spans) < num_spans else None
        spans.sort(key=lambda span: (self._offered.get(span, -1), self._turns[span]))
        budget = contribution_budget(
            self.bytes_per_second, rules.clock.round_seconds, handed_out=self._handed_out(collection)
        )
        budget -= self.backlog_bytes
        chosen = set()
        for span in spans:
            cost = 0 if grid.reducer(span, collection.row) == self._me else rules.payload_bytes[span]
            if cost <= max(budget, 0.0):
                budget -= cost
                chosen.add(span)
        self._offered.update(dict.fromkeys(chosen, collection.round))
        self._turns.update(chosen)
        return frozenset(chosen)

    def _handed_out(self, collection: Collection) -> float:
        """Return how many bytes this peer sends in the round for what it reduces."""
        rules, grid = self._rules, collection.grid
        row = len(collection.members) - 1
        total = 0
        for span in collection.reduced:
            entry_bytes = rules.entry_bytes[span] + ENTRY_HEADER_BYTES
            if grid.owner(span) == self._me:
                total += (row + len(grid.column(span)) - 1) * entry_bytes
            else:
                total += row * entry_bytes + rules.row_mean_bytes[span]
        return total
