"""The simulator's command line.

`swarm` runs seeds. `mistakes` plants mistakes and reports whether they are caught. `crashes` kills and stops a peer at
every step of a round. `scale` measures the cost of a cycle as a swarm grows. `split` cuts a swarm in two and measures
how it heals. `rosters` measures what the rosters of a long run cost a joiner.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from p2p_diloco.errors import ConfigError
from p2p_diloco.rate import count_named
from simulator.campaign import CampaignPlan, first_catch, run_campaign
from simulator.cores import end_with_parent, usable_cores
from simulator.crashes import MATRIX, CellResult, Role, Step, cells, run_crashes
from simulator.failpoints import Kind
from simulator.inspector import Violated
from simulator.mistakes import MISTAKES
from simulator.roster_cost import RosterCost, RosterPlan, measure_rosters
from simulator.scale import MEASURED_CYCLES, ScalePlan, measure
from simulator.scenario import draw_scenario
from simulator.split import play_split, splits_of
from simulator.trial import TrialResult
from simulator.troubles import KINDS, kinds_named

FEWEST_PEERS, MOST_PEERS = 1, 512
MOST_AT_SCALE = 1024
MOST_SHOWN = 3
"""Maximum number of failing seeds whose traces are printed; others are listed by number."""
MOST_SKIPPED_SHARE = 0.05
MOST_SEEDS_PER_MISTAKE = 60
PEERS_PER_MISTAKE = (3, 8)
FEWEST_CYCLES_BETWEEN = 8
"""Minimum of `--every`: members must come to count before they leave."""
MOST_ROSTER_BYTES, MOST_JOIN_SECONDS = 20e6, 5.0
BROKEN = 1


def main(arguments: Sequence[str]) -> int:
    """Run a command; return 0 if everything held, 1 if something was violated, 2 for an invalid option."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    swarm = commands.add_parser("swarm", help="run seeds and report which invariants were violated")
    swarm.add_argument("--peers", default="3..12", help="minimum..maximum, or one number (default: %(default)s)")
    swarm.add_argument("--seeds", type=int, default=40, help="number of seeds (default: %(default)s)")
    swarm.add_argument("--first-seed", type=int, default=0, help="first seed (default: %(default)s)")
    swarm.add_argument("--seed", type=int, help="run only this seed, and print its scenario")
    swarm.add_argument("--trace", action="store_true", help="with --seed: print everything that happened")
    swarm.add_argument("--kinds", default="all", help=f"kinds of trouble: all, none, or some of {', '.join(KINDS)}")
    swarm.add_argument("--plant", help="mistake to plant; see the command `mistakes`")
    swarm.add_argument("--json", action="store_true", help="print the figures as JSON")
    swarm.set_defaults(run=_swarm)
    mistakes = commands.add_parser("mistakes", help="plant mistakes and report whether they are caught")
    mistakes.add_argument("names", nargs="*", help=f"mistakes to plant (default: all): {', '.join(MISTAKES)}")
    mistakes.add_argument("--json", action="store_true", help="print the figures as JSON")
    mistakes.set_defaults(run=_mistakes)
    crashes = commands.add_parser("crashes", help="kill and stop a peer at every step of a round, and print the matrix")
    crashes.add_argument("--only", default="", help="play only the cells whose names contain this text")
    crashes.add_argument("--seeds", type=int, default=1, help="number of seeds for each cell (default: %(default)s)")
    crashes.add_argument("--first-seed", type=int, default=1, help="first seed (default: %(default)s)")
    crashes.add_argument("--json", action="store_true", help="print the figures as JSON")
    crashes.set_defaults(run=_crashes)
    scale = commands.add_parser("scale", help="measure the cost of a cycle as a swarm grows; fails if replicas differ")
    scale.add_argument("--peers", default="8,64,256", help="comma-separated sizes (default: %(default)s)")
    scale.add_argument(
        "--parameters", default="100M", help="size of the model whose bytes are counted (default: %(default)s)"
    )
    scale.add_argument("--dial-out-only", type=float, default=0.0, help="share of peers that accept no connections")
    scale.add_argument("--cycles", type=int, default=MEASURED_CYCLES, help="cycles to measure (default: %(default)s)")
    scale.add_argument(
        "--newcomer-reaches", type=int, default=0, help="add a newcomer that can reach only this many members"
    )
    scale.add_argument("--seed", type=int, default=0, help="seed of the random delays")
    scale.add_argument("--json", action="store_true", help="print the figures as JSON")
    scale.set_defaults(run=_scale)
    split = commands.add_parser("split", help="cut a swarm in two, in three ways; fails if it does not heal in time")
    split.add_argument("--peers", type=int, default=64, help="number of peers in the swarm (default: %(default)s)")
    split.add_argument("--seed", type=int, default=0, help="seed of the random sides")
    split.add_argument("--json", action="store_true", help="print the figures as JSON")
    split.set_defaults(run=_split)
    rosters = commands.add_parser(
        "rosters",
        help=f"measure what the rosters of a long run cost a joiner; fails above {MOST_ROSTER_BYTES / 1e6:.0f} MB on "
        f"disk or {MOST_JOIN_SECONDS:.0f} s of CPU",
    )
    rosters.add_argument("--members", type=int, default=200, help="number of members (default: %(default)s)")
    rosters.add_argument(
        "--every", type=int, default=30, help="each member leaves once in this many cycles (default: %(default)s)"
    )
    rosters.add_argument("--cycles", type=int, default=1000, help="number of cycles (default: %(default)s)")
    rosters.add_argument("--json", action="store_true", help="print the figures as JSON")
    rosters.set_defaults(run=_rosters)
    return parser


