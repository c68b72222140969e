"""Donors: how much may be asked of them at a time, which have stopped answering, and which to avoid.

On a thin line, requests wait for each other. If there are too many, all seem unanswered and are repeated to other
donors, and the line carries everything twice. So there are as many as the line can answer in good time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from p2p_diloco.ids import PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.wire.messages import MOST_PIECE_BYTES

FIRST_PIECE_BYTES = 1 << 16
"""Size of a donor's first piece, and the smallest later one. It is small so that progress is visible on thin lines."""
QUICK_SECONDS, SLOW_SECONDS = 0.5, 2.0
"""Pieces that arrive sooner may double in size; those that arrive later are halved. Entries and heartbeats in the same
line wait for a whole piece. Both are in addition to twice the time of the quickest piece: the way there and back, and
once more for lost packets."""
LONGEST_WAY_SECONDS = 0.8
WAYS = 2.0
SLOWER = 3.0
"""Multiple of the quickest donor's time for a byte above which a donor gets no spans: each would stay with it for long,
while the quickest one has nothing to do."""
MISSED_SECONDS = 15.0
"""Time for which others are asked for entries first, after one that did not arrive in time."""
SHUN_SECONDS = 60.0
TIMES_USUAL = 8.0
"""Multiple of its usual answer time after which a donor that used to answer has probably stopped."""
WEIGHT_OF_LATEST = 0.25
MOST_REQUESTS = 64
LONGEST_PATIENCE = 4.0
"""Longest time to wait for an answer, as a multiple of the initial time. It applies where answers take long, and to a
donor that answers other requests meanwhile. After it, a request counts as lost."""
LONGEST_ANSWER_SECONDS = 20.0
"""That time is at least so long. A link loses no request, but packets sent again, and pieces of spans before it, can
delay an answer by ten seconds."""
SHORTEST_WINDOW = 2.0
"""Smallest window. With one request at a time, the line is idle while the next one is on its way."""
FIRST_WINDOW = 4.0
SHRINKS_TO = 0.7
SLOW = 2.0
PATIENCE = 2.0


