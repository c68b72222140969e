"""Estimate what a run needs, and choose the rounds of a new one: traffic, length of a cycle, speed.

Traffic follows from the codecs and the grid (`simulator/scale.py` measures the same swarm and finds 3 % more, for
headers of messages). The caller measures the CPU time of the outer work, see `measure_outer_work`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from p2p_diloco.codec.codec import ROW_MEAN_CODEC, codec_named
from p2p_diloco.config.decoder import MODEL_SIZES
from p2p_diloco.config.manifest import LONGEST_ROUND, RunManifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import ZERO_DIGEST, Digest, sha256
from p2p_diloco.outer.fragments import suited_spans
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import (
    InFlight,
    IslandSpan,
    advance_span,
    genesis_state,
    prepare_contribution,
    record_contribution,
)
from p2p_diloco.protocol.clock import CONTRIBUTE_SHARE
from p2p_diloco.protocol.round.traffic import Encoded, Flow, exchange_flow
from p2p_diloco.rate import WIRE_SHARE, check_count, check_positive, counted, format_rate, parse_rate, parse_traffic
from p2p_diloco.span.fused import encode_contribution
from p2p_diloco.span_log import AbsorbedEntry
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
"""Minimum length of a round: over the internet, shorter ones leave far machines out (docs/decisions/lines.md); on a
local network, busy machines have no time to pause in them."""
LONG_WAY_SECONDS, LAN_WAY_SECONDS = 0.2, 0.005
"""One way between two machines of which nothing is known: over the internet, and within one local network."""
WAYS_OF_A_CONTRIBUTION = 4
"""Its opening, its vector, and a lost packet that is noticed and sent again."""
THIN_BITS, LOST_SECONDS = 10e6, 2.5
"""Over the internet, uplinks under this rate are taken for long copper lines or radio, which lose packets: there a
contribution takes this much longer (docs/decisions/lines.md)."""
MOST_STRETCH = 4.0
"""Maximum length of a cycle that limited traffic may require, relative to the best one."""
LOSS_BY_STEPS = {8: 1.625, 16: 1.650, 32: 1.694, 64: 1.753, 128: 1.825, 256: 1.923}
"""Final loss by inner steps per cycle, four islands, short trials (docs/decisions/learning.md)."""
BFLOAT16_BYTES = 2
DAY_SECONDS = 86_400.0

Bound = Literal["steps", "line", "cores", "rounds", "traffic"]
"""The constraint that sets the length of a cycle."""
ASSUMED_UPLINK, ASSUMED_LAN = "20mbit", "100mbit"
COMPILED_NANOSECONDS = 10.0
"""Processor time of the outer step per parameter and cycle, with compiled loops (docs/performance.md)."""
MOST_CYCLES = 2**20
"""Maximum number of cycles that a manifest can plan."""
FINAL_SHARE = 0.25
"""Share of the outer rate that is left at the planned end of a run (docs/decisions/learning.md)."""
RETAINED_SECONDS = 320.0
"""Minimum time for which entries are retained, even with short cycles: the time between checkpoints is a quarter of
it, and each checkpoint is as large as the whole state."""
_ROUND, _FRAGMENTS, _STEPS = "rounds.round_seconds", "rounds.fragments", "rounds.planned_steps"
_RETAINED = "rounds.retained_cycles"
_FEWEST_STEPS = min(LOSS_BY_STEPS)


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
            this length (short trials, docs/decisions/learning.md).
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
    flow = flow_per_parameter(dataclasses.replace(question, islands=max(question.islands, question.group_size)))
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
        span = IslandSpan(state, InFlight(), local_N)
        prepared = prepare_contribution(span, round_index=0)
        prepared, payload = encode_contribution(codec, prepared)
        decoded_N = codec.decode(payload, elements)
        sent = record_contribution(span, round_index=0, sent=decoded_N)
        entry = AbsorbedEntry(
            digest=sha256(b"entry"), round=0, roster=Digest(ZERO_DIGEST), radius=prepared.norm, median_weight=1.0
        )
        advance_span(
            sent,
            entry=entry,
            update_N=codec.decode(payload, elements),
            outer_rule=OuterRule(),
            merge_rule=MergeRule(),
        )
        best = min(best, time.process_time() - began)
    return 1e9 * best / elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The islands and the network that a run is planned for.

    Attributes:
        islands: number of islands that train at a time; None: the size of one averaging group.
        uplink_bits: upload rate of the slowest island, bits per second.
        step_seconds: duration of an inner step.
        is_lan: whether all machines are on one local network.
        traffic_bytes: maximum bytes that a machine sends and receives in a day; None: no maximum.
    """

    islands: int | None
    uplink_bits: float
    step_seconds: float
    is_lan: bool = False
    traffic_bytes: float | None = None


