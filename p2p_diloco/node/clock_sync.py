"""Swarm time: a time line that the founder starts and the members' clocks continue together. It is not wall time.

Only members of the roster in force are asked, and only their clocks count; strangers in any number have no influence. A
peer that is not a member takes the members' time as it is. A member that was just started, woke up, or had its wall
clock set does not count its own clock either: it first listens, and answers that it is not settled. It uses its own
estimate only if no other peer has a better one. The estimate is the wall clock plus the saved offset, but never before
the latest round in which the peer certainly took part.

Once settled, each member's clock runs by itself and is one *source*. Swarm time is the median of the sources. A source
drifts slowly towards the median, so that clocks of different speeds stay together. A few wrong sources move no peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.clock import RoundClock, middle_two

LONGEST_ROUND_TRIP_SECONDS = 5.0
LASTING_BEATS = 8
"""Heartbeats for which a measured offset is used. Clocks drift slowly; asking all at each would dominate traffic."""
LATEST_SECONDS = 1e11
"""Latest time accepted from a clock, about three thousand years from now; times before 1970 are not accepted either."""
SLOWEST = 0.5
"""Speed of swarm time while it is ahead, until it is right again: it never steps back while a peer takes part."""
WALL_STEP_SECONDS = 1.0
"""If the wall clock moves by more than this relative to the steady one, it was set or the machine slept."""
DRIFT_SECONDS = 900.0
"""Time in which a source corrects most of its distance from the median. A drift of 100 ppm then leaves 0.1 s. A wrong
measurement moves all sources by its error within this time, so it must not be short."""


def steady_unix_seconds() -> Callable[[], float]:
    """Return a clock that starts at the current Unix time and does not follow later changes of the wall clock.

    It continues while the machine sleeps, if the system has such a clock.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    start = time.time() - time.clock_gettime(clock)
    return lambda: start + time.clock_gettime(clock)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The latest answer of a peer.

    Attributes:
        offset: its clock minus this peer's own, in seconds.
        is_settled: whether it has the swarm's time, and not only an estimate.
    """

    offset: float
    round_trip_seconds: float
    received_at: float
    is_settled: bool


class _TimeLine:
    """Swarm time: the raw clock, plus a base up to this peer's own clock, plus an offset up to the swarm's.

    The clocks of others move it; `now` may be called from any thread.
    """

    def __init__(self, raw: Callable[[], float], base: float) -> None:
        self.base = base
        self.offset = 0.0
        self._raw = raw
        self._last: tuple[float, float] | None = None
        self._lock = threading.Lock()

    def own(self) -> float:
        return self._raw() + self.base

    def now(self, *, never_steps_back: bool) -> float:
        with self._lock:
            raw = self._raw()
            now = raw + self.base + self.offset
            if self._last is not None and never_steps_back:
                last_raw, last = self._last
                now = max(now, last + SLOWEST * max(raw - last_raw, 0.0))
            self._last = (raw, now)
            return now

    def shift_base(self, by_seconds: float, *, keeps_time: bool) -> None:
        """Shift this peer's own clock; `keeps_time` if swarm time was already corrected by as much."""
        with self._lock:
            self.base += by_seconds
            self.offset = self.offset - by_seconds if keeps_time else 0.0

    def begin_at(self, not_before: float) -> None:
        """Shift this peer's own clock forwards to `not_before` if it is behind."""
        with self._lock:
            self.base += max(not_before - self.own(), 0.0)

    def set_offset(self, offset: float) -> None:
        """Correct swarm time, and leave this peer's own clock as it is."""
        with self._lock:
            self.offset = offset


