"""The bandwidth that a run needs from a member: bytes per exchange, and the rates that carry them in time.

The formula is defined only here. In one row of g members, each member sends its contribution to the reducers of all
spans that it does not reduce itself, and sends the entries of the spans that it reduces to all others: (1 - 1/g) of a
contribution and the same share of an entry. In a grid of R rows, a reducer also sends its share of the row's means, and
an owner sends its entries to the reducers of the other rows. A bootstrap peer that is needed is a member of the row: it
reduces and follows, but contributes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2p_diloco.protocol.clock import CONTRIBUTE_SHARE
from p2p_diloco.protocol.membership.proposal import ENOUGH_REDUCERS
from p2p_diloco.protocol.wire.member import EQUAL_SHARE, FULL_SHARE
from p2p_diloco.protocol.wire.roster import FEWEST_COUNTING, num_rows
from p2p_diloco.rate import WIRE_SHARE

USABLE_SHARE = 0.85
"""Share of a capped line that vectors may use; headers, packets, control frames and short stalls take the rest."""


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