class Donors:
    """The donors that spans are fetched from. A state machine without I/O.

    Args:
        quiet_seconds: how long a donor may be silent while others answer; longer if its answers usually take longer.
    """

    def __init__(self, *, quiet_seconds: float) -> None:
        self._quiet_seconds = quiet_seconds
        self._piece_bytes: dict[PeerId, int] = {}
        self._usual_seconds: dict[PeerId, float] = {}
        self._way_seconds: dict[PeerId, float] = {}
        self._received_at: dict[PeerId, float] = {}
        self._shunned: dict[PeerId, float] = {}
        self._missed: dict[PeerId, float] = {}
        self._looked_at = float("-inf")

    def piece_bytes(self, donor: PeerId) -> int:
        """Return the maximum size of a donor's next piece."""
        return self._piece_bytes.get(donor, FIRST_PIECE_BYTES)

    def answered(self, donor: PeerId, asked_bytes: int, came_bytes: int, took_seconds: float) -> None:
        """Adjust the piece size and the usual answer time of a donor after a piece has arrived.

        The size is not halved for a piece requested before the last halving, nor doubled for a short piece.
        """
        took_seconds = max(took_seconds, 0.0)  # the clock may have been set back meanwhile
        usual = self._usual_seconds.get(donor, took_seconds)
        self._usual_seconds[donor] = usual + WEIGHT_OF_LATEST * (took_seconds - usual)
        size = self.piece_bytes(donor)
        way = self._way_seconds[donor] = min(self._way_seconds.get(donor, LONGEST_WAY_SECONDS), took_seconds)
        waited_seconds = took_seconds - WAYS * way
        if waited_seconds > SLOW_SECONDS and asked_bytes <= size:
            self._piece_bytes[donor] = max(asked_bytes // 2, FIRST_PIECE_BYTES)
        elif waited_seconds < QUICK_SECONDS and came_bytes >= size:
            self._piece_bytes[donor] = min(2 * size, MOST_PIECE_BYTES)

    def received(self, donor: PeerId, now: float) -> None:
        """Note that a donor has sent an answer."""
        self._received_at[donor] = now

    def look(self, now: float) -> None:
        """Update the time; call often. After a pause of this peer, earlier silence of donors does not count."""
        if now - self._looked_at > self._quiet_seconds:
            self._received_at = dict.fromkeys(self._received_at, now)
        self._looked_at = now

    def is_quiet(self, donor: PeerId, asked_at: float, others: Collection[PeerId], now: float) -> bool:
        """Return whether a donor that used to answer has stopped since it was asked, while others answer.

        A donor that has never answered may have a thin line; it is not judged here.
        """
        if donor not in self._usual_seconds:
            return False
        since = max(asked_at, self._received_at.get(donor, asked_at))
        patience = max(self._quiet_seconds, TIMES_USUAL * self._usual_seconds[donor])
        return now - since > patience and any(self._received_at.get(other, since) > since for other in others)

    def sound(self, donors: Sequence[PeerId], now: float) -> Sequence[PeerId]:
        """Return the donors that are not avoided at present; all if there are no others."""
        return [donor for donor in donors if self._shunned.get(donor, 0.0) <= now] or donors

    def quick(self, donors: Sequence[PeerId]) -> Sequence[PeerId]:
        """Return the donors of spans that are not much slower than the quickest; one that is not known is not slow.

        Small pieces that arrive quickly say nothing about larger ones.
        """
        known = [donor for donor in donors if donor in self._usual_seconds]
        seconds = {donor: self._usual_seconds[donor] / self.piece_bytes(donor) for donor in known}
        most = SLOWER * min(seconds.values(), default=0.0)

        def is_slow(donor: PeerId) -> bool:
            waited_seconds = self._usual_seconds[donor] - WAYS * self._way_seconds[donor]
            return waited_seconds > QUICK_SECONDS and seconds[donor] > most

        return [donor for donor in donors if donor not in seconds or not is_slow(donor)] or donors

    def is_known(self, donor: PeerId) -> bool:
        """Return whether a donor has sent a piece over its present link."""
        return donor in self._usual_seconds

    def missed(self, donor: PeerId, now: float) -> None:
        """Note that an entry did not arrive in time."""
        self._missed[donor] = now + MISSED_SECONDS

    def prompt(self, donors: Sequence[PeerId], now: float) -> Sequence[PeerId]:
        """Return the donors whose last entries arrived in time; all if there are none."""
        return [donor for donor in donors if self._missed.get(donor, now) <= now] or donors

    def shun(self, donor: PeerId, what: str, now: float) -> list[Action]:
        """Prefer other donors for `SHUN_SECONDS`; reported once in that time."""
        is_known = self._shunned.get(donor, 0.0) > now
        self._shunned = {peer: until for peer, until in self._shunned.items() if until > now}
        self._shunned[donor] = now + SHUN_SECONDS
        text = f"{short_peer_id(donor)} {what}; asking others first for {SHUN_SECONDS:.0f} s"
        return [] if is_known else [Report(topic="donor", text=text)]

    def lose(self, donor: PeerId) -> None:
        """Forget what was learnt about a donor whose link is lost: its next link may have another line."""
        for learnt in (self._piece_bytes, self._usual_seconds, self._way_seconds, self._received_at, self._missed):
            learnt.pop(donor, None)


class Window:
    """The window of one kind of requests. A state machine without I/O.

    Args:
        seconds: initial time that an answer may take; longer once answers are known to take longer.
        target_seconds: time that an answer should take, because an answer delays everything after it in the line.
        leaves_out_way: whether that is in addition to twice the quickest answer: the way there and back, and once more
            for lost packets. A long line is not a thin one: small answers that all take half a second leave it empty.
    """

    def __init__(self, *, seconds: float, target_seconds: float, leaves_out_way: bool = False) -> None:
        self._seconds = seconds
        self.longest_seconds = max(LONGEST_PATIENCE * seconds, LONGEST_ANSWER_SECONDS)
        self._target_seconds = target_seconds
        self._size = FIRST_WINDOW
        self._usual_seconds = 0.0
        self._least_seconds = math.inf if leaves_out_way else 0.0

    @property
    def size(self) -> int:
        """Maximum number of requests under way."""
        return int(self._size)

    @property
    def seconds(self) -> float:
        """Time that an answer may take."""
        return min(max(self._seconds, PATIENCE * self._usual_seconds), self.longest_seconds)

    def answered(self, took_seconds: float) -> None:
        """Adjust to an answer: a quick one allows more requests, a slow one fewer.

        One that took longer than the longest time was lost on the way; it counts as that time.
        """
        took_seconds = min(max(took_seconds, 0.0), self.longest_seconds)
        self._usual_seconds += WEIGHT_OF_LATEST * (took_seconds - self._usual_seconds)
        self._least_seconds = min(self._least_seconds, took_seconds)
        waited_seconds = took_seconds - WAYS * self._least_seconds
        if waited_seconds < self._target_seconds:
            self._size = min(self._size + 1.0, float(MOST_REQUESTS))
        elif waited_seconds > SLOW * self._target_seconds:
            self._size = max(SHRINKS_TO * self._size, SHORTEST_WINDOW)

    def unanswered(self) -> None:
        """Adjust to a request that was not answered."""
        self._size = max(self._size / 2.0, SHORTEST_WINDOW)


def hash_rank(span: SpanId, donor: PeerId) -> int:
    """Return a number that spreads spans over equally loaded donors, the same on every machine.

    It is a product: with a sum, all spans would rank the donors alike and go to the same one.
    """
    return (donor[0] * 257 + donor[1] + 1) * (span.index * 31 + span.fragment * 7 + 1) % 65521


def least_loaded(span: SpanId, free: Sequence[PeerId], load: Mapping[PeerId, int]) -> PeerId:
    """Return the donor to ask for a span: the one with the fewest requests."""
    return min(free, key=lambda donor: (load[donor], hash_rank(span, donor)))
