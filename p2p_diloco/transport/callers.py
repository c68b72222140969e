"""Limits for streams that are not greeted yet: anyone with an address can open them. This module is pure.

Each such stream costs a file descriptor, and a process has few of them.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from p2p_diloco.ids import PeerId
from p2p_diloco.transport.rate_limit import Buckets

MOST_OF_ONE = 8
"""Maximum ungreeted streams of one peer. A dial opens two; an earlier dial of the same peer may still be here."""
MOST_OF_MEMBER = 16
MOST_IN_ALL = 128
"""Maximum ungreeted streams of all peers that are not members."""
BORNE_AT_ONCE, BORNE_PER_SECOND = 32.0, 1.0
"""Streams, and refused requests, of one peer that is not a member before its connection is closed. A dial opens two.

After this machine has slept, many streams of honest peers that dialled again and again arrive at once.
"""

Stream = TypeVar("Stream")


class Answer(NamedTuple, Generic[Stream]):
    """The answer to a stream.

    Attributes:
        is_greeted: whether to greet it; otherwise it is closed.
        dropped: an earlier stream that must be closed to make room for this one.
    """

    is_greeted: bool
    dropped: Stream | None = None


class Callers(Generic[Stream]):
    """The ungreeted streams by peer. A state machine; times are loop time.

    If strangers have too many, the oldest stream of the peer with the most is dropped, so that a newcomer that greets
    at once always gets in.
    """

    def __init__(self) -> None:
        self._waiting: dict[PeerId, deque[Stream]] = {}
        self._members: set[PeerId] = set()
        self._borne: Buckets[PeerId] = Buckets()

    def __len__(self) -> int:
        """Return the number of ungreeted streams."""
        return sum(map(len, self._waiting.values()))

    def called(self, peer: PeerId, stream: Stream, now: float, *, is_member: bool) -> Answer[Stream]:
        """Judge a new stream of `peer`; it counts until `ended` is called for it, if it is to be greeted."""
        (self._members.add if is_member else self._members.discard)(peer)
        if len(self._waiting.get(peer, ())) >= (MOST_OF_MEMBER if is_member else MOST_OF_ONE):
            return Answer(is_greeted=False)
        self._waiting.setdefault(peer, deque()).append(stream)
        strangers = {each: streams for each, streams in self._waiting.items() if each not in self._members}
        if is_member or sum(map(len, strangers.values())) <= MOST_IN_ALL:
            return Answer(is_greeted=True)
        busiest = max(strangers, key=lambda each: (len(strangers[each]), each != peer))
        dropped = strangers[busiest][0]
        self.ended(busiest, dropped)
        return Answer(is_greeted=True, dropped=dropped)

    def ended(self, peer: PeerId, stream: Stream) -> None:
        """Forget a stream that was greeted or closed."""
        waiting = self._waiting.get(peer)
        if waiting is not None and stream in waiting:
            waiting.remove(stream)
            if not waiting:
                del self._waiting[peer]
                self._members.discard(peer)

    def has_patience_with(self, peer: PeerId, now: float) -> bool:
        """Count a stream or a refused request of `peer`; return whether to bear it."""
        bucket = self._borne.get(peer, now, per_second=BORNE_PER_SECOND, burst=BORNE_AT_ONCE)
        return bucket is not None and bucket.admits(now)
