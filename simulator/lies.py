"""Lies: altered messages of a sound node, and answers of a stranger that holds nothing.

The same lies are told on virtual time (`hostility.py`) and by processes over the real transport
(`tests/processes/lying_peer.py`, `tests/processes/hostile_peer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.membership.local import LocalPeer
from p2p_diloco.protocol.wire.ballot import Promise, Vote
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.heartbeat import SHORT_DIGEST_BYTES, FragmentHead, Heartbeat
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Message,
    Opening,
    Pong,
    RosterReply,
    SpanReply,
    SpanRequest,
    SpanVector,
)
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, vote_statement
from p2p_diloco.span_log import SpanHead

DAY_SECONDS = 86_400.0
GARBAGE = np.float32(300.0)
"""Each element of a false span: finite, and larger than any element of a run for tests."""

Change = Callable[[Message], Message | None]
"""Returns what a liar sends to everybody in place of a message; None: nothing."""


def false_digest(digest: bytes) -> Digest:
    """Return a digest that belongs to nothing, the same for the same true one."""
    return sha256(b"false", digest)


def false_head(head: SpanHead) -> SpanHead:
    """Return a tip that seems far ahead of a true one."""
    return replace(head, digest=false_digest(head.digest), height=head.height + 1000)


def false_piece(offset: int, num_bytes: int) -> bytes:
    """Return a piece of a false span."""
    return (GARBAGE.tobytes() * (num_bytes // 4 + 2))[offset % 4 :][:num_bytes]


# -- altered messages


def no_entries(message: Message) -> Message | None:
    """Withhold all entries."""
    return None if isinstance(message, Entry) else message


def no_votes(message: Message) -> Message | None:
    """Never promise and never vote."""
    return None if isinstance(message, Promise | Vote) else message


def noise(message: Message) -> Message:
    """Contribute numbers other than those announced."""
    if not isinstance(message, SpanVector):
        return message
    blocks = (sha256(message.payload, place.to_bytes(4)) for place in range(len(message.payload) // 32 + 1))
    return replace(message, payload=b"".join(blocks)[: len(message.payload)])


def false_bytes(message: Message) -> Message:
    """Serve finite numbers that are not the span's."""
    if isinstance(message, SpanReply):
        return replace(message, piece=false_piece(message.offset, len(message.piece)))
    return message


def false_contents(message: Message) -> Message:
    """Name other bytes for every tip."""
    if isinstance(message, ContentReply):
        return replace(message, digests=tuple((head, false_digest(content)) for head, content in message.digests))
    return message


def false_heads(message: Message, change: Callable[[SpanHead], SpanHead] = false_head) -> Message:
    """Name other tips, by default far ahead of all others'."""
    if isinstance(message, HeadsReply):
        return replace(message, heads=tuple(change(head) for head in message.heads))
    return message


def false_parents(message: Message) -> Message:
    """Open rounds with parents that no peer has."""
    if isinstance(message, Opening):
        return replace(
            message, spans=tuple(replace(offer, parent=false_digest(offer.parent)) for offer in message.spans)
        )
    return message


def a_day_ahead(message: Message) -> Message:
    """Answer pings a day ahead."""
    if isinstance(message, Pong):
        return replace(message, clock_seconds=message.clock_seconds + DAY_SECONDS)
    return message


def false_state(message: Message, me: LocalPeer, change: Callable[[SpanHead], SpanHead] = false_head) -> Message:
    """Claim other tips in heartbeats and replies, have no entry that leads there, and serve garbage for them."""
    match message:
        case Heartbeat() if message.peer == me.peer:
            return replace(message, heads=false_short_heads(message)).signed(me.sign)
        case Entry() if message.signature != me.sign(message.statement()):
            return EntryAbsent(span=message.span, parent=message.parent)
        case SpanReply():
            piece = false_piece(message.offset, len(message.piece))
            return replace(message, head=change(message.head), piece=piece)
        case _:
            return false_contents(false_heads(message, change))


def false_short_heads(beat: Heartbeat) -> tuple[FragmentHead, ...]:
    """Return other tips than those of a heartbeat."""
    return tuple(replace(head, digest=Digest(false_digest(head.digest)[:SHORT_DIGEST_BYTES])) for head in beat.heads)


# -- messages of a liar's own


def lone_vote(roster: Roster, ballot: int, me: PeerId, sign: Callable[[bytes], bytes]) -> RosterReply:
    """Return a roster that only the liar has voted for, as if it were certified."""
    vote = sign(vote_statement(roster.digest(), ballot))
    return RosterReply(rosters=(CertifiedRoster(roster=roster, ballot=ballot, votes=((me, vote),)),))


def degraded_child(parent: Roster, member: Member, cycle: int, **changes: Any) -> Roster:
    """Return a child of a roster that lists one member, as if all others had been away for long."""
    return replace(
        parent, parent=parent.digest(), k=parent.k + 1, degraded=True, cycle=cycle, members=(member,), **changes
    )


def invented_answer(
    message: Message, heads: Callable[[int], Sequence[SpanHead]], span_bytes: Callable[[SpanId], int]
) -> Sequence[Message]:
    """Answer a request with an invented state.

    Args:
        heads: returns the invented tips of a fragment.
        span_bytes: returns the size of a span's state.
    """
    match message:
        case HeadsRequest():
            return (HeadsReply(fragment=message.fragment, heads=tuple(heads(message.fragment))),)
        case EntryRequest():
            return (EntryAbsent(span=message.span, parent=message.parent),)
        case SpanRequest():
            total, head = span_bytes(message.span), heads(message.span.fragment)[message.span.index]
            piece = false_piece(message.offset, max(min(total - message.offset, message.most_bytes), 0))
            return (SpanReply(span=message.span, head=head, total_bytes=total, offset=message.offset, piece=piece),)
        case ContentRequest():
            digests = tuple((head.digest, false_digest(head.digest)) for head in heads(message.fragment))
            return (ContentReply(fragment=message.fragment, digests=digests),)
        case _:
            return ()
