"""Measure which spans got entries: the share of all spans, and the longest gap of any one span."""

from __future__ import annotations

from simulator.simulation import Simulation


def share_of_spans(swarm: Simulation, first: int, until: int) -> float:
    """Return the share of spans due in rounds `first` to `until` that got entries which an honest peer absorbed."""
    clock = swarm.rules.clock
    due = sum(swarm.rules.num_spans[clock.fragment(index)] for index in range(first, until))
    got = {(entry.span, entry.round) for entry in swarm.inspector.entries.values()}
    return sum(first <= index < until for _, index in got) / due


def longest_gap(swarm: Simulation, first: int, until: int) -> int:
    """Return the largest number of consecutive cycles, in rounds `first` to `until`, that a span got no entry."""
    clock, worst = swarm.rules.clock, 0
    got = {(entry.span, clock.cycle(entry.round)) for entry in swarm.inspector.entries.values()}
    for span in swarm.spans:
        gap = 0
        for index in range(first, until):
            if clock.fragment(index) == span.fragment:
                gap = 0 if (span, clock.cycle(index)) in got else gap + 1
                worst = max(worst, gap)
    return worst