def read_conditions(
    *, islands: int | None, uplink: str | None, step_seconds: float, lan: bool, traffic: str | None, flag: str = ""
) -> Conditions:
    """Return conditions as an organiser gives them.

    Args:
        uplink: upload rate of the slowest island, like `20mbit`; None: `ASSUMED_UPLINK`, or `ASSUMED_LAN` on one.
        traffic: maximum that a machine sends and receives, like `10GB/day`; None: no maximum.
        flag: what stands before a name in errors, such as `--`.
    Raises:
        ConfigError: one of them is no rate or no amount.
    """
    assumed = ASSUMED_LAN if lan else ASSUMED_UPLINK
    return Conditions(
        islands=islands,
        uplink_bits=parse_rate(assumed if uplink is None else uplink, f"{flag}uplink"),
        step_seconds=step_seconds,
        is_lan=lan,
        traffic_bytes=None if traffic is None else parse_traffic(traffic, f"{flag}traffic"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRounds:
    """Values for a manifest, and notes on them for the organiser.

    Attributes:
        values: values by dotted key.
        notes: one line each; the first describes the cycle.
    """

    values: dict[str, Any]
    notes: tuple[str, ...]


def choose_rounds(manifest: RunManifest, given: Collection[str], conditions: Conditions) -> ChosenRounds:
    """Choose a cycle with as few inner steps as the uplink, the processor and the clock allow.

    Args:
        manifest: manifest of the run, with the values that its organiser has set.
        given: dotted keys that the organiser has set; they are kept.
        conditions: the conditions to plan for.
    Raises:
        ConfigError: a condition is invalid, rounds would be longer than a manifest allows, or the traffic does not fit.
    """
    question = Question(
        parameters=_num_parameters(manifest),
        islands=manifest.membership.group_size if conditions.islands is None else conditions.islands,
        uplink_bits=conditions.uplink_bits,
        step_seconds=conditions.step_seconds,
        group_size=manifest.membership.group_size,
        contribution=manifest.codec.contribution,
        entry=manifest.codec.entry,
        core_nanoseconds=COMPILED_NANOSECONDS,
        fragments=manifest.rounds.fragments if _FRAGMENTS in given else None,
        is_lan=conditions.is_lan,
        traffic_bytes=None if _ROUND in given else conditions.traffic_bytes,
    )
    plan = make_plan(question)
    tensors = manifest.model.tensors
    if tensors and plan.fragments > len(tensors) and _FRAGMENTS not in given:  # a fragment consists of whole tensors
        question = dataclasses.replace(question, fragments=len(tensors))
        plan = make_plan(question)
    if _ROUND in given:
        fragments = manifest.rounds.fragments
        cycle = manifest.rounds.round_seconds * fragments
        steps = max(1, round(cycle / question.step_seconds))
        _check_traffic(question, conditions.traffic_bytes, cycle)
        chosen: dict[str, Any] = {_STEPS: steps}
        notes = [_cycle(question, plan, cycle, steps, fragments), *_warnings(question, plan, cycle, fragments)]
    else:
        # Round up to the next millisecond, so that rounding violates no bound.
        round_seconds = math.ceil(1000.0 * plan.round_seconds - 1e-6) / 1000.0
        chosen = {_ROUND: round_seconds, _FRAGMENTS: plan.fragments, _STEPS: plan.steps}
        notes = [_cycle(question, plan, plan.cycle_seconds, plan.steps, plan.fragments), *_reason(question, plan)]
    cycle = chosen.get(_ROUND, manifest.rounds.round_seconds) * chosen.get(_FRAGMENTS, manifest.rounds.fragments)
    retained = math.ceil(RETAINED_SECONDS / cycle)
    if retained > manifest.rounds.retained_cycles:
        chosen[_RETAINED] = retained
    return ChosenRounds(values={key: chosen[key] for key in chosen if key not in given}, notes=tuple(notes))


def plan_end(manifest: RunManifest, given: Mapping[str, Any], hours: float) -> ChosenRounds:
    """Choose the number of cycles of a run that is planned to last `hours`, and rates that fall towards its end.

    Args:
        given: values that the organiser has set, by dotted key; a constant inner rate keeps both rates constant.
    Raises:
        ConfigError: `hours` is invalid, or more than a manifest can plan.
    """
    cycle = manifest.rounds.round_seconds * manifest.rounds.fragments
    cycles = round(hours * 3600.0 / cycle) if math.isfinite(hours) else 0
    if not 1 <= cycles <= MOST_CYCLES:
        raise ConfigError(
            f"--hours is {hours:g}; expected {cycle / 3600:.3g} to {MOST_CYCLES * cycle / 3600:.0f}, from one cycle of "
            f"{cycle:.3g} s to {MOST_CYCLES:,}; leave it out for a run without a planned end"
        )
    values: dict[str, Any] = {"rounds.planned_cycles": cycles}
    rates = "learning rates stay constant"
    if given.get("inner.schedule") != "constant":
        values |= {"inner.schedule": "cosine", "outer.final_share": FINAL_SHARE}
        rates = "the inner learning rate falls until then, and the outer one over the last quarter"
    note = f"planned for {hours:g} h, {counted(cycles, 'cycle')}: {rates}; the run continues afterwards"
    return ChosenRounds(values=values, notes=(note,))


def _num_parameters(manifest: RunManifest) -> int:
    if manifest.model.tensors:
        return sum(math.prod(shape) for _, shape, _ in manifest.model.tensors)
    return dataclasses.replace(MODEL_SIZES[manifest.model.size], **manifest.model.changes()).num_parameters


def _cycle(question: Question, plan: Plan, cycle: float, steps: int, fragments: int) -> str:
    up, down = (
        format_rate(8.0 * WIRE_SHARE * question.parameters * per_parameter / cycle)
        for per_parameter in (plan.bytes_per_parameter, plan.received_per_parameter)
    )
    return (
        f"a cycle is {counted(steps, 'step')} of {format_step(question.step_seconds)}, "
        f"{counted(fragments, 'round')} of {cycle / fragments:.3g} s; "
        f"{f'{up} each way' if up == down else f'{up} up and {down} down'}"
    )


def _reason(question: Question, plan: Plan) -> list[str]:
    """Explain what makes a cycle longer than is best for learning, and what that costs."""
    if plan.steps <= _FEWEST_STEPS:
        return []
    busy, work = f"{100 * SHARE_OF_LINE:.0f} %", f"{100 * SHARE_OF_CORES:.0f} %"
    reasons = {
        "steps": f"set by its {counted(plan.fragments, 'fragment')}: each round has {STEPS_OF_A_ROUND} steps",
        "line": f"set by the uplink: {_exchange(question, plan)}, and should take at most {busy} of a cycle",
        "cores": f"set by the processor: the outer work should take at most {work} of a cycle",
        "rounds": f"set by the shortest round: {_short_rounds(question, plan.fragments)}",
        "traffic": _stretched(question, plan),
    }
    return [f"{reasons[plan.set_by]}; {_cost(plan.steps)}"]


def _stretched(question: Question, plan: Plan) -> str:
    most, stretch = format_bytes(question.traffic_bytes or 0.0), plan.steps / plan.best_steps
    return (
        f"set by {most} a day, sent and received: {stretch:.1f} times the best cycle of "
        f"{counted(plan.best_steps, 'step')}, which costs about {100 * cost_of_traffic(plan):.2g} % of the loss"
    )


def _check_traffic(question: Question, traffic_bytes: float | None, cycle: float) -> None:
    """Raise ConfigError if rounds that the organiser chose need more traffic than allowed."""
    needed = traffic_of_a_day(question, cycle)
    if traffic_bytes is not None and traffic_bytes < needed:
        raise ConfigError(
            f"{format_bytes(traffic_bytes)} a day does not fit: {format_bytes(rounded_up(needed))} a day, sent and "
            f"received, with the given {_ROUND}; leave it out to have it chosen"
        )


def _warnings(question: Question, plan: Plan, cycle: float, fragments: int) -> list[str]:
    """Return warnings about a cycle that the organiser chose."""
    warnings = []
    steps = cycle / question.step_seconds
    if cycle / fragments < shortest_round(question, fragments):
        warnings.append(f"rounds of {cycle / fragments:.3g} s are short: {_short_rounds(question, fragments)}")
    if plan.transfer_seconds > SHARE_OF_LINE * cycle:
        least = max(plan.transfer_seconds / SHARE_OF_LINE / fragments, shortest_round(question, fragments))
        warnings.append(
            f"the uplink is too slow for that: {_exchange(question, plan)}, more than {100 * SHARE_OF_LINE:.0f} % of "
            f"the cycle, so contributions arrive late; rounds of {least:.3g} s are long enough"
        )
    if steps > 2 * plan.steps:
        warnings.append(f"without {_ROUND} a cycle would be {counted(plan.steps, 'step')}; {_cost(steps)}")
    return warnings


def _exchange(question: Question, plan: Plan) -> str:
    return f"an exchange takes {plan.transfer_seconds:.2g} s at {format_rate(question.uplink_bits)}"


def _short_rounds(question: Question, fragments: int) -> str:
    shortest = shortest_round(question, fragments)
    if shortest > least_round(question):
        parts = ["a step", "a contribution", f"{WAYS_OF_A_CONTRIBUTION * way_seconds(question):g} s on the way"]
        if longer := lost_seconds(question):
            parts.append(f"{longer:g} s for packets that uplinks under {format_rate(THIN_BITS)} may lose")
        return f"half of {shortest:.3g} s holds {', '.join(parts[:-1])} and {parts[-1]}"
    if question.is_lan:
        return f"rounds under {shortest:g} s leave a busy machine no time to pause"
    return f"over the internet rounds under {shortest:g} s leave far machines out"


def _cost(steps: float) -> str:
    most = max(LOSS_BY_STEPS)
    words = "more than" if steps > most else "about"
    return (
        f"cycles of {counted(round(steps), 'step')} end with a loss {words} {100 * loss_cost(steps):.2g} % above that "
        f"of {_FEWEST_STEPS} (short trials)"
    )


def format_step(seconds: float) -> str:
    """Return `45 ms`, `1.2 s`, `2.5 h`."""
    if seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < DAY_SECONDS / 24 else f"{seconds / 3600:.3g} h"