def peers_named(text: str) -> tuple[int, int]:
    """Parse `3..64` or `8`.

    Raises:
        ConfigError: the text is neither, or a number is out of bounds.
    """
    words = text.split("..")
    if not (1 <= len(words) <= 2 and all(word.strip().isdigit() for word in words)):
        raise ConfigError(f"--peers is {text!r}; expected two numbers like 3..64, or one")
    fewest, most = int(words[0]), int(words[-1])
    if not FEWEST_PEERS <= fewest <= most <= MOST_PEERS:
        raise ConfigError(f"--peers is {text!r}; expected {FEWEST_PEERS} to {MOST_PEERS}, the smaller number first")
    return fewest, most


def _named_mistake(name: str) -> str:
    if name not in MISTAKES:
        raise ConfigError(f"no mistake is called {name!r}; expected one of {', '.join(MISTAKES)}")
    return name


def _swarm(options: argparse.Namespace) -> int:
    if options.seeds < 1:
        raise ConfigError(f"--seeds is {options.seeds}; expected at least 1")
    if options.first_seed < 0:
        raise ConfigError(f"--first-seed is {options.first_seed}; expected 0 or more")
    plan = CampaignPlan(
        peers=peers_named(options.peers),
        kinds=kinds_named(options.kinds),
        mistake=_named_mistake(options.plant) if options.plant is not None else None,
    )
    if options.seed is not None:
        return _one_seed(plan, options)
    result = run_campaign(plan, range(options.first_seed, options.first_seed + options.seeds))
    is_broken = bool(result.failing) or result.skipped_share > MOST_SKIPPED_SHARE
    figures: dict[str, Any] = {
        "seeds": result.seeds,
        "violations": len(result.failing),
        "failing_seeds": [failing.seed for failing in result.failing],
        "checks": result.checks,
        "skipped_checks": result.skipped,
        "seconds": round(result.seconds, 2),
    }
    if options.json:
        print(json.dumps(figures, indent=1))
        return BROKEN if is_broken else 0
    for failing in result.failing[:MOST_SHOWN]:
        print("\n".join([*_explained(plan.play(failing.seed, with_trace=True), options), ""]))
    numbers = ", ".join(str(failing.seed) for failing in result.failing[:20])
    verdict = f"{len(result.failing)} violated an invariant: {numbers}" if result.failing else "every invariant held"
    skipped = f"{result.skipped} of {result.checks} checks skipped ({result.skipped_share:.1%})"
    print(f"{result.seeds} seeds in {result.seconds:.1f} s: {verdict}; {skipped}")
    return BROKEN if is_broken else 0


def _one_seed(plan: CampaignPlan, options: argparse.Namespace) -> int:
    result = plan.play(options.seed, with_trace=options.trace)
    if options.json:
        print(json.dumps({"seed": result.seed, "invariant": result.invariant, "digest": result.digest}, indent=1))
    else:
        print(draw_scenario(options.seed, plan.peers, plan.kinds).describe())
        print("\n".join(_explained(result, options)))
    return BROKEN if result.invariant is not None else 0


