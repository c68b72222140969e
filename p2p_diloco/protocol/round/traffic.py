"""The bandwidth of a run: what an exchange needs, the rates that carry it in time, and what fits under an upload cap.

The formula is defined only here. In one row of g members, each member sends its contribution to the reducers of all
spans that it does not reduce itself, and sends the entries of the spans that it reduces to all others: (1 - 1/g) of a
contribution and the same share of an entry. In a grid of R rows, a reducer also sends its share of the row's means, and
an owner sends its entries to the reducers of the other rows. A bootstrap peer that is needed is a member of the row: it
reduces and follows, but contributes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from p2p_diloco.ids import PeerId, SpanId
from p2p_diloco.protocol.clock import CONTRIBUTE_SHARE
from p2p_diloco.protocol.grid import num_rows
from p2p_diloco.protocol.membership.local import Conditions
from p2p_diloco.protocol.membership.proposal import ENOUGH_REDUCERS
from p2p_diloco.protocol.round.round import ReducerRound
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.member import EQUAL_SHARE, FULL_SHARE
from p2p_diloco.protocol.wire.roster import FEWEST_COUNTING
from p2p_diloco.rate import WIRE_SHARE

USABLE_SHARE = 0.85
"""Share of a capped line that vectors may use; headers, packets, control frames and short stalls take the rest."""
ENTRY_HEADER_BYTES = 300
"""Bytes of an entry besides its vector (digests, signature, weights …). They matter in small models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Bytes of a vector in each form that is sent. It may be a parameter, a fragment or a model; all is linear."""

    contribution: float
    row_mean: float
    entry: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes that one member sends and receives when a vector is exchanged once; the mean over spans and rosters.

    Attributes:
        contributed: sent to the reducers of its row.
        handed_out: sent as a reducer and owner: means of its row, and entries.
        gathered: received as a reducer and owner: contributions, and means of other rows.
        followed: entries received.
    """

    contributed: float
    handed_out: float
    gathered: float
    followed: float

    @property
    def sent(self) -> float:
        """Bytes sent in total."""
        return self.contributed + self.handed_out

    @property
    def received(self) -> float:
        """Bytes received in total."""
        return self.gathered + self.followed

    def with_headers(self) -> Flow:
        """Return the bytes that the line carries."""
        return Flow(**{name: WIRE_SHARE * getattr(self, name) for name in self.__slots__})


def exchange_flow(
    encoded: Encoded,
    *,
    members: int,
    group_size: int,
    reachable: int,
    is_reachable: bool,
    has_bootstrap: bool = False,
    share: float = 1.0,
) -> Flow:
    """Return the bytes that a member sends and receives.

    Args:
        members: number of members that train, this one included.
        group_size: from the manifest.
        reachable: number of members that can be dialled, this one included if it can. They and the bootstrap peer
            reduce.
        is_reachable: whether this member can be dialled.
        has_bootstrap: whether there is a bootstrap peer that is listed while it is needed; see `is_bootstrap_needed`.
            All members are assumed to count, as they do after a few cycles.
        share: this member's share of averaging, relative to the mean share of the members that average; see
            `Grid.share_of`.
    """
    if not is_reachable:
        return Flow(contributed=encoded.contribution, handed_out=0.0, gathered=0.0, followed=encoded.entry)
    is_needed = members < FEWEST_COUNTING or reachable < ENOUGH_REDUCERS
    num_bootstraps = int(has_bootstrap and is_needed)  # few reduce then, so there is a single row
    listed, reducing = members + num_bootstraps, reachable + num_bootstraps
    rows = num_rows(listed, reducing, group_size)
    width, averaged = listed / rows, min(share * rows / reducing, 1.0)
    others = 1.0 - 1.0 / rows
    return Flow(
        contributed=(1.0 - averaged) * encoded.contribution,
        handed_out=(others * (encoded.row_mean + encoded.entry) + (width - 1.0) * encoded.entry) * averaged,
        gathered=((width - 1.0 - num_bootstraps) * encoded.contribution + others * encoded.row_mean) * averaged,
        followed=(1.0 - averaged / rows) * encoded.entry,
    )


