"""What a seed draws: how many peers, how they are, how the run is cut, and what befalls them when."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from p2p_diloco.ids import SpanId
from p2p_diloco.lab.faults import STRIKES, FaultKind, Strike, draw_weather
from p2p_diloco.lab.network import Weather
from p2p_diloco.lab.toy_run import ROUND_SECONDS

FOUNDER = "boot"
FEWEST_FAULTY_ROUNDS = 10
FAVOURS_SMALL = 1.5
"""1 would draw the logarithm of the number of peers evenly; the effort grows with its square, and trouble does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """One peer: how it is and when it comes; `drift` in seconds per second."""

    name: str
    dialable: bool
    starts_at: float
    step_seconds: float
    offset_seconds: float
    drift: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that is drawn before a run begins.

    Attributes:
        helper: whether a bootstrap founds the run; otherwise the first peer does.
        num_spans: spans of each fragment.
        radial_spans: have a radial mean, all others a plain one.
        codec: of contributions and entries.
        bad_from, bad_until: seconds between which there are faults; the rest is quiet.
        weather: of the bad times.
        strikes: in order of time.
    """

    seed: int
    helper: bool
    peers: tuple[PeerPlan, ...]
    num_spans: tuple[int, ...]
    radial_spans: frozenset[SpanId]
    codec: str
    group_size: int
    void_cycles: int
    scrub_cycles: int
    heartbeat_seconds: float
    bad_from: float
    bad_until: float
    weather: Weather
    strikes: tuple[Strike, ...]

    @property
    def cycle_seconds(self) -> float:
        """Length of a cycle."""
        return ROUND_SECONDS * len(self.num_spans)

    def describe(self) -> str:
        """Return the scenario in one line."""
        dialable = sum(peer.dialable for peer in self.peers)
        kinds = ", ".join(sorted({fault.kind.value for fault in self.strikes}))
        who = f"{len(self.peers)} peers ({dialable} dialable{', a helper' if self.helper else ''})"
        spans = f"spans {self.num_spans}, {len(self.radial_spans)} of them radial"
        cut = f"rows of {self.group_size}, {spans}, {self.codec}, void after {self.void_cycles} cycles"
        bad = f"bad from {self.bad_from:.0f} to {self.bad_until:.0f} s: {self.weather}"
        return f"seed {self.seed}: {who}, {cut}; {bad}; {len(self.strikes)} strikes ({kinds})"


def draw_scenario(seed: int, peers: tuple[int, int], kinds: Iterable[FaultKind]) -> Scenario:
    """Draw everything from a seed.

    Args:
        peers: fewest and most; few are drawn more often than many, for trouble lives there.
        kinds: faults that may be drawn; each is left out of half of the runs, so that all mixtures come.
    """
    rng = random.Random(seed)
    smallest, largest = math.log(peers[0] - 0.45), math.log(peers[1] + 0.45)
    num_peers = round(math.exp(smallest + (largest - smallest) * rng.random() ** FAVOURS_SMALL))
    num_peers = min(max(num_peers, peers[0]), peers[1])
    num_spans = tuple(rng.randint(1, 3) for _ in range(rng.choice([1, 2, 2, 2, 3] if num_peers < 24 else [2])))
    chosen = [kind for kind in FaultKind if kind in set(kinds) - {FaultKind.THIN} and rng.random() < 0.5]
    bad_from = ROUND_SECONDS * (len(num_spans) + rng.random())
    rounds = FEWEST_FAULTY_ROUNDS + (rng.randrange(16) if num_peers < 16 else rng.randrange(3))
    bad_until = bad_from + ROUND_SECONDS * rounds
    helper = rng.random() < 0.7
    drawn_peers = _draw_peers(rng, num_peers, helper, FaultKind.CLOCK in chosen, FaultKind.SPEED in chosen, bad_until)
    names = [peer.name for peer in drawn_peers] + ([FOUNDER] if helper else [])
    strikes = _draw_strikes(rng, names, [kind for kind in chosen if kind in STRIKES], bad_from, bad_until)
    if FaultKind.THIN in set(kinds):
        strikes = tuple(sorted((*strikes, *_draw_thin_lines(seed, names, bad_from, bad_until)), key=lambda one: one.at))
    return Scenario(
        seed=seed,
        helper=helper,
        peers=drawn_peers,
        num_spans=num_spans,
        radial_spans=_draw_radial_spans(seed, num_spans),
        codec=rng.choice(["int4", "int8", "bfloat16", "float32"]),
        group_size=rng.choice([2, 4, 8, 16, 64]) if rng.random() < 0.6 else max(16, num_peers),
        void_cycles=rng.choice([1, 2, 3]),
        scrub_cycles=2 if FaultKind.FLIP in chosen else 8,
        heartbeat_seconds=_heartbeat_seconds(rng, num_peers),
        bad_from=bad_from,
        bad_until=bad_until,
        weather=draw_weather(chosen, rng, ROUND_SECONDS),
        strikes=strikes,
    )


def _draw_peers(
    rng: random.Random, num_peers: int, helper: bool, clocks_err: bool, speeds_differ: bool, bad_until: float
) -> tuple[PeerPlan, ...]:
    share = rng.choice([0.0, 0.1, 0.3, 0.6, 1.0, 1.0])
    skew = 0.05 * ROUND_SECONDS if clocks_err else 0.0
    peers = []
    for place in range(num_peers):
        founds = place == 0 and not helper
        comes_late = rng.random() < 0.2 and not founds
        peers.append(
            PeerPlan(
                name=f"p{place}",
                dialable=rng.random() < share or founds,
                starts_at=rng.uniform(0.0, bad_until - 1.0) if comes_late else rng.uniform(-8.0, 4.0),
                step_seconds=rng.uniform(0.05, 1.5) if speeds_differ else 0.4,
                offset_seconds=rng.uniform(-skew, skew),
                drift=rng.uniform(-1e-4, 1e-4) if clocks_err else 0.0,
            )
        )
    return tuple(peers)


def _draw_strikes(
    rng: random.Random, names: list[str], kinds: list[FaultKind], bad_from: float, bad_until: float
) -> tuple[Strike, ...]:
    if not kinds:
        return ()
    strikes: list[Strike] = []
    flips = 0
    for _ in range(rng.randint(3, 14)):
        kind = rng.choice(kinds)
        flips += kind is FaultKind.FLIP
        if kind is FaultKind.FLIP and flips > 1:
            continue
        strikes.append(_draw_strike(rng, names, kind, bad_from, bad_until))
    return tuple(sorted(strikes, key=lambda fault: fault.at))


def _draw_radial_spans(seed: int, num_spans: tuple[int, ...]) -> frozenset[SpanId]:
    """Draw them by themselves, as thin lines are: none in half of the seeds, all in a quarter, some in the others."""
    rng = random.Random(f"radial means of {seed}")
    spans = [SpanId(fragment, index) for fragment, count in enumerate(num_spans) for index in range(count)]
    count = rng.choice([0, 0, len(spans), rng.randint(1, len(spans))])
    return frozenset(rng.sample(spans, count))


def _draw_thin_lines(seed: int, names: list[str], bad_from: float, bad_until: float) -> tuple[Strike, ...]:
    """Draw them by themselves: all else that a seed stands for is what it was before there were any."""
    rng = random.Random(f"thin lines of {seed}")
    number = rng.choice([0, 0, 1, 2, 4])
    return tuple(_draw_strike(rng, names, FaultKind.THIN, bad_from, bad_until) for _ in range(number))


def _draw_strike(rng: random.Random, names: list[str], kind: FaultKind, bad_from: float, bad_until: float) -> Strike:
    at = rng.uniform(bad_from, bad_until)
    seconds = ROUND_SECONDS * rng.choice([0.1, 0.5, 1.0, 2.0, 4.0, 8.0]) * rng.uniform(0.5, 1.5)
    count = 1
    if kind in (FaultKind.PARTITION, FaultKind.ONE_WAY):
        count = rng.randint(1, max(1, len(names) - 1))
    elif kind is not FaultKind.FLIP and rng.random() < 0.4:
        count = rng.randint(1, len(names))
    until = min(at + seconds, bad_until)
    struck = rng.sample(names, count)
    if kind is FaultKind.KILL and rng.random() < 0.25:
        until = math.inf
    if kind is FaultKind.WIPE or math.isinf(until):
        struck = [name for name in struck if name not in (FOUNDER, names[0])]  # who founded keeps its disk and its life
    amount = 0.0
    if kind is FaultKind.CLOCK:
        amount = ROUND_SECONDS * rng.uniform(-0.6, 0.6)
    elif kind is FaultKind.FLIP:
        amount = rng.random()
    elif kind is FaultKind.LEAVE:
        amount = rng.uniform(0.0, ROUND_SECONDS)
    elif kind is FaultKind.THIN:
        amount = float(rng.choice([1, 2, 4]))
    return Strike(kind=kind, at=at, until=until, names=tuple(struck), amount=amount)


def _heartbeat_seconds(rng: random.Random, num_peers: int) -> float:
    """Return how often peers say that they live: with many peers nearly all messages are heartbeats."""
    if num_peers < 12:
        return rng.choice([1.0, 2.0])
    return 4.0 if num_peers < 24 else ROUND_SECONDS
