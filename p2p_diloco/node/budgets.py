"""Budgets for each peer: the lines that it may add to the log, and the messages that are handled for it.

Messages beyond the budget are dropped and counted in one line a minute. Nothing else happens, because sending too many
is not a lie. The rates are several times what honest peers were seen to send, even while they caught up
(docs/decisions/finding-peers.md).
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import Prepare, Promised, Proposal
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.messages import (
    BlockRequest,
    ContentReply,
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Holdings,
    HoldingsRequest,
    Introductions,
    ManifestRequest,
    Message,
    RosterReply,
    RosterRequest,
    RowMean,
    SignedContent,
    SignedContentRequest,
    SpanReply,
    SpanRequest,
    SpanVector,
    TextBlock,
)
from p2p_diloco.rate import counted
from p2p_diloco.transport.rate_limit import MOST_BUCKETS, Buckets, Rate, TokenBucket, spend_if_all

LINES_PER_MINUTE = 20
"""Maximum lines about one peer in the first minute: half as a burst, half at the rate of all later minutes."""
STRANGERS_LINES_PER_MINUTE = 3 * LINES_PER_MINUTE
"""The same limit for all non-members together, because identities cost nothing."""
SUMMARY_SECONDS = 60.0
MOST_SUMMARIES = 8


class Line(NamedTuple):
    """An event to report."""

    topic: str
    text: str


ROSTERS = Rate(4.0, 64.0)
"""Roster requests, each of which may be answered with a whole frame, and messages that hold many signatures."""
ACQUAINTANCE = Rate(0.2, 8.0)
"""Messages that are sent once on a new link, or every ten seconds."""
DECLARATIONS = 64.0
"""Declarations of a cycle that a peer may send: its own, again and again, and those that it forwards."""
FETCHING = Rate(1000.0, 2000.0)
"""Requests of peers that catch up; an honest peer has at most eight of a kind under way to one other peer."""
MOST_REQUESTERS = 96
"""Maximum number of peers that ask about each fragment through one relay at a time; there are fewer voters."""
LINES = Rate(LINES_PER_MINUTE / 120.0, LINES_PER_MINUTE / 2.0)
STRANGERS_LINES = Rate(STRANGERS_LINES_PER_MINUTE / 120.0, STRANGERS_LINES_PER_MINUTE / 2.0)
_RELAYED = (SignedContentRequest, SignedContent)
UNMETERED = frozenset({SpanVector, RowMean, SpanReply, Entry, TextBlock})
"""Messages that carry vectors: bounded elsewhere, by the round, by what was requested, and by the worker."""


def allowances(rules: RunRules) -> dict[type[Message], Rate]:
    """Return the allowance of each kind of message that has its own; all other kinds share one."""
    fragments = len(rules.num_spans)
    # A peer that looks for witnesses asks about all fragments, up to eight times in a round.
    comparing = Rate(4.0 + 32.0 * fragments / rules.clock.round_seconds, 64.0 + 32.0 * fragments)
    # A relay forwards the requests of all its links to a voter, and the answers of all voters to a requester.
    each = 1.0 / max(rules.silence_seconds, rules.clock.round_seconds)
    relaying = Rate(4.0 + MOST_REQUESTERS * fragments * each, 2.0 * MOST_REQUESTERS * fragments)
    return {
        **dict.fromkeys((RosterRequest, RosterReply, Prepare, Promised, Proposal), ROSTERS),
        Declaration: Rate(4.0 + DECLARATIONS / rules.cycle_seconds, 2.0 * DECLARATIONS),
        **dict.fromkeys((ManifestRequest, Introductions, HoldingsRequest, Holdings), ACQUAINTANCE),
        **dict.fromkeys((HeadsRequest, HeadsReply, ContentRequest, ContentReply), comparing),
        **dict.fromkeys(_RELAYED, relaying),
        **dict.fromkeys((EntryRequest, EntryAbsent, SpanRequest, BlockRequest), FETCHING),
    }


def everything_else(rules: RunRules) -> Rate:
    """Return the allowance that all other kinds share: heartbeats, openings, votes, declarations."""
    return Rate(100.0 + 16.0 / min(rules.heartbeat_seconds, rules.clock.round_seconds), 1000.0)


class PeerBudgets:
    """Admits lines and messages up to an allowance for each peer. A state machine; times are loop time."""

    def __init__(self, rules: RunRules) -> None:
        self._allowances = allowances(rules)
        self._rest = everything_else(rules)
        self._buckets: Buckets[tuple[PeerId | None, str]] = Buckets()
        self._shared: dict[str, TokenBucket] = {}
        self._lines: Counter[PeerId | None] = Counter()
        self._messages: Counter[PeerId | None] = Counter()
        self._summary_at: float | None = None

    def __len__(self) -> int:
        """Return the number of buckets, which is bounded."""
        return len(self._buckets)

    def admits(self, peer: PeerId, kind: type[Message], now: float) -> bool:
        """Return whether to read and handle a message of some kind from `peer`; count it if not."""
        if kind in UNMETERED:
            return True
        allowance = self._allowances.get(kind)
        name = kind.__name__ if allowance is not None else "rest"
        if self._bucket(peer, name, allowance or self._rest, now).admits(now):
            return True
        self.leave_out(peer, now)
        return False

    def admits_link(self, peer: PeerId, now: float) -> bool:
        """Return whether to send introductions to a peer that has just linked."""
        return self._bucket(peer, "link", ACQUAINTANCE, now).admits(now)

    def leave_out(self, peer: PeerId, now: float) -> None:
        self._count(self._messages, peer, now)

    def take(self, peer: PeerId, line: Line, now: float, *, is_member: bool) -> list[Line]:
        """Return the lines to report now: summaries that are due, then `line` about `peer` if the budget allows it."""
        reported = self.flush(now)
        buckets = [self._bucket(peer, "lines", LINES, now)]
        if not is_member:
            buckets.append(self._bucket(None, "lines", STRANGERS_LINES, now))
        if spend_if_all(buckets, now):
            return [*reported, line]
        self._count(self._lines, peer, now)
        return reported

    def flush(self, now: float) -> list[Line]:
        """Return what was left out, once a minute is over: a line for each of the worst peers, and one for the rest."""
        if self._summary_at is None or now < self._summary_at:
            return []
        total = self._lines + self._messages
        worst = [peer for peer, _ in total.most_common(MOST_SUMMARIES)]
        summaries = [_summary(_name(peer), self._lines[peer], self._messages[peer]) for peer in worst]
        rest = total.keys() - set(worst)
        if rest:
            lines, messages = (sum(count[peer] for peer in rest) for count in (self._lines, self._messages))
            summaries.append(_summary(counted(len(rest), "more peer"), lines, messages))
        self._lines.clear()
        self._messages.clear()
        self._summary_at = None
        return [Line(topic="flood", text=text) for text in summaries]

    def _bucket(self, peer: PeerId | None, kind: str, allowance: Rate, now: float) -> TokenBucket:
        bucket = self._buckets.get((peer, kind), now, allowance)
        # More peers than links: the rest share one bucket.
        return bucket if bucket is not None else self._shared.setdefault(kind, TokenBucket(**allowance._asdict()))

    def _count(self, left_out: Counter[PeerId | None], peer: PeerId, now: float) -> None:
        has_room = len(self._lines) + len(self._messages) < MOST_BUCKETS
        left_out[peer if has_room or peer in self._lines or peer in self._messages else None] += 1
        self._summary_at = self._summary_at if self._summary_at is not None else now + SUMMARY_SECONDS


def _name(peer: PeerId | None) -> str:
    return short_peer_id(peer) if peer is not None else "other peers"


def _summary(name: str, lines: int, messages: int) -> str:
    parts = [
        *([f"{lines} more lines about {name} were left out"] if lines else []),
        *([f"{messages} messages of {name} were dropped because it sends too many"] if messages else []),
    ]
    return f"in the last minute {' and '.join(parts)}"
