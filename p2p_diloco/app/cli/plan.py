"""`p2p-diloco plan`: estimate what a run would need, and the values to write into its manifest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from p2p_diloco.app.cli.fleet import (
    LEAST_STEP_SECONDS,
    OPERATIONS,
    REACHED_SHARE,
    Contribution,
    Machines,
    contributions,
    middle_speed,
    parse_islands,
)
from p2p_diloco.app.cli.options import PlanOptions
from p2p_diloco.app.cli.output import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.config.rounds import DAY_SECONDS, Plan, Question, cost_of_traffic, make_plan, measure_outer_work
from p2p_diloco.rate import (
    WIRE_SHARE,
    count_named,
    counted,
    format_rate,
    parse_rate,
    parse_traffic,
)
from p2p_diloco.wording import format_count, format_share


def print_plan(options: PlanOptions) -> int:
    """Compute and print the plan; return the exit code, 0.

    Raises:
        ConfigError: an option is invalid, or no manifest allows such a run.
    """
    parameters = count_named(options.parameters)
    fleet = parse_islands(options.islands, "--islands", parameters, options.windows * options.context)
    planned_step = options.windows * options.context / middle_speed(fleet) if fleet else 1.0
    question = Question(
        parameters=parameters,
        islands=sum(each.count for each in fleet) or int(options.islands),
        uplink_bits=parse_rate(options.uplink, "--uplink"),
        step_seconds=planned_step if options.step_seconds is None else options.step_seconds,
        cores=options.cores,
        group_size=options.group_size,
        is_lan=options.lan,
        traffic_bytes=None if options.traffic is None else parse_traffic(options.traffic, "--traffic"),
    )
    check_target(options.json)
    question = dataclasses.replace(question, core_nanoseconds=measure_outer_work())
    plan = make_plan(question)
    figures: dict[str, Any] = {"question": dataclasses.asdict(question), "plan": dataclasses.asdict(plan)}
    machines: list[str] = []
    if fleet:
        added = contributions(fleet, question, plan, windows=options.windows, context=options.context)
        figures["machines"] = [dataclasses.asdict(each) for each in added]
        machines = _machine_lines(options, question, fleet, added)
    write_figures(options.json, figures)
    if options.json != STANDARD_OUTPUT:
        print("\n".join(plan_lines(question, plan, machines)))
    return 0


def plan_lines(question: Question, plan: Plan, machines: Sequence[str] = ()) -> list[str]:
    ours = question.step_seconds / plan.utilisation
    return [
        f"{question.parameters:,} parameters, {counted(question.islands, 'island')}, "
        f"{format_rate(question.uplink_bits)} up from each, a step in {_seconds(question.step_seconds)}",
        f"exchange       {_exchange(question, plan)}; {_seconds(plan.transfer_seconds)} on an idle uplink",
        f"cycle          {_seconds(plan.cycle_seconds)}, {plan.steps} steps; the uplink is busy for "
        f"{100 * plan.transfer_seconds / plan.cycle_seconds:.0f} % of it",
        f"traffic        {_traffic(question, plan)}",
        *_limited(question, plan),
        f"speed          {100 * plan.utilisation:.1f} % of training alone; the outer work costs "
        f"{question.core_nanoseconds:.0f} ns of a core per parameter and cycle here, with "
        f"{counted(question.cores, 'core')}",
        f"memory         {_bytes(plan.host_bytes)} on the host beyond training",
        f"data-parallel  over the same uplink: {_seconds(plan.data_parallel_step_seconds)} a step, "
        f"{plan.data_parallel_step_seconds / ours:,.0f} times as long",
        *machines,
        "manifest       [rounds]",
        f"               round_seconds = {_round_seconds(plan.round_seconds)}",
        f"               fragments = {plan.fragments}",
        f"               spans_per_fragment = {plan.spans_per_fragment}",
        f"               planned_steps = {plan.steps}",
    ]


def _machine_lines(
    options: PlanOptions, question: Question, fleet: Sequence[Machines], added: Sequence[Contribution]
) -> list[str]:
    """Return what each kind of machine adds, what all add, and what is assumed."""
    row = "{:<18} {:>7} {:>14} {:>15} {:>14} {:>13} {:>14}".format
    lines = [
        row("each of", "windows", "steps a cycle", "tokens an hour", "of all tokens", "equal weight", "traffic a day")
    ]
    for each in added:
        steps = f"{each.cycle_steps:,.0f}" if each.cycle_steps >= 10 else f"{each.cycle_steps:.2g}"
        shares = format_share(each.token_share), format_share(each.equal_share)
        speed, traffic = format_count(each.hour_tokens), _bytes(each.day_bytes)
        lines.append(row(f"{each.count} x {each.kind}", each.windows, steps, speed, *shares, traffic))
    wanted = 20 * question.parameters if options.tokens is None else count_named(options.tokens, "--tokens")
    planned = " (20 per parameter)" if options.tokens is None else ""
    hourly = sum(each.count * each.hour_tokens for each in added)
    reached = [f"{each.kind} {each.assumed_tflops:.3g} TFLOPS" for each in fleet if each.assumed_tflops is not None]
    lines += [
        f"all            {format_count(hourly)} tokens an hour; {format_count(wanted)}{planned} take "
        f"{_seconds(3600 * wanted / hourly)}",
        "               equal weight: its share among strangers, where a fast one counts like most",
        f"assumed        {options.windows} windows of {options.context:,} tokens in a planned step, {OPERATIONS:g} "
        "operations per parameter and token",
    ]
    if reached:
        lines += [
            f"               {', '.join(reached)}: {100 * REACHED_SHARE:.0f} % of the peak, in steps of at least "
            f"{LEAST_STEP_SECONDS:g} s",
            "               small models reach far less; give what `status` shows, such as 4x1300tokens/s",
        ]
    return lines


def _exchange(question: Question, plan: Plan) -> str:
    up, down = (f"{each:.3f}" for each in (plan.bytes_per_parameter, plan.received_per_parameter))
    ways = "each way" if up == down else f"up and {down} down"
    size = _bytes(question.parameters * plan.bytes_per_parameter)
    return f"{question.contribution} up, {question.entry} down: {up} bytes per parameter and cycle {ways}, {size}"


def _traffic(question: Question, plan: Plan) -> str:
    shares = (plan.bytes_per_parameter, plan.received_per_parameter)
    sizes = [WIRE_SHARE * question.parameters * each for each in shares]
    every = _seconds(plan.cycle_seconds)
    month = _bytes(30 * sum(sizes) * DAY_SECONDS / plan.cycle_seconds)
    (up, up_rate, up_day), (down, down_rate, down_day) = (
        (_bytes(size), format_rate(8.0 * size / plan.cycle_seconds), _bytes(size * DAY_SECONDS / plan.cycle_seconds))
        for size in sizes
    )
    if up == down:
        return f"{up} each way every {every}: {up_rate}, {up_day} a day each way, {month} a month"
    return (
        f"{up} up and {down} down every {every}: {up_rate} and {down_rate}, {up_day} and {down_day} a day, "
        f"{month} a month"
    )


def _limited(question: Question, plan: Plan) -> list[str]:
    """Return what a maximum of traffic costs, as a line."""
    if plan.set_by != "traffic":
        return []
    return [
        f"               without --traffic a cycle would be {counted(plan.best_steps, 'step')}; "
        f"the longer one costs about {100 * cost_of_traffic(plan):.2g} % of the loss (short trials)"
    ]


def _round_seconds(seconds: float) -> str:
    """Format `seconds` for a manifest; rounded down, because a value above the limit would be refused."""
    return f"{seconds:.3g}" if seconds < 1000 else f"{math.floor(seconds)}"


def _bytes(count: float) -> str:
    for name, unit in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e6:.3g} MB"


def _seconds(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    return f"{seconds:.3g} s"
