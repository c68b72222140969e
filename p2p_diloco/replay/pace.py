"""The pace of a recorded run: steps between rounds, and steps by which entries were late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from p2p_diloco.ids import Digest
from p2p_diloco.replay.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of a run, in inner steps of the islands.

    Attributes:
        round_steps: median number of steps from one contribution to the next; 0.0 if no peer contributed twice.
        late: number of entries by the steps between the contribution to their round and their absorption.
    """

    round_steps: float
    late: dict[int, int]

    def late_at_most(self, share: float) -> int:
        """Return the number of steps by which at most `share` of the entries were late; 0 if there are none."""
        left = share * sum(self.late.values())
        for steps, entries in self.late.items():
            left -= entries
            if left <= 0:
                return steps
        return 0


def pace_of(recording: Recording) -> Pace:
    """Measure the pace over all starts of all peers; ignores entries of rounds without a contribution of the peer."""
    rounds = {digest: entry.round for digest, entry in recording.entries.items()}
    lives = [lines for starts in recording.lives.values() for lines in starts]
    between = [steps for lines in lives for steps in _steps_between(lines)]
    late = Counter(steps for lines in lives for steps in _steps_late(lines, rounds))
    return Pace(round_steps=median(between) if between else 0.0, late=dict(sorted(late.items())))


def _steps_between(lines: Sequence[dict[str, Any]]) -> Iterable[int]:
    at = [line["steps"] for line in lines if line["what"] == "contributed"]
    return (later - earlier for earlier, later in pairwise(at))


def _steps_late(lines: Sequence[dict[str, Any]], rounds: dict[Digest, int]) -> Iterable[int]:
    contributed: dict[int, int] = {}
    for line in lines:
        if line["what"] == "contributed":
            contributed[line["round"]] = line["steps"]
        elif line["what"] == "absorbed":
            began = contributed.get(rounds.get(Digest(bytes.fromhex(line["entry"])), -1))
            if began is not None:
                yield line["steps"] - began