def _explained(result: TrialResult, options: argparse.Namespace) -> list[str]:
    plant = f" --plant {options.plant}" if options.plant is not None else ""
    replay = f"--peers {options.peers} --kinds {options.kinds}{plant} --seed {result.seed} --trace"
    said = result.text or f"every invariant held; {result.num_entries} entries, {result.checks} checks"
    return [
        *(result.trace if options.trace else result.tail),
        f"seed {result.seed}, {result.num_peers} peers: {said}",
        f"digest {result.digest}",
        f"replay: python -m simulator swarm {replay}",
    ]


def _mistakes(options: argparse.Namespace) -> int:
    names = [_named_mistake(name) for name in options.names] or list(MISTAKES)
    with ProcessPoolExecutor(min(usable_cores(), len(names)), initializer=end_with_parent) as pool:
        results = dict(zip(names, pool.map(catch, names), strict=True))
    missed = [name for name, result in results.items() if not is_caught(name, result)]
    if options.json:
        seeds = {name: result.seed if result is not None else None for name, result in results.items()}
        print(json.dumps({"mistakes": len(names), "missed": missed, "caught_at_seed": seeds}, indent=1))
        return BROKEN if missed else 0
    for name, result in results.items():
        found = f"seed {result.seed}: {result.text.splitlines()[0]}" if result is not None else "not caught"
        print(f"{name:26} {found}")
    print(
        f"{len(names) - len(missed)} of {len(names)} mistakes caught" + (f"; not {', '.join(missed)}" if missed else "")
    )
    return BROKEN if missed else 0


def catch(name: str, first: int = 0) -> TrialResult | None:
    """Plant a mistake in one seed after another; return the result that caught it, or None.

    Args:
        first: first seed; the others follow in order.
    """
    plan = CampaignPlan(peers=PEERS_PER_MISTAKE, kinds=kinds_named(MISTAKES[name].kinds), mistake=name)
    return first_catch(plan, [first, *(seed for seed in range(MOST_SEEDS_PER_MISTAKE) if seed != first)])


def is_caught(name: str, result: TrialResult | None) -> bool:
    """Return whether a mistake was caught by an invariant that it breaks."""
    return result is not None and result.invariant in MISTAKES[name].caught_by


def _crashes(options: argparse.Namespace) -> int:
    if options.seeds < 1:
        raise ConfigError(f"--seeds is {options.seeds}; expected at least 1")
    if options.first_seed < 0:
        raise ConfigError(f"--first-seed is {options.first_seed}; expected 0 or more")
    chosen = [cell for cell in cells() if options.only in str(cell)]
    if not chosen:
        raise ConfigError(f"no cell's name contains {options.only!r}; a name is like {str(next(cells()))!r}")
    began = time.monotonic()
    results = run_crashes(chosen, range(options.first_seed, options.first_seed + options.seeds))
    failing = [result for result in results if result.failure is not None]
    figures: dict[str, Any] = {
        "cells": len(chosen),
        "plays": len(results),
        "failing": [f"{result.cell}, seed {result.seed}: {result.failure}" for result in failing],
        "longest_gap_cycles": max(result.gap_cycles for result in results),
        "most_return_rounds": max(result.return_rounds for result in results),
        "seconds": round(time.monotonic() - began, 2),
    }
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n".join(_matrix_lines(results)))
        for result in failing:
            print(f"{result.cell}, seed {result.seed}: {result.failure}")
            print(f'replay: python -m simulator crashes --only "{result.cell}" --first-seed {result.seed}')
        print(
            f"{len(results) - len(failing)} of {len(results)} plays of {len(chosen)} cells held in "
            f"{figures['seconds']:.1f} s; a span went without an entry for at most {figures['longest_gap_cycles']} "
            f"cycles; peers were back within {figures['most_return_rounds']} rounds"
        )
    return BROKEN if failing else 0


