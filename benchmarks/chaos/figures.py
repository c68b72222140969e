"""The figures of a play: what the final history of the run includes, against what its islands could have trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from p2p_diloco.protocol.clock import RoundClock

Interval = tuple[float, float]
_LONG_CYCLES = 10
"""Cycles within which every restarted island should be included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inclusion:
    """One entry of the final history.

    Attributes:
        share: share of the parameters that its span has.
        tokens: tokens that the contributions in its mean carry, by island. A newcomer whose contribution has no
            weight yet is not listed.
        present: islands whose contribution it includes, with weight or without.
    """

    round: int
    share: float
    tokens: Mapping[str, float]
    present: frozenset[str]


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of an island.

    Attributes:
        island: name of the island; one that came in its place has the same name.
        restarts: whether it follows an earlier process.
        started, ended: Unix seconds; `ended` is None for a process that runs to the end.
        stops: times during which it was stopped.
    """

    island: str
    started: float
    restarts: bool = False
    ended: float | None = None
    stops: list[Interval] = field(default_factory=list)

    def living(self, window: Interval) -> list[Interval]:
        """Return when it ran within a window, without the times during which it was stopped."""
        begin, end = max(self.started, window[0]), min(window[1] if self.ended is None else self.ended, window[1])
        found = []
        for stop_begin, stop_end in [*sorted(self.stops), (end, end)]:
            if begin < min(stop_begin, end):
                found.append((begin, min(stop_begin, end)))
            begin = max(begin, stop_end)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The remains of a play.

    Attributes:
        clock: the rounds of the run, in Unix seconds.
        window: the measured time.
        inclusions: the final history.
        lives: all processes of islands.
        kills: when a process was killed.
        digests: state digest of each island that trained to the last round.
        unfinished: islands that did not.
        surprises: processes that ended although nobody had ended them, in words.
        left_behind: processes, sockets and shared memory that were left after all peers had ended.
        memory: memory of the island that was never killed, (Unix seconds, bytes); empty if there is none.
        machine_share: share of the machine's processors that all peers used together in the measured time; processes
            that ended or were started in it are left out.
    """

    clock: RoundClock
    window: Interval
    inclusions: Sequence[Inclusion]
    lives: Sequence[Life]
    kills: Sequence[float]
    digests: Mapping[str, str]
    unfinished: Sequence[str]
    surprises: Sequence[str]
    left_behind: Sequence[str]
    memory: Sequence[tuple[float, float]]
    machine_share: float

    def within(self) -> list[Inclusion]:
        """Return the entries whose whole round is in the measured time."""
        begin, end = self.window
        return [
            one
            for one in self.inclusions
            if self.clock.begin(one.round) >= begin and self.clock.begin(one.round + 1) <= end
        ]

    def living_seconds(self) -> float:
        """Return the seconds that all islands together ran and were not stopped."""
        return sum(end - begin for life in self.lives for begin, end in life.living(self.window))

    def tokens(self) -> float:
        """Return the tokens that the history includes. An entry counts by the share of parameters that it changes."""
        return sum(one.share * tokens for one in self.within() for tokens in one.tokens.values())

    def participation(self) -> float:
        """Return the share of included contributions among those of islands that ran during the whole round."""
        included = possible = 0.0
        rounds: dict[int, list[Inclusion]] = {}
        for one in self.within():
            rounds.setdefault(one.round, []).append(one)
        per_round = max((sum(one.share for one in all_spans) for all_spans in rounds.values()), default=0.0)
        for number in range(*self._rounds()):
            running = self._running((self.clock.begin(number), self.clock.begin(number + 1)))
            possible += per_round * len(running)
            included += sum(one.share * len(running & one.present) for one in rounds.get(number, []))
        return included / possible if possible else 0.0

    def gaps(self) -> list[tuple[float, int]]:
        """Return the times between two rounds with entries, and the fewest islands that ran during each, longest first.

        A run without trouble has gaps of one round.
        """
        ends = sorted({self.clock.begin(one.round + 1) for one in self.inclusions})
        begin, end = self.window
        inside = [each for each in ends if begin <= each <= end]
        found = [(later - earlier, self._fewest(earlier, later)) for earlier, later in pairwise([begin, *inside, end])]
        return sorted(found, reverse=True)

    def rejoin_seconds(self) -> list[float]:
        """Return the times from each restart to the end of the first round in which the island has weight again.

        A process that ended before does not count, unless it had ten cycles: then the time is infinite.
        """
        found = []
        for life in self.lives:
            if not life.restarts or not self.window[0] <= life.started <= self.window[1]:
                continue
            begins = [self.clock.begin(one.round) for one in self.inclusions if life.island in one.tokens]
            included = min((begin for begin in begins if begin >= life.started), default=float("inf"))
            seconds = included + self.clock.round_seconds - life.started
            last = min(life.ended or float("inf"), self.clock.begin(self._last_round() + 1))
            if life.started + seconds <= last or last - life.started > _LONG_CYCLES * self._cycle_seconds():
                found.append(seconds)
        return found

    def next_entry_seconds(self) -> list[float]:
        """Return the time from each kill to the end of the first round that began after it and has an entry."""
        begins = sorted({self.clock.begin(one.round) for one in self.inclusions})
        found = []
        for kill in self.kills:
            later = [begin for begin in begins if begin >= kill]
            found.append(min(later, default=float("inf")) + self.clock.round_seconds - kill)
        return found

    def memory_slope(self) -> float | None:
        """Return by how many bytes per second the memory grew after the first third; None without samples."""
        begin, end = self.window
        samples = [(at, size) for at, size in self.memory if at >= begin + (end - begin) / 3.0]
        if len(samples) < 3:
            return None
        middle = sum(at for at, _ in samples) / len(samples)
        mean = sum(size for _, size in samples) / len(samples)
        return sum((at - middle) * (size - mean) for at, size in samples) / sum((at - middle) ** 2 for at, _ in samples)

    def _rounds(self) -> tuple[int, int]:
        """Return the first round that is whole within the window, and the first after it that is not."""
        first = self.clock.round_at(self.window[0])
        return first + (self.clock.begin(first) < self.window[0]), self.clock.round_at(self.window[1])

    def _cycle_seconds(self) -> float:
        return self.clock.num_fragments * self.clock.round_seconds

    def _last_round(self) -> int:
        return max((one.round for one in self.inclusions), default=0)

    def _running(self, interval: Interval) -> frozenset[str]:
        """Return the islands that ran during the whole interval."""
        return frozenset(life.island for life in self.lives if interval in life.living(interval))

    def _fewest(self, begin: float, end: float) -> int:
        moments = {begin, end, *(at for life in self.lives for part in life.living((begin, end)) for at in part)}
        inside = [(earlier + later) / 2 for earlier, later in pairwise(sorted(moments))]
        return min((_num_living(self.lives, at) for at in inside), default=0)


