"""How much each peer can make this one do: lines that it prints, messages that it handles.

Messages beyond the budget are counted, in one line a minute, and nothing else happens: too many are no lie. The rates
are several times what honest peers were seen to send, also while they catch up (docs/decisions/0029).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import Prepare, Promised, Proposal
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
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
)
from p2p_diloco.rate import counted
from p2p_diloco.transport.rate_limit import TokenBucket

LINES_PER_MINUTE = 20
"""About one peer in the first minute; half of it may come at once, and half of it comes in each further minute."""
STRANGERS_LINES_PER_MINUTE = 3 * LINES_PER_MINUTE
"""The same about all peers together that are no members: identities cost nothing."""
MOST_BUCKETS = 4096
SUMMARY_SECONDS = 60.0
MOST_SUMMARIES = 8


class Line(NamedTuple):
    """An event to report."""

    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class Allowance:
    """The budget of one kind: a rate per second, and a burst after a pause."""

    per_second: float
    burst: float


ROSTERS = Allowance(4.0, 64.0)
"""Questions for rosters, each of which may be answered with a whole frame, and what holds many signatures."""
ACQUAINTANCE = Allowance(0.2, 8.0)
"""Messages that come once on a new link."""
FETCHING = Allowance(1000.0, 2000.0)
"""Questions of those who catch up; no honest peer has more than eight of a kind under way to one other."""
MOST_ASKERS = 96
"""Peers that may ask about each fragment through one carrier at a time; more than there can be voters."""
LINES = Allowance(LINES_PER_MINUTE / 120.0, LINES_PER_MINUTE / 2.0)
STRANGERS_LINES = Allowance(STRANGERS_LINES_PER_MINUTE / 120.0, STRANGERS_LINES_PER_MINUTE / 2.0)
_CARRYING = (SignedContentRequest, SignedContent)
UNMETERED = frozenset({SpanVector, RowMean, SpanReply, Entry})
"""Vectors: what becomes of them is bounded elsewhere, by the round, by what was asked for, by the worker."""


def allowances(rules: RunRules) -> dict[type[Message], Allowance]:
    """Return what a peer may send of each kind that has an allowance of its own; all other kinds share one."""
    fragments = len(rules.num_spans)
    # Whoever looks for witnesses asks about all fragments, up to eight times in a round.
    comparing = Allowance(4.0 + 32.0 * fragments / rules.clock.round_seconds, 64.0 + 32.0 * fragments)
    # A carrier forwards the questions of all its links to a voter, and the answers of all voters to an asker.
    each = 1.0 / max(rules.silence_seconds, rules.clock.round_seconds)
    carrying = Allowance(4.0 + MOST_ASKERS * fragments * each, 2.0 * MOST_ASKERS * fragments)
    return {
        **dict.fromkeys((RosterRequest, RosterReply, Prepare, Promised, Proposal), ROSTERS),
        **dict.fromkeys((ManifestRequest, Introductions), ACQUAINTANCE),
        **dict.fromkeys((HeadsRequest, HeadsReply, ContentRequest, ContentReply), comparing),
        **dict.fromkeys(_CARRYING, carrying),
        **dict.fromkeys((EntryRequest, EntryAbsent, SpanRequest), FETCHING),
    }


def everything_else(rules: RunRules) -> Allowance:
    """Return what a peer may send of all other kinds together: signs of life, openings, votes, declarations."""
    return Allowance(100.0 + 16.0 / min(rules.heartbeat_seconds, rules.clock.round_seconds), 1000.0)


class PeerBudgets:
    """Lets lines and messages pass, up to an allowance for each peer. Times are the loop's; a state machine."""

    def __init__(self, rules: RunRules) -> None:
        self._allowances = allowances(rules)
        self._rest = everything_else(rules)
        self._buckets: dict[tuple[PeerId | None, str], TokenBucket] = {}
        self._lines: Counter[PeerId | None] = Counter()
        self._messages: Counter[PeerId | None] = Counter()
        self._summary_at: float | None = None

    def __len__(self) -> int:
        """Return how many buckets there are, which is bounded."""
        return len(self._buckets)

    def admits(self, peer: PeerId, message: Message, now: float) -> bool:
        """Return whether a message of `peer` is to be handled; one that is not is counted."""
        kind: type[Message] = type(message)
        if kind in UNMETERED:
            return True
        allowance = self._allowances.get(kind)
        name = kind.__name__ if allowance is not None else "rest"
        if self._bucket(peer, name, allowance or self._rest, now).admits(now):
            return True
        self.leave_out(peer, now)
        return False

    def admits_link(self, peer: PeerId, now: float) -> bool:
        """Return whether a peer that has just linked is to be greeted with all that new acquaintances are told."""
        return self._bucket(peer, "link", ACQUAINTANCE, now).admits(now)

    def leave_out(self, peer: PeerId, now: float) -> None:
        """Count a message that is not handled."""
        self._messages[self._countable(peer)] += 1
        self._summary_at = self._summary_at if self._summary_at is not None else now + SUMMARY_SECONDS

    def take(self, peer: PeerId, line: Line, now: float, *, is_member: bool) -> list[Line]:
        """Return what is to be said when `line` came up about `peer`: it, or nothing, and what was left out before."""
        said = self.flush(now)
        buckets = [self._bucket(peer, "lines", LINES, now)]
        if not is_member:
            buckets.append(self._bucket(None, "lines", STRANGERS_LINES, now))
        if all(bucket.has_one(now) for bucket in buckets):
            for bucket in buckets:
                bucket.spend(1.0, now)
            return [*said, line]
        self._lines[self._countable(peer)] += 1
        self._summary_at = self._summary_at if self._summary_at is not None else now + SUMMARY_SECONDS
        return said

    def flush(self, now: float) -> list[Line]:
        """Return what was left out in the last minute, once that is over: a line for each of those with most of it."""
        if self._summary_at is None or now < self._summary_at:
            return []
        total = self._lines + self._messages
        worst = [peer for peer, _ in total.most_common(MOST_SUMMARIES)]
        said = [_summary(_name(peer), self._lines[peer], self._messages[peer]) for peer in worst]
        rest = total.keys() - set(worst)
        if rest:
            lines, messages = (sum(count[peer] for peer in rest) for count in (self._lines, self._messages))
            said.append(_summary(counted(len(rest), "more peer"), lines, messages))
        self._lines.clear()
        self._messages.clear()
        self._summary_at = None
        return [Line(topic="flood", text=text) for text in said]

    def _bucket(self, peer: PeerId | None, kind: str, allowance: Allowance, now: float) -> TokenBucket:
        key = (peer, kind)
        if key not in self._buckets and len(self._buckets) >= MOST_BUCKETS:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if not bucket.is_full(now)}
            if len(self._buckets) >= MOST_BUCKETS:
                key = (None, kind)  # more peers than there are links: the rest share one
        if key not in self._buckets:
            self._buckets[key] = TokenBucket(per_second=allowance.per_second, burst=allowance.burst)
        return self._buckets[key]

    def _countable(self, peer: PeerId) -> PeerId | None:
        has_room = len(self._lines) + len(self._messages) < MOST_BUCKETS
        return peer if has_room or peer in self._lines or peer in self._messages else None


def _name(peer: PeerId | None) -> str:
    return short_peer_id(peer) if peer is not None else "other peers"


def _summary(name: str, lines: int, messages: int) -> str:
    parts = [
        *([f"{lines} more lines about {name} were left out"] if lines else []),
        *([f"{messages} messages of {name} were not handled, for it sends too many"] if messages else []),
    ]
    return f"in the last minute {' and '.join(parts)}"
