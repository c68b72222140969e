"""How much of what was due got entries: the share of all spans, and how long a single span went without."""

from __future__ import annotations

from p2p_diloco.testing.simulation import Simulation


def share_of_spans(swarm: Simulation, first: int, until: int) -> float:
    """Return how much of the spans of some rounds got entries that an honest peer absorbed."""
    clock = swarm.rules.clock
    due = sum(swarm.rules.num_spans[clock.fragment(index)] for index in range(first, until))
    got = {(entry.span, entry.round) for entry in swarm.inspector.entries.values()}
    return sum(first <= index < until for _, index in got) / due


def longest_gap(swarm: Simulation, first: int, until: int) -> int:
    """Return for how many cycles in a row the span that fared worst got no entry, in rounds `first` to `until`."""
    clock, worst = swarm.rules.clock, 0
    got = {(entry.span, clock.cycle(entry.round)) for entry in swarm.inspector.entries.values()}
    for span in swarm.spans:
        gap = 0
        for index in range(first, until):
            if clock.fragment(index) == span.fragment:
                gap = 0 if (span, clock.cycle(index)) in got else gap + 1
                worst = max(worst, gap)
    return worst
