"""The rounds of a new run: how long its cycle is, from an inner step, the slowest line and the number of islands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.planning.estimate import (
    DAY_SECONDS,
    LOSS_BY_STEPS,
    SAFE_ROUND_SECONDS,
    SHARE_OF_CORES,
    SHARE_OF_LINE,
    STEPS_OF_A_ROUND,
    Plan,
    Question,
    loss_cost,
    make_plan,
)
from p2p_diloco.rate import counted, format_rate
from p2p_diloco.training.shape import MODEL_SIZES

COMPILED_NANOSECONDS = 10.0
"""Processor time of the outer step per parameter and cycle, with compiled loops (docs/performance.md)."""
MOST_CYCLES = 2**20
"""That a manifest plans."""
RETAINED_SECONDS = 320.0
"""Entries are retained for so long at least, however short cycles are: checkpoints are a quarter of that apart, and
each is as large as the whole state."""
_ROUND, _FRAGMENTS, _STEPS = "rounds.round_seconds", "rounds.fragments", "rounds.planned_steps"
_RETAINED = "limits.retained_cycles"
_FEWEST_STEPS = min(LOSS_BY_STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The islands and the network that a run is planned for.

    Attributes:
        islands: that train at a time.
        uplink_bits: per second, of the slowest island.
        step_seconds: an inner step.
    """

    islands: int
    uplink_bits: float
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRounds:
    """Values for a manifest, and notes on them for the person who makes the run.

    Attributes:
        values: by dotted key.
        notes: a line each; the first has the cycle.
    """

    values: dict[str, Any]
    notes: tuple[str, ...]


def choose_rounds(manifest: RunManifest, given: Collection[str], conditions: Conditions) -> ChosenRounds:
    """Choose a cycle of as few inner steps as the line, the processor and the clock allow.

    Args:
        manifest: of the run, with what its organiser has settled.
        given: dotted keys that the organiser settled; they stay.
        conditions: what the run is to suit.
    Raises:
        ConfigError: a condition that means nothing, or rounds longer than a manifest allows.
    """
    question = Question(
        parameters=_num_parameters(manifest),
        islands=conditions.islands,
        uplink_bits=conditions.uplink_bits,
        step_seconds=conditions.step_seconds,
        group_size=manifest.membership.group_size,
        contribution=manifest.codec.contribution,
        row_mean=manifest.codec.row_mean,
        entry=manifest.codec.entry,
        core_nanoseconds=COMPILED_NANOSECONDS,
        heartbeat_seconds=manifest.membership.heartbeat_seconds,
        fragments=manifest.rounds.fragments if _FRAGMENTS in given else None,
    )
    plan = make_plan(question)
    tensors = manifest.model.tensors
    if tensors and plan.fragments > len(tensors) and _FRAGMENTS not in given:  # a fragment is of whole tensors
        question = dataclasses.replace(question, fragments=len(tensors))
        plan = make_plan(question)
    if _ROUND in given:
        fragments = manifest.rounds.fragments
        cycle = manifest.rounds.round_seconds * fragments
        steps = max(1, round(cycle / question.step_seconds))
        chosen: dict[str, Any] = {_STEPS: steps}
        notes = [_cycle(question, plan, cycle, steps, fragments), *_warnings(question, plan, cycle, fragments)]
    else:
        # Up to the next millisecond, so that no bound is missed by rounding.
        round_seconds = math.ceil(1000.0 * plan.round_seconds - 1e-6) / 1000.0
        chosen = {_ROUND: round_seconds, _FRAGMENTS: plan.fragments, _STEPS: plan.steps}
        notes = [_cycle(question, plan, plan.cycle_seconds, plan.steps, plan.fragments), *_reason(question, plan)]
    cycle = chosen.get(_ROUND, manifest.rounds.round_seconds) * chosen.get(_FRAGMENTS, manifest.rounds.fragments)
    retained = math.ceil(RETAINED_SECONDS / cycle)
    if retained > manifest.limits.retained_cycles:
        chosen[_RETAINED] = retained
    return ChosenRounds(values={key: chosen[key] for key in chosen if key not in given}, notes=tuple(notes))