def share_carried(flow: Flow, round_seconds: float, *, upload: float | None, download: float | None) -> int:
    """Return the share of averaging that a line can carry, in the units of a roster, where 4 is an equal share.

    Contributions must arrive in the first half of a round; the entries that follow are sent in the second.

    Args:
        flow: bytes that the member moves in a round with an equal share.
        upload, download: bytes per second for vectors; None: more than is needed.
    """
    rates = (
        (upload, flow.handed_out / ((1.0 - CONTRIBUTE_SHARE) * round_seconds)),
        (download, flow.gathered / (CONTRIBUTE_SHARE * round_seconds)),
    )
    carried = min((rate / needed for rate, needed in rates if rate is not None and needed > 0.0), default=math.inf)
    return max(1, round(min(carried * EQUAL_SHARE, FULL_SHARE)))


def upload_needed(flow: Flow, round_seconds: float) -> float:
    """Return the upload rate, in bytes per second, at which a member can contribute all of its spans to a round.

    Its contribution must be sent by the middle of the round, and everything else by the end.
    """
    return max(flow.contributed / CONTRIBUTE_SHARE, flow.sent) / (USABLE_SHARE * round_seconds)


def download_needed(flow: Flow, round_seconds: float) -> float:
    """Return the download rate, in bytes per second, at which a member receives all vectors of a round in time."""
    return max(flow.gathered / CONTRIBUTE_SHARE, flow.received) / (USABLE_SHARE * round_seconds)


def entries_needed(flow: Flow, round_seconds: float) -> float:
    """Return the download rate, in bytes per second, below which a peer cannot keep up with the entries."""
    return flow.followed / (USABLE_SHARE * round_seconds)


def contribution_budget(bytes_per_second: float, round_seconds: float, *, handed_out: float) -> float:
    """Return how many bytes of contributions a capped line can carry in time in a round, after what reducing needs.

    Unused budget is not carried over to the next round: a cap that holds in every minute does not allow two rounds'
    worth in one.
    """
    carried = USABLE_SHARE * bytes_per_second * round_seconds
    return max(min(CONTRIBUTE_SHARE * carried, carried - handed_out), 0.0)


class UploadBudget:
    """Chooses the spans that fit under an upload cap, longest-waiting spans first. A state machine without I/O.

    Spans are independent logs, so a peer can send part of a contribution. Spans that it reduces itself cost nothing.
    What it must send as a reducer comes before its own contribution. It follows all entries in any case.
    """

    def __init__(self, *, rules: RunRules, me: PeerId) -> None:
        self.rules = rules
        self._me = me
        self._offered: dict[SpanId, int] = {}
        self._turns: Counter[SpanId] = Counter()

    def choose(
        self, collection: ReducerRound, conditions: Conditions, left_out: frozenset[SpanId] = frozenset()
    ) -> frozenset[SpanId] | None:
        """Return the spans to contribute to the round of `collection`, possibly none; None: all.

        Capped peers begin at different spans, so that no span lacks all of their contributions at once.
        """
        rules, grid = self.rules, collection.grid
        num_spans = rules.num_spans[collection.fragment]
        first = int.from_bytes(self._me[:4], "little") % num_spans
        spans = [SpanId(collection.fragment, (first + place) % num_spans) for place in range(num_spans)]
        spans = [span for span in spans if span not in left_out]
        if conditions.upload_bytes_per_second is None:
            return frozenset(spans) if len(spans) < num_spans else None
        spans.sort(key=lambda span: (self._offered.get(span, -1), self._turns[span]))
        budget = contribution_budget(
            conditions.upload_bytes_per_second, rules.clock.round_seconds, handed_out=self._handed_out(collection)
        )
        budget -= conditions.upload_backlog_bytes
        chosen = set()
        for span in spans:
            cost = 0 if grid.reducer(span, collection.row) == self._me else rules.payload_bytes[span]
            if cost <= max(budget, 0.0):
                budget -= cost
                chosen.add(span)
        self._offered.update(dict.fromkeys(chosen, collection.round))
        self._turns.update(chosen)
        return frozenset(chosen)

    def _handed_out(self, collection: ReducerRound) -> float:
        """Return how many bytes this peer sends in the round as a reducer and owner."""
        rules, grid = self.rules, collection.grid
        row = len(collection.members) - 1
        total = 0
        for span in collection.reduced:
            entry_bytes = rules.entry_bytes[span] + ENTRY_HEADER_BYTES
            if grid.owner(span) == self._me:
                total += (row + len(grid.column(span)) - 1) * entry_bytes
            else:
                total += row * entry_bytes + rules.row_mean_bytes[span]
        return total
