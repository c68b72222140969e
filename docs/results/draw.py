"""Draws the figures of docs/exploring.md from docs/results/outcomes.jsonl, and writes docs/results/tables.md.

    make results

Nothing is trained here: trials that are not kept are left out, and rows without any trial do not appear, nor tables of
fewer than two rows. Trials are found by the text they were played with, the source of one Python's standard library:
with another Python none is found, and nothing is written.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from p2p_diloco.training.data import open_corpus
from p2p_diloco.training.inner_loop import OptimizerName
from research.experiments import EXPERIMENTS, experiment_named
from research.intervals import paired_gap
from research.kept import KeptOutcomes
from research.learners import shape_named
from research.scope import Scope
from research.setting import OURS, Outcome, Setting
from research.wall_clock import tick_seconds, ticks_to_loss

HERE = Path(__file__).parent
RATES = (20, 100, 1000)
MOST_SEEDS = 32
FEWEST_ROWS = 2
OPTIMIZERS: tuple[OptimizerName, ...] = ("muon", "adamw")
"""The first is what `experiment` has inside where nothing is said."""
BESIDE: tuple[tuple[str, str, Scope], ...] = (
    *(("radial", f"--size micro --islands {islands}", Scope(size="micro", islands=islands)) for islands in (2, 8, 16)),
    ("outer", "--size micro --sync-every 8", Scope(size="micro", sync_every=8)),
    *(
        (name, f"--size micro{words} --inner-rate {rate:g}", Scope(size="micro", sync_every=steps, inner_rate=rate))
        for rate in (2.26e-2, 3.2e-2)
        for name, words, steps in (("outer", " --sync-every 8", 8), ("parity", "", 32))
    ),
    *(
        (name, f"--size micro --steps 1920 --inner-rate {rate:g}", scope)
        for rate in (1e-3, 4e-3, 8e-3)
        for scope in (Scope(size="micro", ticks=1920, inner_rate=rate),)
        for name in ("outer", "parity")
    ),
    *(("parity", f"--size small --inner-rate {rate:g}", Scope(size="small", inner_rate=rate)) for rate in (2e-3, 8e-3)),
    ("parity", "--steps 1152 --optimizer adamw", Scope(ticks=1152, optimizer="adamw")),
)
"""What was asked in other circumstances than the usual ones: the experiment, its options, what they mean."""
Trials = dict[Setting, list[Outcome]]


def kept_trials(name: str, scope: Scope) -> Trials:
    """Return what is kept of an experiment, row by row, seeds in order."""
    kept = KeptOutcomes(HERE / "outcomes.jsonl", open_corpus(None).fingerprint)
    trials: Trials = {}
    for setting in experiment_named(name, scope).settings:
        found = [outcome for seed in range(MOST_SEEDS) if (outcome := kept.find(setting, seed)) is not None]
        if found:
            trials[setting] = found
    return trials


def gap_lines(trials: Trials) -> list[str]:
    """Return a table in Markdown: loss, bytes, and the gap of the first row to each other one."""
    (ours, first), *_ = trials.items()
    lines = [f"| | seeds | loss | bytes sent per parameter | gap of {ours.name} to it |", "|---|---|---|---|---|"]
    for setting, outcomes in trials.items():
        seeds = {outcome.seed for outcome in first} & {outcome.seed for outcome in outcomes}
        loss = fmean(outcome.loss for outcome in outcomes)
        sent = fmean(outcome.bytes_sent_per_parameter for outcome in outcomes)
        gap = "" if outcomes is first or not seeds else _gap(_of(first, seeds), _of(outcomes, seeds))
        gap += f" ({len(seeds)} of them)" if gap and len(seeds) < max(len(first), len(outcomes)) else ""
        lines.append(f"| {setting.name} | {len(outcomes)} | {loss:.4f} | {sent:,.2f} | {gap} |")
    return lines


def mean_curves(trials: Trials) -> dict[Setting, Outcome]:
    """Return each row's first outcome with the mean curve of the seeds that all have; rows with few have none."""
    fewest = len(next(iter(trials.values()))) / 2
    trials = {setting: outcomes for setting, outcomes in trials.items() if len(outcomes) >= fewest}
    common = set.intersection(*({outcome.seed for outcome in outcomes} for outcomes in trials.values()))
    means = {}
    for setting, outcomes in trials.items():
        curves = [outcome.curve for outcome in _of(outcomes, common)]
        points = tuple((points[0][0], fmean(loss for _, loss in points)) for points in zip(*curves, strict=True))
        means[setting] = replace(outcomes[0], curve=points)
    return means


def time_lines(trials: Trials, step_seconds: float) -> list[str]:
    """Return a table in Markdown: seconds to the loss that p2p-diloco ends with, at some rates of an island's line."""
    curves = mean_curves(trials)
    ours, *_ = curves.values()
    goal = ours.curve[-1][1]
    lines = [f"Loss {goal:.3f}:", "", "| | " + " | ".join(f"{rate} Mbit/s" for rate in RATES) + " |"]
    lines.append("|---" * (len(RATES) + 1) + "|")
    for setting, outcome in curves.items():
        ticks = ticks_to_loss(outcome, goal)
        seconds = [_tick_seconds(rate, step_seconds, setting, outcome) for rate in RATES]
        words = [f"{ticks * one:,.0f} s" if ticks is not None else "not reached" for one in seconds]
        lines.append(f"| {setting.name} | " + " | ".join(words) + " |")
    return lines


