"""Estimate what a run needs before it starts: traffic, length of a cycle, speed relative to training alone.

Traffic follows from the codecs and the grid (`testing/scale.py` measures the same swarm and finds 3 % more, for
headers of messages). The caller measures the CPU time of the outer work, see `measure_outer_work`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from p2p_diloco.codec.codec import ROW_MEAN_CODEC, codec_named
from p2p_diloco.config.manifest import LONGEST_ROUND
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import ZERO_DIGEST, Digest, sha256
from p2p_diloco.log import AbsorbedEntry
from p2p_diloco.outer.advance import advance_span, prepare_contribution, record_contribution
from p2p_diloco.outer.fragments import suited_spans
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import InFlight, genesis_state
from p2p_diloco.protocol.clock import CONTRIBUTE_SHARE
from p2p_diloco.protocol.round.demand import Encoded, Flow, exchange_flow
from p2p_diloco.rate import check_count, check_positive, format_rate
from p2p_diloco.span.contribute import encode_contribution
from p2p_diloco.wording import format_bytes

LARGEST_FRAGMENT = 500_000_000
"""Maximum parameters of a fragment, unless that needs more than `MOST_FRAGMENTS`."""
WANTED_FRAGMENTS, MOST_FRAGMENTS = 4, 24
STEPS_OF_A_ROUND = 4
"""Minimum steps in a round: islands contribute between steps, only in the first half of a round, which has two then."""
SHARE_OF_LINE = 0.5
"""A cycle is long enough that the exchange uses at most this share of the uplink, since rounds have deadlines."""
SHARE_OF_CORES = 0.1
"""A cycle is long enough that the outer work takes at most this share of it."""
SAFE_ROUND_SECONDS, SAFE_ON_LAN_SECONDS = 4.0, 2.0
"""Minimum length of a round: over the internet, shorter ones leave far machines out (docs/decisions/0046); on a local
network, busy machines have no time to pause in them."""
LONG_WAY_SECONDS, LAN_WAY_SECONDS = 0.2, 0.005
"""One way between two machines of which nothing is known: over the internet, and within one local network."""
WAYS_OF_A_CONTRIBUTION = 4
"""Its opening, its vector, and a lost packet that is noticed and sent again."""
THIN_BITS, LOST_SECONDS = 10e6, 2.5
"""Over the internet, uplinks under this rate are taken for long copper lines or radio, which lose packets: there a
contribution takes this much longer (docs/decisions/0047)."""
MOST_STRETCH = 4.0
"""Maximum length of a cycle that limited traffic may require, relative to the best one."""
LOSS_BY_STEPS = {8: 1.625, 16: 1.650, 32: 1.694, 64: 1.753, 128: 1.825, 256: 1.923}
"""Final loss by inner steps per cycle, four islands, short trials (docs/decisions/0033)."""
BFLOAT16_BYTES = 2
DAY_SECONDS = 86_400.0

Bound = Literal["steps", "line", "cores", "rounds", "traffic"]
"""The constraint that sets the length of a cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The inputs of an estimate.

    Attributes:
        parameters: number of parameters of the model.
        islands: number of islands that train.
        uplink_bits: upload rate of the slowest island, bits per second.
        step_seconds: duration of an inner step.
        group_size: peers that average in one row.
        contribution, entry: codecs.
        cores: CPU cores that share an island's outer work; a process uses one.
        core_nanoseconds: time of one core per parameter and cycle.
        fewest_steps: minimum steps of a cycle, even on a fast uplink. Shorter cycles learn better, at least down to
            this length (`python -m research sync`, docs/lab-log.md).
        fragments: number of fragments if it is fixed; None: choose it.
        is_lan: whether all machines are on one local network.
        traffic_bytes: maximum bytes that a machine sends and receives in a day; None: no maximum.
    """

    parameters: int
    islands: int
    uplink_bits: float
    step_seconds: float
    group_size: int = 16
    contribution: str = "int4"
    entry: str = "int4"
    cores: int = 1
    core_nanoseconds: float = 40.0
    fewest_steps: int = 8
    fragments: int | None = None
    is_lan: bool = False
    traffic_bytes: float | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "islands", "group_size", "cores"):
            check_count(getattr(self, name), name)
        check_positive(self.uplink_bits, "uplink_bits", "20e6")
        check_positive(self.step_seconds, "step_seconds", "0.045")
        if self.traffic_bytes is not None:
            check_positive(self.traffic_bytes, "traffic_bytes", "10e9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of an estimate.

    Attributes:
        bytes_per_parameter: bytes sent by an island in a cycle, per parameter.
        received_per_parameter: bytes received: the same, or fewer with one or two islands, where the bootstrap reduces.
        transfer_seconds: time to send a cycle's bytes on an idle uplink.
        cycle_seconds: recommended length of a cycle.
        best_steps: steps in a cycle without a maximum of traffic.
        steps: inner steps in a cycle.
        set_by: the longest of the bounds, which sets the length of a cycle.
        fragments, spans_per_fragment: values for the manifest.
        round_seconds: length of a round: a cycle has one per fragment.
        utilisation: share of the time spent in inner steps.
        data_parallel_step_seconds: a data-parallel step over the same uplink: bfloat16 ring all-reduce, no overlap.
        host_bytes: host memory beyond training: anchor, momentum, and one fragment in transfer.
    """

    bytes_per_parameter: float
    received_per_parameter: float
    transfer_seconds: float
    cycle_seconds: float
    steps: int
    best_steps: int
    set_by: Bound
    fragments: int
    spans_per_fragment: int
    round_seconds: float
    utilisation: float
    data_parallel_step_seconds: float
    host_bytes: int


