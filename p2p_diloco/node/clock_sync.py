"""Swarm time: a time line that the founder starts and the members' clocks continue together. It is not wall time.

Only members of the roster in force are asked, and only their clocks count; strangers in any number have no influence. A
peer that is not a member takes the members' time as it is. A member that was just started, woke up, or had its wall
clock set does not count its own clock either: it first listens, and answers that it is not settled. It uses its own
estimate only if no other peer has a better one. The estimate is the wall clock plus the saved offset, but never before
the latest round in which the peer certainly took part.

Once settled, each member's clock runs by itself and is one *voice*. Swarm time is the median of the voices. A voice
drifts slowly towards the median, so that clocks of different speeds stay together. A few wrong voices move no peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

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
"""Time in which a voice corrects most of its distance from the median. A drift of 100 ppm then leaves 0.1 s. A wrong
measurement moves all voices by its error within this time, so it must not be short."""


def steady_unix_seconds() -> Callable[[], float]:
    """Return a clock that starts at the current Unix time and does not follow later changes of the wall clock.

    It continues while the machine sleeps, if the system has such a clock.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    start = time.time() - time.clock_gettime(clock)
    return lambda: start + time.clock_gettime(clock)


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
        self._base = offset_seconds
        self._offset = 0.0
        self._fewest_seconds = self._begun_seconds = 0.0
        self._offsets: dict[PeerId, float] = {}
        self._round_trips: dict[PeerId, float] = {}
        self._unsettled: set[PeerId] = set()
        self._asked: dict[tuple[PeerId, int], float] = {}
        self._heard_at: dict[PeerId, float] = {}
        self._nonce = 0
        self._voices: frozenset[PeerId] = frozenset()
        self._is_voice = False
        self._is_settled = False
        self._takes_part = False
        self._hears_hub = False
        self._listening_since = raw()
        self._apart_since: float | None = None
        self._polled_at = raw()
        self._wall_ahead = self._wall() - raw()
        self._last: tuple[float, float] | None = None
        self._lock = threading.Lock()

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
            with self._lock:
                self._base += max(not_before - self.own(), 0.0)

    def own(self) -> float:
        """Return this peer's own clock, as sent to others."""
        return self.raw() + self._base

    def now(self) -> float:
        """Return swarm time in seconds; it never steps back once this peer takes part in the run."""
        with self._lock:
            raw = self.raw()
            now = raw + self._base + self._offset
            if self._last is not None and self._takes_part:
                last_raw, last = self._last
                now = max(now, last + SLOWEST * max(raw - last_raw, 0.0))
            self._last = (raw, now)
            return now

    @property
    def offset_seconds(self) -> float:
        """Seconds added to the local clock."""
        return self._base + self._offset

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
        if self._is_settled and self._is_voice:
            low, high = middle_two([0.0, *self._settled_offsets()])
            ahead = max(ahead, high - low)
        return ahead if ahead > self._tolerance() else 0.0

    def listen_to(
        self, voices: Collection[PeerId], *, is_voice: bool, takes_part: bool, hears_hub: bool = False
    ) -> None:
        """Let the clocks of these peers count from now on, and no others.

        Args:
            is_voice: whether our own clock counts too once it is settled, because this peer is a member.
            takes_part: whether it has become a member since it started. From then on its time never steps back.
            hears_hub: whether there is only one such peer, and it hears others that this peer does not.
        """
        self._voices, self._hears_hub = frozenset(voices), hears_hub
        self._takes_part = self._takes_part or takes_part
        if self._is_voice and not is_voice:
            self._rebase(self._offset)
        self._is_voice = is_voice
        # A peer that begins to count is asked again: until then its clock may not follow the swarm.
        for peer in self._heard_at.keys() - self._voices:
            self._drop(peer)
        self._is_settled = self._is_settled or not self._voices  # no other peer could know better
        self._correct()

    def counts(self, peer: PeerId) -> bool:
        """Return whether the clock of `peer` counts here."""
        return peer in self._voices

    def is_due(self, peer: PeerId, heartbeat_seconds: float) -> bool:
        """Return whether to ask `peer`: its last answer is missing, unreliable or old, or this clock was set back."""
        if peer in self._unsettled or abs(self._offsets.get(peer, 0.0) - self._offset) > self.tolerance_seconds:
            return True
        age = self.raw() - self._heard_at.get(peer, float("-inf"))
        return not 0.0 <= age < LASTING_BEATS * heartbeat_seconds

    def ask(self, peer: PeerId) -> int:
        """Return the nonce of a new request to `peer`; the round trip begins now."""
        self._nonce += 1
        self._asked = {key: at for key, at in self._asked.items() if key[0] != peer}
        self._asked[peer, self._nonce] = self.raw()
        return self._nonce

    def take_answer(self, peer: PeerId, nonce: int, clock_seconds: float, *, is_settled: bool = True) -> None:
        """Take the answer of a peer that counts.

        It is ignored if it took too long, if this clock was set back meanwhile, or if the time is impossible: NaN, or
        thousands of years away.
        """
        asked_at = self._asked.pop((peer, nonce), None)
        now = self.raw()
        if asked_at is None or not 0.0 <= now - asked_at <= LONGEST_ROUND_TRIP_SECONDS:
            return
        if peer not in self._voices or not 0.0 <= clock_seconds <= LATEST_SECONDS:
            return
        self._heard_at[peer] = now
        self._round_trips[peer] = now - asked_at
        self._offsets[peer] = clock_seconds - ((asked_at + now) / 2 + self._base)
        self._unsettled.discard(peer)
        if not is_settled:
            self._unsettled.add(peer)
        self._correct()

    def forget(self, peer: PeerId) -> None:
        """Drop the clock of a peer that is gone."""
        self._drop(peer)
        self._asked = {key: at for key, at in self._asked.items() if key[0] != peer}
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
        if self._is_settled and self._is_voice and self._apart_since is None:
            self._rebase(self._offset * min(max(passed / DRIFT_SECONDS, 0.0), 1.0))
        self._correct()

    # -- using the answers

    def _doubt(self) -> None:
        """Start listening again: the steady clock may have stopped while the machine slept."""
        self._rebase(self._offset)
        self._is_settled = False
        self._listening_since = self.raw()
        for peer in tuple(self._heard_at):
            self._drop(peer)

    def _drop(self, peer: PeerId) -> None:
        self._offsets.pop(peer, None)
        self._heard_at.pop(peer, None)
        self._round_trips.pop(peer, None)
        self._unsettled.discard(peer)

    def _settled_offsets(self) -> list[float]:
        return [offset for peer, offset in self._offsets.items() if peer not in self._unsettled]

    def _tolerance(self) -> float:
        return max(self.tolerance_seconds, min(self._round_trips.values(), default=0.0) / 2)

    def _listened_seconds(self) -> float:
        """Return for how long this peer has listened; start over if the steady clock was set back."""
        self._listening_since = min(self._listening_since, self.raw())
        return self.raw() - self._listening_since

    def _correct(self) -> None:
        if not self._is_voice:
            self._follow()
        elif not self._is_settled:
            self._settle()
        if self._is_voice and self._is_settled:
            self._take_median()

    def _follow(self) -> None:
        """Set our own clock by the voices, since it is not one of them."""
        heard = self._settled_offsets()
        if heard:
            self._rebase(self._nearest(middle_two(heard)))
        self._is_settled = self._is_settled or bool(heard) or self._listened_seconds() >= self._patience

    def _settle(self) -> None:
        """Take the time of settled peers, or agree on one with other peers that have just started."""
        num_members = len(self._voices) + 1
        settled, everybody = self._settled_offsets(), list(self._offsets.values())
        believable = [offset for offset in settled if self.own() + offset >= self._fewest_seconds]
        patience_left = self._patience - self._listened_seconds()
        if 2 * len(settled) > num_members:
            target = self._nearest(middle_two(settled))
        elif believable:
            if 2 * (len(believable) + 1) <= num_members and patience_left > 0.0:
                return
            target = self._nearest(middle_two(believable))
        elif len(everybody) == len(self._voices) or patience_left <= 0.0:
            target = middle_two([0.0, *everybody])[1]  # the later one: time is never before a past round
        elif 2 * (len(everybody) + 1) > num_members and patience_left <= self._patience / 2:
            target = middle_two([0.0, *everybody])[1]
        else:
            return
        self._rebase(target)
        self._is_settled = True

    def _take_median(self) -> None:
        """Follow the median of the voices.

        If the two middle voices are far apart, the nearer one counts, and after a while the later one. So a voice that
        is suddenly wrong moves no peer at once. Two voices that both stay where they are must meet. They meet at the
        later one, because moving forwards needs no waiting. But the peer of the later voice may hear only a peer that
        hears others too, and these may keep that peer where it is. Then the later voice waits as long again and goes
        back, but never before a past round.
        """
        low, high = middle_two([0.0, *self._settled_offsets()])
        if high - low <= self._tolerance():
            self._apart_since, target = None, (low + high) / 2
        else:
            since = self._apart_since if self._apart_since is not None else self.raw()
            self._apart_since = min(since, self.raw())
            if self.raw() - self._apart_since < self._patience:
                self._set_offset(self._nearest((low, high)))
                return
            target = high
            if self._hears_hub and high == 0.0 and self.own() + low >= self._fewest_seconds:
                if self.raw() - self._apart_since < 2 * self._patience:
                    self._set_offset(self._nearest((low, high)))
                    return
                target = low
            self._apart_since = None
        self._set_offset(target)
        if abs(target) > self._tolerance():
            self._rebase(target)  # our own clock was wrong

    def _nearest(self, middle: tuple[float, float]) -> float:
        """Return the mean of the two if they agree, else the one nearer to the time shown here."""
        low, high = middle
        if high - low <= self._tolerance():
            return (low + high) / 2
        shown = self.now() - self.own()
        return low if shown - low < high - shown else high

    def _set_offset(self, offset: float) -> None:
        with self._lock:
            self._offset = offset

    def _rebase(self, by_seconds: float) -> None:
        """Shift our own clock, as sent to others. Swarm time stays the same if it was already corrected by as much."""
        with self._lock:
            self._base += by_seconds
            self._offset = self._offset - by_seconds if self._is_voice and self._is_settled else 0.0
        self._offsets = {peer: offset - by_seconds for peer, offset in self._offsets.items()}
