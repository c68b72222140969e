"""`python -m benchmarks chaos`: how much of a run's training is kept while its peers fail."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.chaos.faults import KINDS, draw_faults, kinds_named
from benchmarks.chaos.figures import figures_of
from benchmarks.chaos.play import QUIET_LAST_ROUNDS, ChaosPlan, Disks, play, seconds_to_start
from benchmarks.commands.document import report, show
from benchmarks.machine import describe_machine
from benchmarks.options import ChaosOptions, check_within
from benchmarks.star_network import StarNetwork
from p2p_diloco.app.cli.ended_politely import ended_politely
from p2p_diloco.app.cli.output import check_target
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.run_text import open_run_text, open_stream
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.errors import ConfigError
from p2p_diloco.rate import check_positive, parse_seconds
from p2p_diloco.signing import SigningKey

FEWEST_ISLANDS, MOST_ISLANDS = 2, 16
TRAINING_SHARE = 0.5
"""Share of the machine that all islands' inner steps take together; with all else that peers do, about 60 %."""
_WARM_STEPS, _TIMED_STEPS = 5, 30


def bench_chaos(options: ChaosOptions) -> int:
    """Play without faults and with faults, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid.
        P2PDilocoError: a play did not come to its end.
    """
    every = _check(options)
    kinds = kinds_named(options.faults)
    machine = describe_machine()
    with ended_politely(), ExitStack() as ends:
        network = _network(options.islands, ends)
        has_disks = _has_disks()
        possible = {"": True, "networks": network is not None, "disks": has_disks}
        left_out = [kind for kind in kinds if not possible[KINDS[kind].needs]]
        if left_out:
            show(f"left out, because this machine does not permit them (run it as root): {', '.join(left_out)}")
        plan = ChaosPlan(
            islands=options.islands,
            seconds=options.minutes * 60.0,
            round_seconds=options.round_seconds,
            step_seconds=options.islands * measure_step() / (TRAINING_SHARE * (os.cpu_count() or 1)),
            start_seconds=seconds_to_start(options.islands + 1),
            bootstrap_dies=options.bootstrap_dies,
        )
        faults = draw_faults(
            seed=options.seed,
            islands=options.islands,
            seconds=plan.seconds,
            every=every,
            kinds=[kind for kind in kinds if kind not in left_out],
            has_bootstrap=not options.bootstrap_dies,
        )
        quiet_seconds = plan.seconds if options.quiet_minutes is None else options.quiet_minutes * 60.0
        quiet_plan = replace(plan, seconds=quiet_seconds, bootstrap_dies=False, last_rounds=QUIET_LAST_ROUNDS)
        show(f"{options.islands} islands, a step every {1000 * plan.step_seconds:.0f} ms: first without faults")
        quiet = play(quiet_plan, (), network=network, show=show)
        show(f"the same with {len(faults)} faults")
        played = play(plan, faults, network=network, show=show)
    figures = figures_of(played, quiet, faults=len(faults), islands=options.islands)
    figures |= {"left_out": left_out, "step_seconds": plan.step_seconds}
    report("chaos", options, figures, machine, chaos_lines(figures))
    return 0


def _check(options: ChaosOptions) -> float:
    """Check the options; return the seconds between two faults."""
    check_within("--islands", options.islands, FEWEST_ISLANDS, MOST_ISLANDS)
    for name, minutes in (("--minutes", options.minutes), ("--quiet-minutes", options.quiet_minutes)):
        if minutes is not None:
            check_positive(minutes, name, "30")
    if not (math.isfinite(options.round_seconds) and options.round_seconds >= 1.0):
        raise ConfigError(f"--round-seconds is {options.round_seconds:g}; expected at least 1")
    check_target(options.json)
    return parse_seconds(options.every, "--every")


def _network(islands: int, ends: ExitStack) -> StarNetwork | None:
    try:
        return ends.enter_context(StarNetwork(islands + 1))
    except ConfigError:
        return None


def _has_disks() -> bool:
    with tempfile.TemporaryDirectory() as folder, Disks() as disks:
        disks.make(Path(folder) / "probe")
        return disks.are_own


def measure_step() -> float:
    """Return the processor time of an inner step of the model that islands train."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        key = SigningKey(bytes(32))
        drafted = ChaosPlan(islands=2, seconds=60.0, round_seconds=2.0, step_seconds=1.0, start_seconds=0.0)
        plan = plan_run(drafted.manifest(key.peer, float(int(time.time()))))
        stream = open_stream(open_run_text(plan.manifest.data, None), plan, key.peer, 1)
        loop = InnerLoop(build_model(plan.shape, plan.manifest.model.seed), stream, plan.inner, torch.device("cpu"))
        taken = []
        for _ in range(_WARM_STEPS + _TIMED_STEPS):
            began = time.process_time()
            loop.step()
            taken.append(time.process_time() - began)
    finally:
        torch.set_num_threads(threads)
    return median(taken[_WARM_STEPS:])


def chaos_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the printed figures."""
    rows = [
        ("bytes equal at the end", "yes" if figures["heads_equal"] else "no"),
        ("tokens in entries, per living island", f"{figures['throughput_kept']:.1%} of the play without faults"),
        ("tokens in entries, in total", f"{figures['throughput_kept_total']:.1%}"),
        ("island time alive", f"{figures['living_share']:.1%}"),
        ("participation", f"{figures['participation']:.1%} (without faults {figures['quiet_participation']:.1%})"),
        ("longest time without an entry", f"{figures['longest_gap_seconds']:.1f} s"),
        ("  while a majority of islands ran", f"{figures['longest_gap_with_majority_seconds']:.1f} s"),
        ("next entry after a kill, at most", _seconds(figures["next_entry_seconds_max"])),
        ("restart to included, median", f"{_seconds(figures['rejoin_seconds_median'])} of {_count(figures)} restarts"),
        ("memory of an island never killed", _slope(figures["rss_slope_mib_per_hour"])),
        ("machine used without faults", f"{figures['machine_share']:.0%}"),
        ("faults", str(figures["faults"])),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    lines += [f"not at the last round: {', '.join(figures['unfinished'])}"] if figures["unfinished"] else []
    lines += [f"left behind: {', '.join(figures['left_behind'])}"] if figures["left_behind"] else []
    return [*lines, *(f"unexpected: {surprise}" for surprise in figures["surprises"])]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _slope(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1f} MiB per hour"


def _count(figures: Mapping[str, Any]) -> int:
    rejoins: Sequence[float] = figures["rejoin_seconds"]
    return len(rejoins)
