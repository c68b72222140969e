"""`python -m benchmarks training`: compare inner steps per second with and without the exchange."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.averaging.our_run import check_codec
from benchmarks.commands.document import check_linux, report, show
from benchmarks.options import TrainingOptions, check_within
from benchmarks.training.figures import TORCHFT, Row, Setting, document_of, processor_left
from benchmarks.training.our_run import MODEL, RunShape
from benchmarks.training.play import Played, TrainingPlan, play_training
from benchmarks.training.systems import systems_against
from benchmarks.training.torchft_environment import install_torchft, torchft_interpreter
from benchmarks.training.uplinks import parse_uplinks
from p2p_diloco.app.cli.ended_politely import ended_politely
from p2p_diloco.app.cli.output import check_target
from p2p_diloco.config.decoder import model_shape
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.fragments import suited_spans

FEWEST_ISLANDS, MOST_ISLANDS = 2, 16
"""One row of a grid; the default `membership.group_size`."""


def bench_training(options: TrainingOptions) -> int:
    """Measure, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid, torchft is not installed, or no network can be created.
        PeerError, StateError, NetworkError: one of our processes ended, failed or timed out.
    """
    plan = plan_of(options)
    check_linux("training", "network namespaces, which only Linux has")
    with ended_politely():
        played = play_training(plan, show=show)
    figures = document_of(played.setting, played.rows)
    options = replace(options, spans=plan.shape.spans_per_fragment)
    report("training", options, figures, played.setting.machine, training_lines(played))
    return 0


def bench_install_torchft() -> int:
    """Create torchft's environment, and return the exit code, 0.

    Raises:
        NetworkError: pip could not install it.
    """
    install_torchft(show=show)
    return 0


def plan_of(options: TrainingOptions) -> TrainingPlan:
    """Return the plan for these options.

    Raises:
        ConfigError: an option is invalid, or torchft is requested and not installed.
    """
    check_within("--islands", options.islands, FEWEST_ISLANDS, MOST_ISLANDS)
    check_within("--repeat", options.repeat, 1)
    check_within("--fragments", options.fragments, 1)
    if options.spans is not None and not options.islands <= options.spans <= 2048:
        raise ConfigError(
            f"--spans is {options.spans}; expected {options.islands} to 2048, one for each island at least"
        )
    if options.cycle_seconds != 0.0 and not (math.isfinite(options.cycle_seconds) and options.cycle_seconds >= 0.2):
        raise ConfigError(f"--cycle-seconds is {options.cycle_seconds:g}; expected at least 0.2, or 0")
    check_codec(options.codec)
    check_target(options.json)
    systems = systems_against(options.against)
    elements = math.ceil(model_shape(MODEL).num_parameters / options.fragments)
    spans = options.spans or suited_spans(elements, options.islands)
    plan = TrainingPlan(
        systems=systems,
        uplinks=parse_uplinks(options.uplink),
        num_islands=options.islands,
        shape=RunShape(codec=options.codec, fragments=options.fragments, spans_per_fragment=spans),
        repeats=options.repeat,
        cycle_seconds=options.cycle_seconds or None,
        torchft_interpreter=torchft_interpreter() if TORCHFT in systems else "",
    )
    plan.run_plan(options.cycle_seconds or float(options.fragments))  # raises if there are more parts than tensors
    return plan


def training_lines(played: Played) -> list[str]:
    """Return the printed table: speed kept, then the cost of the exchange, then notes on the columns."""
    setting = played.setting
    lines = [
        f"{setting.islands} islands, {setting.parameters:,} parameters, {setting.codec}, {setting.machine['cores']} "
        f"cores, {setting.repeats} repeats: medians and quartiles",
        "",
        f"{'uplink':12}{'system':12}{'speed kept':>24}{'participation':>15}{'cycle s':>9}{'steps/cycle':>13}"
        f"{'CPU s/cycle':>13}{'CPU left':>10}",
        *(_row_words(setting, row) for row in played.rows),
        "",
    ]
    lines += [f"FAILED: {failure}" for failure in played.failures]
    return [*lines, *_REMARKS]


_REMARKS = (
    "speed kept: inner steps per second with the exchange over those without it, in the same processes just before and "
    "after",
    "participation: share of rounds and islands whose contribution was included",
    "CPU: processor time of an exchange per island and cycle, including the libp2p daemon; left: share of the "
    "processor that it leaves if the islands have the machine to themselves; not known for torchft",
)


def _row_words(setting: Setting, row: Row) -> str:
    kept, left = row.speed_kept, processor_left(setting, row)
    words = f"{kept.middle:.1%} ({kept.low:.1%}–{kept.high:.1%})"
    costs = "" if left is None else f"{row.cost.seconds:>13.2f}{left:>10.1%}"
    return (
        f"{row.uplink:12}{row.system:12}{words:>24}{row.participation:>15.1%}{row.cycle_seconds:>9.2f}"
        f"{row.steps_per_cycle:>13.1f}{costs}"
    )