def _matrix_lines(results: Sequence[CellResult]) -> list[str]:
    """Return the matrix: plays that held, by step and role, killed and stopped; then why some fields are empty."""
    width = 2 + max(len(role.value) for role in Role)
    lines = ["killed + stopped".ljust(18) + "".join(role.value.ljust(width) for role in Role)]
    for step in Step:
        fields = [_field(results, step, role) for role in Role]
        lines.append(step.value.ljust(18) + "".join(text.ljust(width) for text in fields).rstrip())
    reasons: dict[str, list[str]] = {}
    for (step, role), case in MATRIX.items():
        if isinstance(case, str):
            reasons.setdefault(case, []).append(f"{role.value} at {step.value}")
    return [*lines, "", "No case (-):", *(f"- {', '.join(where)}: {reason}" for reason, where in reasons.items()), ""]


def _field(results: Sequence[CellResult], step: Step, role: Role) -> str:
    if isinstance(MATRIX[step, role], str):
        return "-"
    here = [result for result in results if (result.cell.step, result.cell.role) == (step, role)]
    if not here:
        return "not played"
    counts = []
    for kind in Kind:
        plays = [result for result in here if result.cell.kind is kind]
        held = sum(result.failure is None for result in plays)
        counts.append(str(held) if held == len(plays) else f"{held}/{len(plays)}")
    return " + ".join(counts)


def _scale(options: argparse.Namespace) -> int:
    sizes = sizes_named(options.peers)
    if not 0.0 <= options.dial_out_only <= 1.0:
        raise ConfigError(f"--dial-out-only is {options.dial_out_only}; expected a share from 0 to 1")
    if options.cycles < 1:
        raise ConfigError(f"--cycles is {options.cycles}; expected at least 1")
    most_open = min(size - round(options.dial_out_only * size) for size in sizes)
    if not 0 <= options.newcomer_reaches <= most_open:
        asked = options.newcomer_reaches
        raise ConfigError(f"--newcomer-reaches is {asked}; expected 0 to {most_open}, the peers that can be dialled")
    plans = [
        ScalePlan(
            peers=size,
            dial_out_only=options.dial_out_only,
            seed=options.seed,
            parameters=count_named(options.parameters),
            cycles=options.cycles,
            newcomer_reaches=options.newcomer_reaches,
        )
        for size in sizes
    ]
    return _print_rows([partial(measure, plan) for plan in plans], lambda row: row.replicas_equal, options)


def sizes_named(text: str) -> list[int]:
    """Parse `8,64,256`.

    Raises:
        ConfigError: the text is something else, or a size is out of bounds.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and 2 <= int(word) <= MOST_AT_SCALE for word in words):
        raise ConfigError(f"--peers is {text!r}; expected numbers from 2 to {MOST_AT_SCALE} with commas between them")
    return [int(word) for word in words]


def _split(options: argparse.Namespace) -> int:
    if not 4 <= options.peers <= MOST_AT_SCALE:
        raise ConfigError(f"--peers is {options.peers}; expected 4 to {MOST_AT_SCALE}")
    plans = splits_of(options.peers, options.seed)
    return _print_rows([partial(play_split, plan) for plan in plans], lambda row: row.kept_its_promise, options)


def _rosters(options: argparse.Namespace) -> int:
    if not 4 <= options.members <= MOST_AT_SCALE:
        raise ConfigError(f"--members is {options.members}; expected 4 to {MOST_AT_SCALE}")
    if options.every < FEWEST_CYCLES_BETWEEN or options.cycles < 1:
        raise ConfigError(
            f"--every is {options.every} and --cycles {options.cycles}; expected at least {FEWEST_CYCLES_BETWEEN} and 1"
        )
    plan = RosterPlan(members=options.members, every=options.every, cycles=options.cycles)

    def play() -> RosterCost:
        with tempfile.TemporaryDirectory() as folder:
            return measure_rosters(plan, Path(folder))

    return _print_rows([play], lambda cost: cost.is_within(MOST_ROSTER_BYTES, MOST_JOIN_SECONDS), options)


def _print_rows(plays: Sequence[Callable[[], Any]], is_good: Callable[[Any], bool], options: argparse.Namespace) -> int:
    """Run the plays, print a row for each, and return the exit code."""
    rows = []
    for play in plays:
        try:
            rows.append(play())
        except Violated as violated:
            print(f"an invariant was violated: {violated}", file=sys.stderr)
            return BROKEN
        figures = dataclasses.asdict(rows[-1]).items()
        if not options.json:
            print(
                ", ".join(f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in figures)
            )
    if options.json:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
    return 0 if all(map(is_good, rows)) else BROKEN
