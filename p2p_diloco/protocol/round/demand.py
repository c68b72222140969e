"""The demand of a run on a member's line: bytes of an exchange, and the rates that carry it.

The one place of the formula. In one row of g members each sends its contribution to the reducers of all spans but its
own, and its own spans' entries to all others: (1 - 1/g) of a contribution and as much of an entry. In a grid of R rows
a reducer also sends its share of a row's means, and an owner its entries to the reducers of the other rows. A bootstrap
that is needed is one of the row: it reduces and follows, and contributes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2p_diloco.protocol.clock import CONTRIBUTE_SHARE
from p2p_diloco.protocol.membership.proposal import ENOUGH_REDUCERS
from p2p_diloco.protocol.wire.grid import num_rows
from p2p_diloco.protocol.wire.member import EQUAL_SHARE, FULL_SHARE
from p2p_diloco.protocol.wire.roster import FEWEST_COUNTING

USABLE_SHARE = 0.85
"""Share of a capped line that vectors may use; headers, packets, control frames and short stalls take the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Bytes of a vector in each form in which it travels: of a parameter, a fragment, a model; all here is linear."""

    contribution: float
    row_mean: float
    entry: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes that one member moves when that vector is exchanged once; the mean over spans and rosters.

    Attributes:
        contributed: sent to the reducers of its row.
        handed_out: sent as a reducer and owner: means of its row, entries.
        gathered: received as such: contributions, means of other rows.
        followed: entries received.
    """

    contributed: float
    handed_out: float
    gathered: float
    followed: float

    @property
    def sent(self) -> float:
        """All that goes out."""
        return self.contributed + self.handed_out

    @property
    def received(self) -> float:
        """All that comes in."""
        return self.gathered + self.followed


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
    """Return what a member moves.

    Args:
        members: of the run that train, this one included.
        group_size: of the manifest.
        reachable: members that can be dialled, this one included if it can; they and the bootstrap reduce.
        is_reachable: whether this one can.
        has_bootstrap: whether there is one that is listed while it is needed; see `is_bootstrap_needed`. All members
            are taken to count, as they do after a few cycles.
        share: of averaging, over the mean of those who average; see `Grid.share_of`.
    """
    if not is_reachable:
        return Flow(contributed=encoded.contribution, handed_out=0.0, gathered=0.0, followed=encoded.entry)
    is_needed = members < FEWEST_COUNTING or reachable < ENOUGH_REDUCERS
    num_bootstraps = int(has_bootstrap and is_needed)  # with one there is a single row, for so few reduce
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
    """Return which share of averaging a line carries, as rosters say it: 4 is what all have where all have the same.

    Contributions must arrive in the first half of a round; the entries that follow go out in the second.

    Args:
        flow: what the member moves in a round with such a share.
        upload, download: bytes per second for vectors; None: more than is needed.
    """
    rates = (
        (upload, flow.handed_out / ((1.0 - CONTRIBUTE_SHARE) * round_seconds)),
        (download, flow.gathered / (CONTRIBUTE_SHARE * round_seconds)),
    )
    carried = min((rate / needed for rate, needed in rates if rate is not None and needed > 0.0), default=math.inf)
    return max(1, round(min(carried * EQUAL_SHARE, FULL_SHARE)))


def upload_needed(flow: Flow, round_seconds: float) -> float:
    """Return the rate in bytes per second with which a member takes part in a round with all of its spans.

    Its contribution must be through when half of the round is over, and all that it sends when the round is.
    """
    return max(flow.contributed / CONTRIBUTE_SHARE, flow.sent) / (USABLE_SHARE * round_seconds)


def download_needed(flow: Flow, round_seconds: float) -> float:
    """Return the rate in bytes per second with which a member reads in time all that others send it in a round."""
    return max(flow.gathered / CONTRIBUTE_SHARE, flow.received) / (USABLE_SHARE * round_seconds)


def entries_needed(flow: Flow, round_seconds: float) -> float:
    """Return the rate in bytes per second below which a peer falls ever further behind the entries."""
    return flow.followed / (USABLE_SHARE * round_seconds)


def contribution_budget(bytes_per_second: float, round_seconds: float, *, handed_out: float) -> float:
    """Return how many bytes of contributions a capped line carries in a round in time; what reducing needs comes first.

    Not saved up from round to round: a cap that is kept in every minute lets nobody send two rounds' worth in one.
    """
    carried = USABLE_SHARE * bytes_per_second * round_seconds
    return max(min(CONTRIBUTE_SHARE * carried, carried - handed_out), 0.0)
