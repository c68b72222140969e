"""`p2p-diloco simulate swarm`: plays simulated disasters and says which promises of the protocol they broke."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.errors import ConfigError
from p2p_diloco.lab.campaign import CampaignPlan, CampaignResult, run_campaign
from p2p_diloco.lab.faults import faults_named
from p2p_diloco.lab.mistakes import Mistake
from p2p_diloco.lab.trial import TrialResult

FEWEST_PEERS, MOST_PEERS = 1, 512
MOST_SHOWN = 3
"""Traces of failing seeds that are printed; the numbers of all are."""
BROKEN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """As typed.

    Attributes:
        peers: `3..64`, or one number.
        faults: `all`, `none`, or words with commas.
        seed: play this one alone, with its trace; None: `seeds` of them from `first_seed` on.
        json: file for the figures, `-` for standard output.
        plant: a mistake to plant, or None.
    """

    peers: str
    seeds: int
    first_seed: int
    faults: str
    seed: int | None
    json: str | None
    plant: str | None


def run_simulation(options: SimulateOptions) -> int:
    """Play, print, and return the exit code: 0 when all promises held, 1 otherwise.

    Raises:
        ConfigError: an option that means nothing.
    """
    plan = CampaignPlan(
        peers=peers_named(options.peers), faults=faults_named(options.faults), mistake=mistake_named(options.plant)
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
    return BROKEN if result.failing else 0


def peers_named(text: str) -> tuple[int, int]:
    """Read `3..64` or `8`.

    Raises:
        ConfigError: it is neither, or out of bounds.
    """
    words = text.split("..")
    if not (1 <= len(words) <= 2 and all(word.strip().isdigit() for word in words)):
        raise ConfigError(f"--peers is {text!r}; expected two numbers like 3..64, or one")
    fewest, most = int(words[0]), int(words[-1])
    if not FEWEST_PEERS <= fewest <= most <= MOST_PEERS:
        raise ConfigError(f"--peers is {text!r}; expected {FEWEST_PEERS} to {MOST_PEERS}, the smaller number first")
    return fewest, most


def mistake_named(text: str | None) -> Mistake | None:
    """Read the name of a mistake to plant.

    Raises:
        ConfigError: there is none of that name.
    """
    if text is None:
        return None
    known = {mistake.value: mistake for mistake in Mistake}
    if text not in known:
        raise ConfigError(f"--plant names {text!r}; expected one of {', '.join(known)}")
    return known[text]


def _explain(result: TrialResult, options: SimulateOptions, stream: TextIO) -> None:
    plant = f" --plant {options.plant}" if options.plant is not None else ""
    replay = f"p2p-diloco simulate swarm --peers {options.peers} --faults {options.faults}{plant} --seed {result.seed}"
    lines = [f"seed {result.seed}, {result.num_peers} peers: {result.text}", *result.trace, f"replay: {replay}", ""]
    print("\n".join(lines), file=stream)


def _figures(result: CampaignResult) -> dict[str, Any]:
    return {
        "seeds": result.seeds,
        "violations": result.violations,
        "failing_seeds": [failing.seed for failing in result.failing],
        "seconds": round(result.seconds, 2),
    }


def _summary(result: CampaignResult) -> str:
    seeds = f"{result.seeds} seeds" if result.seeds != 1 else "1 seed"
    if not result.failing:
        return f"{seeds} in {result.seconds:.1f} s: every promise held"
    numbers = ", ".join(str(failing.seed) for failing in result.failing[:20])
    more = ", …" if len(result.failing) > 20 else ""
    return f"{seeds} in {result.seconds:.1f} s: {result.violations} broke a promise: {numbers}{more}"