def _num_living(lives: Iterable[Life], at: float) -> int:
    return sum(bool(life.living((at, at + 1e-3))) for life in lives)


def _finite(seconds: float) -> float | None:
    """Return the seconds for JSON, which has no infinity: None for something that never came."""
    return seconds if seconds < float("inf") else None


def figures_of(played: Played, quiet: Played, *, faults: int, islands: int) -> dict[str, Any]:
    """Return the figures of a play with faults, compared with one without faults.

    `throughput_kept` compares the tokens per second of islands that ran; `throughput_kept_total` those of all time.
    """
    rate, quiet_rate = (each.tokens() / max(each.living_seconds(), 1e-9) for each in (played, quiet))
    total, quiet_total = (each.tokens() / (each.window[1] - each.window[0]) for each in (played, quiet))
    share, quiet_share = (each.living_seconds() / (each.window[1] - each.window[0]) for each in (played, quiet))
    rejoins, next_entries = played.rejoin_seconds(), played.next_entry_seconds()
    gaps, slope = played.gaps(), played.memory_slope()
    allowed = 2.0 * played.clock.round_seconds + 1e-6
    with_majority = [length for length, fewest in gaps if 2 * fewest > islands]
    return {
        "heads_equal": len(set(played.digests.values())) == 1 and not played.unfinished,
        "throughput_kept": rate / quiet_rate if quiet_rate else 0.0,
        "throughput_kept_total": total / quiet_total if quiet_total else 0.0,
        "participation": played.participation(),
        "quiet_participation": quiet.participation(),
        "longest_gap_seconds": gaps[0][0] if gaps else 0.0,
        "longest_gap_with_majority_seconds": max(with_majority, default=0.0),
        "gaps_beyond_two_rounds": [[length, fewest] for length, fewest in gaps if length > allowed],
        "rejoin_seconds_median": _finite(median(rejoins)) if rejoins else None,
        "rejoin_seconds": [_finite(seconds) for seconds in sorted(rejoins)],
        "next_entry_seconds_max": _finite(max(next_entries)) if next_entries else None,
        "faults": faults,
        "living_share": share / max(quiet_share, 1e-9),
        "islands_at_the_end": len(played.digests),
        "unfinished": list(played.unfinished),
        "surprises": list(played.surprises),
        "left_behind": [*quiet.left_behind, *played.left_behind],
        "rss_slope_mib_per_hour": None if slope is None else slope * 3600.0 / 2**20,
        "quiet_heads_equal": len(set(quiet.digests.values())) == 1 and not quiet.unfinished,
        "quiet_tokens": quiet.tokens(),
        "tokens": played.tokens(),
        "machine_share": quiet.machine_share,
    }