def draw_curves(trials: Trials, step_seconds: float, to: Path) -> None:
    """Draw loss over tokens, over bytes, and over wall time at each rate."""
    figure, axes = plt.subplots(1, 2 + len(RATES), figsize=(4 * (2 + len(RATES)), 3.6), sharey=True)
    panels: list[tuple[str, Callable[[Setting, Outcome], float]]] = [
        ("tokens of all islands", lambda setting, outcome: outcome.tokens / setting.ticks),
        (
            "bytes sent per parameter and island",
            lambda setting, outcome: outcome.bytes_sent_per_parameter / setting.ticks,
        ),
        *((f"seconds at {rate} Mbit/s", partial(_tick_seconds, rate, step_seconds)) for rate in RATES),
    ]
    for axis, (label, per_tick) in zip(axes, panels, strict=True):
        for setting, outcome in mean_curves(trials).items():
            each = per_tick(setting, outcome)
            axis.plot(
                [tick * each for tick, _ in outcome.curve], [loss for _, loss in outcome.curve], label=setting.name
            )
        axis.set_xlabel(label)
        axis.set_xscale("linear" if label.startswith("tokens") else "log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out loss, nats per byte")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})
    plt.close(figure)


def _tick_seconds(rate: int, step_seconds: float, setting: Setting, outcome: Outcome) -> float:
    parameters = shape_named(setting.size).num_parameters
    return tick_seconds(setting, outcome, parameters=parameters, step_seconds=step_seconds, bits_per_second=rate * 1e6)


def _of(outcomes: Sequence[Outcome], seeds: set[int]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.seed in seeds]


def _gap(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> str:
    gap = paired_gap(ours, theirs)
    width = f" ± {100 * gap.half_width:.2f}" if gap.half_width is not None else ""
    return f"{100 * gap.mean:+.2f}{width} %"


def main() -> None:
    """Draw all there is, and write its tables."""
    mpl.rcParams.update({"svg.hashsalt": "p2p_diloco", "svg.fonttype": "none"})
    text = open_corpus(None).fingerprint.hex()
    lines = [
        "# Tables of the bench of learning",
        "",
        "Written by `make results` from the trials in `outcomes.jsonl`. Gaps are of paired seeds: of all",
        "that both rows have, or of as many as stand beside them.",
        "",
        f"The text is the source of Python {platform.python_version()}'s standard library, SHA-256 `{text[:16]}…`;",
        "another Python's is another text, with other losses.",
    ]
    found = len(lines)
    for optimizer in OPTIMIZERS:
        for size in ("small", "tiny", "micro"):
            for islands in (4, 8, 16):
                lines += _parity(Scope(size=size, islands=islands, optimizer=optimizer))
    for name in sorted(EXPERIMENTS.keys() - {"parity"}):
        for optimizer in OPTIMIZERS if name != "inner" else OPTIMIZERS[:1]:
            for size in ("micro", "tiny"):
                options = f"--size {size}{_words(optimizer)}"
                lines += _table(name, options, Scope(size=size, optimizer=optimizer), fewest_rows=FEWEST_ROWS)
    for name, options, scope in BESIDE:
        lines += _table(name, options, scope)
    if len(lines) == found:
        raise SystemExit(
            f"outcomes.jsonl has no trial with this Python's library as text ({text[:16]}…): it was another Python's"
        )
    (HERE / "tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(name: str, options: str, scope: Scope, fewest_rows: int = 1) -> list[str]:
    trials = kept_trials(name, scope)
    if len(trials) < fewest_rows:
        return []
    command = f"`python -m research {name} {options}`"
    return ["", f"## {name}, {options}", "", command, "", *gap_lines(trials)]


def _words(optimizer: OptimizerName) -> str:
    return "" if optimizer == OPTIMIZERS[0] else f" --optimizer {optimizer}"


def _parity(scope: Scope) -> list[str]:
    trials = kept_trials("parity", scope)
    if not {OURS, "data-parallel"} <= {setting.system for setting in trials}:
        return []
    (setting, ours), *_ = trials.items()
    step_seconds = fmean(outcome.seconds for outcome in ours) / (setting.ticks * setting.islands)
    size = "" if scope.size == Scope().size else f" --size {scope.size}"
    name = "-".join(["parity", str(scope.islands), *(size.split()[1:]), *_words(scope.optimizer).split()[1:]])
    draw_curves(trials, step_seconds, HERE / f"{name}.svg")
    options = f"--islands {scope.islands}{size}{_words(scope.optimizer)}"
    return [
        "",
        f"## parity, {scope.size} model, {scope.islands} islands, {scope.optimizer}",
        "",
        f"`python -m research parity {options}`; ![curves]({name}.svg)",
        "",
        *gap_lines(trials),
        "",
        f"A step takes {1e3 * step_seconds:.0f} ms of a core. Seconds to the last loss of {setting.name}'s curve,",
        "which is judged by a quarter of the held-out text, and before what is under way after the last step has come:",
        "",
        *time_lines(trials, step_seconds),
    ]


if __name__ == "__main__":
    main()
