"""`p2p-diloco simulate swarm`: plays simulated swarms and reports which invariants were violated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.errors import ConfigError
from p2p_diloco.testing.campaign import CampaignPlan, CampaignResult, run_campaign
from p2p_diloco.testing.command import MOST_SKIPPED_SHARE, peers_named
from p2p_diloco.testing.mistakes import MISTAKES
from p2p_diloco.testing.trial import TrialResult
from p2p_diloco.testing.troubles import kinds_named

MOST_SHOWN = 3
"""Traces of failing seeds that are printed; the numbers of all are."""
BROKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """As typed.

    Attributes:
        peers: `3..64`, or one number.
        kinds: of trouble: `default`, `open`, `all`, `none`, or words with commas.
        seed: play this one alone, with its trace; None: `seeds` of them from `first_seed` on.
        json: file for the figures, `-` for standard output.
        plant: a mistake to plant, or None.
    """

    peers: str
    seeds: int
    first_seed: int
    kinds: str
    seed: int | None
    json: str | None
    plant: str | None


def run_simulation(options: SimulateOptions) -> int:
    """Play, print, and return the exit code: 0 when all promises held, 1 otherwise.

    Raises:
        ConfigError: an option that means nothing.
    """
    plan = CampaignPlan(
        peers=peers_named(options.peers), kinds=kinds_named(options.kinds), mistake=mistake_named(options.plant)
    )
    if options.seeds < 1:
        raise ConfigError(f"--seeds is {options.seeds}; expected at least 1")
    if options.first_seed < 0:
        raise ConfigError(f"--first-seed is {options.first_seed}; expected 0 or more")
    check_target(options.json)
    first = options.first_seed
    seeds: Sequence[int] = range(first, first + options.seeds) if options.seed is None else [options.seed]
    result = run_campaign(plan, seeds, processes=1 if options.seed is not None else None)
    quiet = options.json == STANDARD_OUTPUT
    for failing in result.failing[:MOST_SHOWN]:
        _explain(plan.play(failing.seed, with_trace=True), options, sys.stderr if quiet else sys.stdout)
    write_figures(options.json, _figures(result))
    if not quiet:
        print(_summary(result))
    return BROKEN if result.failing or result.skipped_share > MOST_SKIPPED_SHARE else 0


def mistake_named(text: str | None) -> str | None:
    """Return the name of a mistake to plant.

    Raises:
        ConfigError: there is none of that name.
    """
    if text is not None and text not in MISTAKES:
        raise ConfigError(f"--plant names {text!r}; expected one of {', '.join(MISTAKES)}")
    return text


def _explain(result: TrialResult, options: SimulateOptions, stream: TextIO) -> None:
    plant = f" --plant {options.plant}" if options.plant is not None else ""
    replay = f"p2p-diloco simulate swarm --peers {options.peers} --kinds {options.kinds}{plant} --seed {result.seed}"
    lines = [f"seed {result.seed}, {result.num_peers} peers: {result.text}", *result.tail, f"replay: {replay}", ""]
    print("\n".join(lines), file=stream)


def _figures(result: CampaignResult) -> dict[str, Any]:
    return {
        "seeds": result.seeds,
        "violations": len(result.failing),
        "failing_seeds": [failing.seed for failing in result.failing],
        "checks": result.checks,
        "skipped_checks": result.skipped,
        "seconds": round(result.seconds, 2),
    }


def _summary(result: CampaignResult) -> str:
    seeds = f"{result.seeds} seeds" if result.seeds != 1 else "1 seed"
    if not result.failing:
        return f"{seeds} in {result.seconds:.1f} s: every promise held"
    numbers = ", ".join(str(failing.seed) for failing in result.failing[:20])
    more = ", …" if len(result.failing) > 20 else ""
    return f"{seeds} in {result.seconds:.1f} s: {len(result.failing)} broke a promise: {numbers}{more}"
