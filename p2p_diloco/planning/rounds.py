"""Choose the rounds of a new run from the inner step time, the slowest uplink and the number of islands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.planning.estimate import (
    DAY_SECONDS,
    LOSS_BY_STEPS,
    SHARE_OF_CORES,
    SHARE_OF_LINE,
    STEPS_OF_A_ROUND,
    THIN_BITS,
    WAYS_OF_A_CONTRIBUTION,
    Plan,
    Question,
    cost_of_traffic,
    least_round,
    loss_cost,
    lost_seconds,
    make_plan,
    rounded_up,
    shortest_round,
    traffic_of_a_day,
    way_seconds,
)
from p2p_diloco.rate import WIRE_SHARE, counted, format_rate, parse_rate, parse_traffic
from p2p_diloco.training.shape import MODEL_SIZES
from p2p_diloco.wording import format_bytes

ASSUMED_UPLINK, ASSUMED_LAN = "20mbit", "100mbit"
COMPILED_NANOSECONDS = 10.0
"""Processor time of the outer step per parameter and cycle, with compiled loops (docs/performance.md)."""
MOST_CYCLES = 2**20
"""Maximum number of cycles that a manifest can plan."""
FINAL_SHARE = 0.25
"""Share of the outer rate that is left at the planned end of a run (docs/decisions/0040)."""
RETAINED_SECONDS = 320.0
"""Minimum time for which entries are retained, even with short cycles: the time between checkpoints is a quarter of
it, and each checkpoint is as large as the whole state."""
_ROUND, _FRAGMENTS, _STEPS = "rounds.round_seconds", "rounds.fragments", "rounds.planned_steps"
_RETAINED = "rounds.retained_cycles"
_FEWEST_STEPS = min(LOSS_BY_STEPS)


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
            parts.append(
                f"{longer:g} s for packets that uplinks under {format_rate(THIN_BITS)} may lose (decision 0047)"
            )
        return f"half of {shortest:.3g} s holds {', '.join(parts[:-1])} and {parts[-1]}"
    if question.is_lan:
        return f"rounds under {shortest:g} s leave a busy machine no time to pause"
    return f"over the internet rounds under {shortest:g} s leave far machines out (decision 0046)"


def _cost(steps: float) -> str:
    most = max(LOSS_BY_STEPS)
    words = "more than" if steps > most else "about"
    return (
        f"cycles of {counted(round(steps), 'step')} end with a loss {words} {100 * loss_cost(steps):.2g} % above that "
        f"of {_FEWEST_STEPS} (short trials; decision 0033)"
    )


def format_step(seconds: float) -> str:
    """Return `45 ms`, `1.2 s`, `2.5 h`."""
    if seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < DAY_SECONDS / 24 else f"{seconds / 3600:.3g} h"
