"""A scenario, drawn from a seed: the peers, the shape of the run, and the troubles with their times."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass

from p2p_diloco.ids import SpanId
from simulator.network import OPEN, OUTBOUND_ONLY
from simulator.run import ROUND_SECONDS
from simulator.troubles import KINDS, Draw, Trouble

BOOTSTRAP = "boot"
FEWEST_BAD_ROUNDS = 10
FAVOURS_SMALL = 1.5
"""Exponent that favours small swarms; 1 would make the logarithm of the number of peers uniform. The cost of a swarm
grows with the square of that number, but the troubles it meets do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """One peer: its properties and its start time; `drift` is in seconds per second."""

    name: str
    place: str
    starts_at: float
    step_seconds: float
    wall_offset: float
    drift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that is drawn before a simulation begins.

    Attributes:
        bootstrap: whether a bootstrap peer founds the run; otherwise the first peer does.
        num_spans: number of spans of each fragment.
        radial_spans: spans that have a radial mean; all others have a plain one.
        codec: codec of contributions and entries.
        bad_from, bad_until: seconds between which there are troubles; the rest is quiet.
        troubles: in order of time. They hold state during a simulation, so a scenario can be used only once.
        as_bytes: whether each receiver decodes every frame itself; otherwise receivers of the same frame share its
            value.
    """

    seed: int
    bootstrap: bool
    peers: tuple[PeerPlan, ...]
    num_spans: tuple[int, ...]
    radial_spans: frozenset[SpanId]
    codec: str
    group_size: int
    stalled_cycles: int
    scrub_cycles: int
    heartbeat_seconds: float
    bad_from: float
    bad_until: float
    troubles: tuple[Trouble, ...]
    as_bytes: bool

    @property
    def cycle_seconds(self) -> float:
        """Length of a cycle."""
        return ROUND_SECONDS * len(self.num_spans)

    def describe(self) -> str:
        """Return the scenario in a few lines."""
        open_peers = sum(peer.place == OPEN for peer in self.peers)
        who = f"{len(self.peers)} peers ({open_peers} can be dialled{', a bootstrap' if self.bootstrap else ''})"
        spans = f"spans {self.num_spans}, {len(self.radial_spans)} of them radial"
        cut = f"rows of {self.group_size}, {spans}, {self.codec}, stalled after {self.stalled_cycles} cycles"
        lines = [f"seed {self.seed}: {who}, {cut}; bad from {self.bad_from:.0f} to {self.bad_until:.0f} s"]
        return "\n".join([*lines, *(f"  at {trouble.at:.1f}: {trouble.describe()}" for trouble in self.troubles)])


def draw_scenario(seed: int, peers: tuple[int, int], kinds: Collection[str]) -> Scenario:
    """Draw everything from a seed.

    Args:
        peers: smallest and largest number; small numbers are drawn more often, since faults show there.
        kinds: kinds of trouble that may be drawn; each is left out of half of the scenarios, so that all mixtures
            occur.
    """
    rng = random.Random(seed)
    smallest, largest = math.log(peers[0] - 0.45), math.log(peers[1] + 0.45)
    num_peers = round(math.exp(smallest + (largest - smallest) * rng.random() ** FAVOURS_SMALL))
    num_peers = min(max(num_peers, peers[0]), peers[1])
    num_spans = tuple(rng.randint(1, 3) for _ in range(rng.choice([1, 2, 2, 2, 3])))
    bad_from = ROUND_SECONDS * (len(num_spans) + rng.random())
    bad_until = bad_from + ROUND_SECONDS * (FEWEST_BAD_ROUNDS + rng.randrange(16 if num_peers < 16 else 3))
    bootstrap = rng.random() < 0.7
    drawn = _draw_peers(rng, num_peers, bootstrap, bad_until)
    names = ([BOOTSTRAP] if bootstrap else []) + [peer.name for peer in drawn]
    return Scenario(
        seed=seed,
        bootstrap=bootstrap,
        peers=drawn,
        num_spans=num_spans,
        radial_spans=_draw_radial_spans(rng, num_spans),
        codec=rng.choice(["int4", "int8", "bfloat16", "float32"]),
        group_size=rng.choice([2, 4, 8, 16, 64]) if rng.random() < 0.6 else max(16, num_peers),
        stalled_cycles=rng.choice([1, 2, 3]),
        scrub_cycles=rng.choice([2, 2, 4]),
        heartbeat_seconds=_heartbeat_seconds(rng, num_peers),
        bad_from=bad_from,
        bad_until=bad_until,
        troubles=_draw_troubles(seed, tuple(names), kinds, bad_from, bad_until),
        as_bytes=rng.random() < 0.1,
    )


def _draw_peers(rng: random.Random, num_peers: int, bootstrap: bool, bad_until: float) -> tuple[PeerPlan, ...]:
    share = rng.choice([0.0, 0.1, 0.3, 0.6, 1.0, 1.0])
    clocks_err, speeds_differ = rng.random() < 0.5, rng.random() < 0.5
    skew = 0.05 * ROUND_SECONDS if clocks_err else 0.0
    peers = []
    for place in range(num_peers):
        founds = place == 0 and not bootstrap
        comes_late = rng.random() < 0.2 and not founds
        is_open = rng.random() < share or founds
        peers.append(
            PeerPlan(
                name=f"p{place}",
                place=OPEN if is_open else OUTBOUND_ONLY,
                starts_at=rng.uniform(0.0, bad_until - 1.0) if comes_late else rng.uniform(-8.0, 4.0),
                step_seconds=rng.uniform(0.05, 1.5) if speeds_differ else 0.4,
                wall_offset=rng.uniform(-skew, skew),
                drift=rng.uniform(-1e-4, 1e-4) if clocks_err else 0.0,
            )
        )
    return tuple(peers)


def _draw_radial_spans(rng: random.Random, num_spans: tuple[int, ...]) -> frozenset[SpanId]:
    """Draw no spans for half of the seeds, all for a quarter, some for the others."""
    spans = [SpanId(fragment, index) for fragment, count in enumerate(num_spans) for index in range(count)]
    count = rng.choice([0, 0, len(spans), rng.randint(1, len(spans))])
    return frozenset(rng.sample(spans, count))


def _draw_troubles(
    seed: int, names: tuple[str, ...], kinds: Collection[str], bad_from: float, bad_until: float
) -> tuple[Trouble, ...]:
    """Draw each kind independently, so that a new kind changes nothing about the others."""
    chosen = [kind for kind in KINDS if kind in kinds and random.Random(f"{kind} in {seed}").random() < 0.5]
    share = max(1.0, len(chosen) / 3.0)
    troubles: list[Trouble] = []
    for kind in chosen:
        rng = random.Random(f"{kind} of {seed}")
        draw = Draw(rng=rng, names=names, begin=bad_from, end=bad_until)
        most = max(1, round(KINDS[kind].most / share))
        troubles += [KINDS[kind].draw(draw) for _ in range(rng.randint(1, most))]
    return tuple(sorted(troubles, key=lambda trouble: trouble.at))


def _heartbeat_seconds(rng: random.Random, num_peers: int) -> float:
    """Return the heartbeat interval. It is longer with many peers, where nearly all messages are heartbeats."""
    if num_peers < 8:
        return rng.choice([0.5, 1.0])
    return rng.choice([1.0, 2.0]) if num_peers < 16 else 2.0