def plan_end(manifest: RunManifest, hours: float) -> ChosenRounds:
    """Choose the number of cycles of a run that is to be done after so many hours.

    Raises:
        ConfigError: it means nothing, or is more than a manifest plans.
    """
    cycle = manifest.rounds.round_seconds * manifest.rounds.fragments
    cycles = round(hours * 3600.0 / cycle) if math.isfinite(hours) else 0
    if not 1 <= cycles <= MOST_CYCLES:
        raise ConfigError(
            f"--hours is {hours:g}; expected {cycle / 3600:.3g} to {MOST_CYCLES * cycle / 3600:.0f}, from one cycle of "
            f"{cycle:.3g} s to {MOST_CYCLES:,}; leave it out for a run without a planned end"
        )
    note = f"planned for {hours:g} h, {counted(cycles, 'cycle')}: the inner rate falls until then, and the run goes on"
    return ChosenRounds(values={"rounds.planned_cycles": cycles, "inner.schedule": "cosine"}, notes=(note,))


def _num_parameters(manifest: RunManifest) -> int:
    if manifest.model.tensors:
        return sum(math.prod(shape) for _, shape, _ in manifest.model.tensors)
    return dataclasses.replace(MODEL_SIZES[manifest.model.size], **manifest.model.changes()).num_parameters


def _cycle(question: Question, plan: Plan, cycle: float, steps: int, fragments: int) -> str:
    up, down = (
        format_rate(8.0 * question.parameters * per_parameter / cycle)
        for per_parameter in (plan.bytes_per_parameter, plan.received_per_parameter)
    )
    return (
        f"a cycle is {counted(steps, 'step')} of {format_step(question.step_seconds)}, "
        f"{counted(fragments, 'round')} of {cycle / fragments:.3g} s; "
        f"{f'{up} each way' if up == down else f'{up} up and {down} down'}"
    )


def _reason(question: Question, plan: Plan) -> list[str]:
    """Say what makes a cycle longer than learning wants it, and what that costs."""
    if plan.steps <= _FEWEST_STEPS:
        return []
    busy, work = f"{100 * SHARE_OF_LINE:.0f} %", f"{100 * SHARE_OF_CORES:.0f} %"
    reasons = {
        "steps": f"its {counted(plan.fragments, 'fragment')} set that: {STEPS_OF_A_ROUND} steps in each round",
        "line": f"the line sets that: {_exchange(question, plan)}, and is to fill at most {busy} of a cycle",
        "cores": f"the processor sets that: the outer work is to take at most {work} of a cycle",
        "rounds": f"the clock sets that: {_short_rounds()}",
        "heartbeat": f"membership.heartbeat_seconds = {question.heartbeat_seconds:g} sets that: a cycle is no shorter",
    }
    return [f"{reasons[plan.set_by]}; {_cost(plan.steps)}"]


def _warnings(question: Question, plan: Plan, cycle: float, fragments: int) -> list[str]:
    """Say what is wrong with a cycle that the organiser chose."""
    warnings = []
    steps = cycle / question.step_seconds
    if cycle / fragments < SAFE_ROUND_SECONDS:
        warnings.append(f"rounds of {cycle / fragments:.3g} s are short: {_short_rounds()}")
    if plan.transfer_seconds > SHARE_OF_LINE * cycle:
        least = plan.transfer_seconds / SHARE_OF_LINE / fragments
        warnings.append(
            f"the line is thin for that: {_exchange(question, plan)}, more than {100 * SHARE_OF_LINE:.0f} % of the "
            f"cycle, so contributions come late; rounds of {least:.3g} s have room"
        )
    if steps > 2 * plan.steps:
        warnings.append(f"without {_ROUND} a cycle would be {counted(plan.steps, 'step')}; {_cost(steps)}")
    return warnings


def _exchange(question: Question, plan: Plan) -> str:
    return f"an exchange takes {plan.transfer_seconds:.2g} s at {format_rate(question.uplink_bits)}"


def _short_rounds() -> str:
    return f"rounds under {SAFE_ROUND_SECONDS:g} s lose contributions over the internet"


def _cost(steps: float) -> str:
    most = max(LOSS_BY_STEPS)
    words = "more than" if steps > most else "about"
    return (
        f"cycles of {counted(round(steps), 'step')} end with a loss {words} {100 * loss_cost(steps):.2g} % above that "
        f"of {_FEWEST_STEPS} (short trials; `python -m research sync --size micro` in a checkout repeats them)"
    )


def format_step(seconds: float) -> str:
    """Return `45 ms`, `1.2 s`, `2.5 h`."""
    if seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < DAY_SECONDS / 24 else f"{seconds / 3600:.3g} h"