class SwarmClock:
    """Asks members for their clocks and follows the median; `now` may be called from any thread.

    Args:
        raw: this machine's steady clock, in Unix seconds as of its creation.
        wall: its wall clock, which may be set while the peer runs. A jump shows that it was set or the machine slept.
        offset_seconds: swarm time minus wall time, saved by an earlier start.
    """

    def __init__(
        self, raw: Callable[[], float], *, wall: Callable[[], float] | None = None, offset_seconds: float = 0.0
    ) -> None:
        self.raw = raw
        self.tolerance_seconds = 0.5
        self._wall = wall if wall is not None else raw
        self._patience = 60.0
        self._time = _TimeLine(raw, offset_seconds)
        self._fewest_seconds = self._begun_seconds = 0.0
        self._answers: dict[PeerId, _Answer] = {}
        self._requests: dict[PeerId, tuple[int, float]] = {}  # nonce and time of the latest one to each peer
        self._nonce = 0
        self._sources: frozenset[PeerId] = frozenset()
        self._is_source = False
        self._is_settled = False
        self._takes_part = False
        self._depends_on_hub = False
        self._listening_since = raw()
        self._apart_since: float | None = None
        self._polled_at = raw()
        self._wall_ahead = self._wall() - raw()

    def begin(self, rounds: RoundClock, *, latest_round: int, patience_seconds: float) -> None:
        """Start listening.

        Args:
            latest_round: in which this peer certainly took part; negative for none. Its own estimate is not before it.
            patience_seconds: how long to wait for other peers that know the time.
        """
        self.tolerance_seconds = rounds.tolerance_seconds
        self._patience = patience_seconds
        self._listening_since = self.raw()
        if latest_round >= 0:
            not_before = rounds.begin(latest_round)
            # Entries are accepted up to one round early, so peers that are one round behind this one may be right.
            self._fewest_seconds = self._begun_seconds = not_before - rounds.round_seconds
            self._time.begin_at(not_before)

    def own(self) -> float:
        """Return this peer's own clock, as sent to others."""
        return self._time.own()

    def now(self) -> float:
        """Return swarm time in seconds; it never steps back once this peer takes part in the run."""
        return self._time.now(never_steps_back=self._takes_part)

    @property
    def offset_seconds(self) -> float:
        """Seconds added to the local clock."""
        return self._time.base + self._time.offset

    @property
    def wall_offset_seconds(self) -> float:
        """Swarm time minus wall time, to be saved for the next start."""
        return self.raw() + self.offset_seconds - self._wall()

    @property
    def is_settled(self) -> bool:
        """Whether this peer has the swarm's time and not only an estimate."""
        return self._is_settled

    @property
    def disagreement_seconds(self) -> float:
        """Difference between this peer's time and the members'; 0 within the tolerance."""
        ahead = self.now() - (self.raw() + self.offset_seconds)
        if self._is_settled and self._is_source:
            low, high = middle_two([0.0, *self._settled_offsets()])
            ahead = max(ahead, high - low)
        return ahead if ahead > self._tolerance() else 0.0

    def follow(
        self, sources: Collection[PeerId], *, is_source: bool, takes_part: bool, depends_on_hub: bool = False
    ) -> None:
        """Let the clocks of these peers count from now on, and no others.

        Args:
            is_source: whether our own clock counts too once it is settled, because this peer is a member.
            takes_part: whether it has become a member since it started. From then on its time never steps back.
            depends_on_hub: whether there is only one such peer, and it has links to others that this one has not.
        """
        self._sources, self._depends_on_hub = frozenset(sources), depends_on_hub
        self._takes_part = self._takes_part or takes_part
        if self._is_source and not is_source:
            self._rebase(self._time.offset)
        self._is_source = is_source
        # A peer that begins to count is asked again: until then its clock may not follow the swarm.
        self._answers = {peer: answer for peer, answer in self._answers.items() if peer in self._sources}
        self._is_settled = self._is_settled or not self._sources  # no other peer could know better
        self._correct()

    def counts(self, peer: PeerId) -> bool:
        return peer in self._sources

    def is_due(self, peer: PeerId, heartbeat_seconds: float) -> bool:
        """Return whether to ask `peer`: its last answer is missing, unreliable or old, or this clock was set back."""
        answer = self._answers.get(peer)
        if answer is None or not answer.is_settled or abs(answer.offset - self._time.offset) > self.tolerance_seconds:
            return True
        return not 0.0 <= self.raw() - answer.received_at < LASTING_BEATS * heartbeat_seconds

    def new_request(self, peer: PeerId) -> int:
        """Return the nonce of a new request to `peer`; the round trip begins now."""
        self._nonce += 1
        self._requests[peer] = (self._nonce, self.raw())
        return self._nonce

    def take_answer(self, peer: PeerId, nonce: int, clock_seconds: float, *, is_settled: bool = True) -> None:
        """Take the answer of a peer that counts.

        It is ignored if it took too long, if this clock was set back meanwhile, or if the time is impossible: NaN, or
        thousands of years away.
        """
        requested, requested_at = self._requests.get(peer, (None, 0.0))
        if requested != nonce:
            return
        del self._requests[peer]
        now = self.raw()
        round_trip = now - requested_at
        is_possible = 0.0 <= round_trip <= LONGEST_ROUND_TRIP_SECONDS and 0.0 <= clock_seconds <= LATEST_SECONDS
        if not is_possible or peer not in self._sources:
            return
        offset = clock_seconds - ((requested_at + now) / 2 + self._time.base)
        self._answers[peer] = _Answer(offset, round_trip, now, is_settled)
        self._correct()

    def forget(self, peer: PeerId) -> None:
        self._answers.pop(peer, None)
        self._requests.pop(peer, None)
        self._correct()

    def poll(self, not_before: float | None = None) -> None:
        """Do the periodic work, once per heartbeat.

        Args:
            not_before: lower bound of swarm time: an entry of a later round was absorbed.
        """
        if not_before is not None:
            self._fewest_seconds = max(self._begun_seconds, not_before)
        raw, wall_ahead = self.raw(), self._wall() - self.raw()
        if abs(wall_ahead - self._wall_ahead) > WALL_STEP_SECONDS:
            self._doubt()
        self._wall_ahead = wall_ahead
        passed, self._polled_at = raw - self._polled_at, raw
        if self._is_settled and self._is_source and self._apart_since is None:
            self._rebase(self._time.offset * min(max(passed / DRIFT_SECONDS, 0.0), 1.0))
        self._correct()

    # -- using the answers

    def _doubt(self) -> None:
        """Start listening again: the steady clock may have stopped while the machine slept."""
        self._rebase(self._time.offset)
        self._is_settled = False
        self._listening_since = self.raw()
        self._answers.clear()

    def _settled_offsets(self) -> list[float]:
        return [answer.offset for answer in self._answers.values() if answer.is_settled]

    def _tolerance(self) -> float:
        fastest = min((answer.round_trip_seconds for answer in self._answers.values()), default=0.0)
        return max(self.tolerance_seconds, fastest / 2)

    def _listened_seconds(self) -> float:
        """Return for how long this peer has listened; start over if the steady clock was set back."""
        self._listening_since = min(self._listening_since, self.raw())
        return self.raw() - self._listening_since

    def _correct(self) -> None:
        if not self._is_source:
            self._follow()
        elif not self._is_settled:
            self._settle()
        if self._is_source and self._is_settled:
            self._take_median()

    def _follow(self) -> None:
        """Set our own clock by the sources, since it is not one of them."""
        offsets = self._settled_offsets()
        if offsets:
            self._rebase(self._nearest(middle_two(offsets)))
        self._is_settled = self._is_settled or bool(offsets) or self._listened_seconds() >= self._patience

    def _settle(self) -> None:
        """Take the time of settled peers, or agree on one with other peers that have just started."""
        num_members = len(self._sources) + 1
        settled, everybody = self._settled_offsets(), [answer.offset for answer in self._answers.values()]
        believable = [offset for offset in settled if self.own() + offset >= self._fewest_seconds]
        patience_left = self._patience - self._listened_seconds()
        if 2 * len(settled) > num_members:
            target = self._nearest(middle_two(settled))
        elif believable:
            if 2 * (len(believable) + 1) <= num_members and patience_left > 0.0:
                return
            target = self._nearest(middle_two(believable))
        elif (
            len(everybody) == len(self._sources)
            or patience_left <= 0.0
            or (2 * (len(everybody) + 1) > num_members and patience_left <= self._patience / 2)
        ):
            target = middle_two([0.0, *everybody])[1]  # the later one: time is never before a past round
        else:
            return
        self._rebase(target)
        self._is_settled = True

    def _take_median(self) -> None:
        """Follow the median of the sources.

        If the two middle sources are far apart, the nearer one counts, and after a while the later one. So a source
        that is suddenly wrong moves no peer at once. Two sources that both stay where they are must meet. They meet at
        the later one, because moving forwards needs no waiting. But the peer of the later source may be linked only to
        a peer that is linked to others too, and these may keep that peer where it is. Then the later source waits as
        long again and goes back, but never before a past round.
        """
        low, high = middle_two([0.0, *self._settled_offsets()])
        if high - low <= self._tolerance():
            self._apart_since, target = None, (low + high) / 2
        else:
            since = self._apart_since if self._apart_since is not None else self.raw()
            self._apart_since = min(since, self.raw())
            if self.raw() - self._apart_since < self._patience:
                self._time.set_offset(self._nearest((low, high)))
                return
            target = high
            if self._depends_on_hub and high == 0.0 and self.own() + low >= self._fewest_seconds:
                if self.raw() - self._apart_since < 2 * self._patience:
                    self._time.set_offset(self._nearest((low, high)))
                    return
                target = low
            self._apart_since = None
        self._time.set_offset(target)
        if abs(target) > self._tolerance():
            self._rebase(target)  # our own clock was wrong

    def _nearest(self, middle: tuple[float, float]) -> float:
        """Return the mean of the two if they agree, else the one nearer to the time shown here."""
        low, high = middle
        if high - low <= self._tolerance():
            return (low + high) / 2
        shown = self.now() - self.own()
        return low if shown - low < high - shown else high

    def _rebase(self, by_seconds: float) -> None:
        """Shift our own clock, as sent to others, and with it the offsets measured from it."""
        self._time.shift_base(by_seconds, keeps_time=self._is_source and self._is_settled)
        for peer, answer in self._answers.items():
            self._answers[peer] = replace(answer, offset=answer.offset - by_seconds)