def make_plan(question: Question) -> Plan:
    """Compute what a run needs.

    Raises:
        ConfigError: rounds would be longer than a manifest allows, or the traffic does not fit.
    """
    size = question.parameters
    flow = flow_per_parameter(question)
    transfer = 8.0 * size * flow.sent / question.uplink_bits
    border = size * question.core_nanoseconds * 1e-9 / question.cores
    needed = question.fragments or min(math.ceil(size / LARGEST_FRAGMENT), MOST_FRAGMENTS)
    seconds: dict[Bound, float] = {
        "steps": max(question.fewest_steps, STEPS_OF_A_ROUND * needed) * question.step_seconds,
        "line": transfer / SHARE_OF_LINE,
        "cores": border / SHARE_OF_CORES,
        "rounds": shortest_round(question, needed) * needed,
    }
    best = max(seconds.values())
    if question.traffic_bytes is not None:
        seconds["traffic"] = _cycle_within(question.traffic_bytes, question, best)
    set_by = max(seconds, key=lambda bound: seconds[bound])
    steps, best_steps = (math.ceil(each / question.step_seconds - 1e-9) for each in (seconds[set_by], best))
    cycle = steps * question.step_seconds
    suited = (
        count
        for count in range(min(WANTED_FRAGMENTS, steps // STEPS_OF_A_ROUND), 0, -1)
        if count * shortest_round(question, count) <= cycle
    )
    fragments = question.fragments or max(needed, next(suited, 1))
    _check_round(cycle / fragments, question)
    spans = suited_spans(math.ceil(size / fragments), min(question.group_size, question.islands))
    ring = 2.0 * (1.0 - 1.0 / question.islands) * BFLOAT16_BYTES * 8.0 * size / question.uplink_bits
    return Plan(
        bytes_per_parameter=flow.sent,
        received_per_parameter=flow.received,
        transfer_seconds=transfer,
        cycle_seconds=cycle,
        steps=steps,
        best_steps=best_steps,
        set_by=set_by,
        fragments=fragments,
        spans_per_fragment=spans,
        round_seconds=cycle / fragments,
        utilisation=cycle / (cycle + border),
        data_parallel_step_seconds=question.step_seconds + ring,
        host_bytes=8 * size + math.ceil(size / fragments) * 8,
    )


def shortest_round(question: Question, fragments: int) -> float:
    """Return the seconds of the shortest round in which a contribution to all spans arrives in time.

    Half of a round holds the step that is in progress when it begins, the ways, and the transmission of a contribution.
    """
    sent = 8.0 * question.parameters * _bytes_of(question.contribution) / question.uplink_bits / fragments
    ways = WAYS_OF_A_CONTRIBUTION * way_seconds(question)
    half = ways + question.step_seconds + sent + lost_seconds(question)
    return max(least_round(question), half / CONTRIBUTE_SHARE)


def lost_seconds(question: Question) -> float:
    """Return how much longer a contribution may take on a thin line, because packets are lost; 0 on other lines."""
    return LOST_SECONDS if question.uplink_bits < THIN_BITS and not question.is_lan else 0.0


def least_round(question: Question) -> float:
    """Return the seconds of the shortest round on the best line."""
    return SAFE_ON_LAN_SECONDS if question.is_lan else SAFE_ROUND_SECONDS


def way_seconds(question: Question) -> float:
    """Return the seconds of one way between two machines."""
    return LAN_WAY_SECONDS if question.is_lan else LONG_WAY_SECONDS


def traffic_of_a_day(question: Question, cycle_seconds: float) -> float:
    """Return the most bytes that a machine sends and receives in a day: in a full row whose members all average."""
    flow = flow_per_parameter(replace(question, islands=max(question.islands, question.group_size)))
    carried = flow.with_headers()
    return DAY_SECONDS / cycle_seconds * question.parameters * (carried.sent + carried.received)


def _cycle_within(traffic_bytes: float, question: Question, best_seconds: float) -> float:
    """Return the seconds of a cycle with which a machine sends and receives at most these bytes in a day.

    Raises:
        ConfigError: the cycle would be longer than `MOST_STRETCH` times the best one.
    """
    least = traffic_of_a_day(question, MOST_STRETCH * best_seconds)
    if traffic_bytes < least:
        raise ConfigError(
            f"{format_bytes(traffic_bytes)} a day does not fit: {format_bytes(rounded_up(least))} a day, sent and "
            f"received, with cycles of {MOST_STRETCH * best_seconds:.3g} s, {MOST_STRETCH:g} times the best; "
            "allow at least that, or take a smaller model"
        )
    return traffic_of_a_day(question, 1.0) / traffic_bytes


def rounded_up(num_bytes: float) -> float:
    """Return an amount with two digits that is not smaller, so that an amount that is printed is enough."""
    digit = 10.0 ** (math.floor(math.log10(num_bytes)) - 1)
    return digit * math.ceil(num_bytes / digit)


def _check_round(seconds: float, question: Question) -> None:
    if seconds > LONGEST_ROUND:
        raise ConfigError(
            f"a round would take {seconds / DAY_SECONDS:,.1f} days at {format_rate(question.uplink_bits)}; a manifest "
            f"allows {LONGEST_ROUND / DAY_SECONDS:.0f}; give a faster uplink with its unit, such as 20mbit, "
            "fewer parameters or shorter steps"
        )


def loss_cost(steps: float) -> float:
    """Return the relative increase of the final loss for cycles of `steps` steps, compared with the shortest measured.

    Interpolates between measured lengths in the logarithm of the steps; constant beyond the longest.
    """
    best = LOSS_BY_STEPS[min(LOSS_BY_STEPS)]
    for (fewer, less), (more, loss) in pairwise(LOSS_BY_STEPS.items()):
        if steps <= more:
            share = max(math.log2(steps / fewer), 0.0) / math.log2(more / fewer)
            return (less + share * (loss - less)) / best - 1.0
    return LOSS_BY_STEPS[max(LOSS_BY_STEPS)] / best - 1.0


def cost_of_traffic(plan: Plan) -> float:
    """Return the relative increase of the final loss by cycles that a maximum of traffic has made longer."""
    return (1.0 + loss_cost(plan.steps)) / (1.0 + loss_cost(plan.best_steps)) - 1.0


def flow_per_parameter(question: Question) -> Flow:
    """Return the bytes that an island sends and receives per parameter and cycle.

    This is the mean over islands that can all be dialled, in a run with a bootstrap peer.
    """
    contribution, row_mean, entry = (
        _bytes_of(name) for name in (question.contribution, ROW_MEAN_CODEC, question.entry)
    )
    islands = question.islands
    return exchange_flow(
        Encoded(contribution=contribution, row_mean=row_mean, entry=entry),
        members=islands,
        group_size=question.group_size,
        reachable=islands,
        is_reachable=True,
        has_bootstrap=True,
    )


def _bytes_of(codec_name: str) -> float:
    elements = 1 << 20
    return codec_named(codec_name).encoded_bytes(elements) / elements


def measure_outer_work(elements: int = 1 << 21, repeats: int = 3) -> float:
    """Measure the core nanoseconds per parameter and cycle of the outer work: contribute, reduce, absorb, merge.

    Returns the best of a few runs on this machine; the value is higher on a busy one.
    """
    codec = codec_named("int4")
    state = genesis_state(np.zeros(elements, np.float32), ZERO_DIGEST)
    rng = np.random.Generator(np.random.Philox(key=1))
    local_N = rng.standard_normal(elements, dtype=np.float32) * np.float32(0.01)  # too small to be clipped
    best = math.inf
    for _ in range(repeats):
        began = time.process_time()
        prepared = prepare_contribution(state, InFlight(), local_N, round_index=0)
        prepared, payload = encode_contribution(codec, prepared)
        decoded_N = codec.decode(payload, elements)
        sent = record_contribution(state, InFlight(), local_N, round_index=0, sent=decoded_N)
        entry = AbsorbedEntry(
            digest=sha256(b"entry"), round=0, roster=Digest(ZERO_DIGEST), radius=prepared.norm, median_weight=1.0
        )
        advance_span(
            state,
            sent.in_flight,
            sent.local_N,
            entry=entry,
            update_N=codec.decode(payload, elements),
            outer_rule=OuterRule(),
            merge_rule=MergeRule(),
        )
        best = min(best, time.process_time() - began)
    return 1e9 * best / elements
