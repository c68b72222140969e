"""Writes tables.md and its plots from the figures that a folder keeps; this folder, unless another is named.

    python benchmarks/figures/draw.py benchmarks/figures

Nothing is measured here. What is not kept is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.averaging.systems import GLOO, HIVEMIND_FLOAT16, HIVEMIND_FLOAT32, OURS
from benchmarks.footprint.figures import GOAL_BYTES_PER_PARAMETER, GOAL_CONSTANT_BYTES, MIB
from benchmarks.goodput.figures import CHIPS
from benchmarks.goodput.model import DILOCO, OURS_AS_CLAIMED
from benchmarks.kept_figures import Kept, read_kept
from benchmarks.tables import (
    NAMES,
    exchange_of_as_many,
    peers_by_parameters,
    performance_lines,
    vector_parts,
)
from benchmarks.training.figures import BLOCKING, TORCHFT

HERE = Path(__file__).parent
COLOURS = {
    OURS: "tab:blue",
    HIVEMIND_FLOAT16: "tab:orange",
    HIVEMIND_FLOAT32: "tab:red",
    GLOO: "tab:green",
    BLOCKING: "tab:orange",
    TORCHFT: "tab:green",
}
CURVES = {DILOCO: "o-", OURS: "o-", OURS_AS_CLAIMED: "o--"}
RATIOS = (("wall_seconds", "wall"), ("cpu_ns_per_parameter_per_peer", "CPU, all processes"))


def draw_averaging(documents: Sequence[Kept], kept: Sequence[Kept]) -> Figure:
    """Draw wall and CPU of each opponent as a multiple of ours, with quartiles."""
    figure, axes = plt.subplots(1, len(RATIOS), figsize=(9, 3.6), sharey=True)
    settings = [peers_by_parameters(one.figures) for one in documents]
    found = {system for one in documents for system in one.figures["ratios"]}
    systems = [system for system in COLOURS if system in found]
    for axis, (name, label) in zip(axes, RATIOS, strict=True):
        for place, system in enumerate(systems):
            rows = [
                (at, one.figures["ratios"][system][name])
                for at, one in enumerate(documents)
                if system in one.figures["ratios"]
            ]
            _points(axis, [at + _beside(place, len(systems)) for at, _ in rows], [row for _, row in rows], system)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xticks(range(len(settings)), settings)
        axis.set_xlim(-0.5, len(settings) - 0.5)
        axis.set_xlabel("peers x parameters")
        axis.set_title(label, fontsize=10)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("times ours; above 1 ours is better")
    axes[0].legend(fontsize=7)
    return figure


def draw_vectors(documents: Sequence[Kept], kept: Sequence[Kept]) -> Figure:
    """Draw what the steps of a cycle take, beside all that an exchange of as many peers takes of the processor."""
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.9 * len(documents)))
    for at, one in enumerate(documents):
        parts = vector_parts(one.figures)
        exchange = exchange_of_as_many(kept, one.figures["codec"])
        if exchange is not None:
            whole = exchange["systems"][OURS]["cpu_ns_per_parameter_per_peer"]
            rest = whole - sum(ns for _, ns in parts)
            parts.append((f"all else of {peers_by_parameters(exchange)}", max(rest, 0.0)))
        left = 0.0
        for number, (name, ns) in enumerate(parts):
            colour = "lightgray" if name.startswith("all else") else mpl.colormaps["tab20"](number % 20)
            axis.barh(at, ns, left=left, color=colour, label=name if at == 0 else None)
            left += ns
    axis.set_yticks(range(len(documents)), [one.figures["codec"] for one in documents])
    axis.set_xlabel("ns of a core per parameter and peer")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    return figure


def draw_state(documents: Sequence[Kept], kept: Sequence[Kept]) -> Figure:
    """Draw how fast the state came, each transfer a point beside their median."""
    figure, axis = plt.subplots(figsize=(5, 3.6))
    for at, one in enumerate(documents):
        spread, megabytes = one.figures["spread"]["megabytes_per_second"], one.figures["megabytes"]
        axis.bar(at, spread["middle"], width=0.5, color=COLOURS[OURS], alpha=0.5)
        each = [megabytes / turn["seconds"] for turn in one.figures["turns"]]
        axis.plot([at] * len(each), each, "o", color=COLOURS[OURS], markersize=4)
    words = [f"{one.figures['megabytes']:,} MB,\n{one.figures['donors']} donors" for one in documents]
    axis.set_xticks(range(len(documents)), words)
    axis.set_xlim(-0.75, len(documents) - 0.25)
    axis.set_ylabel("MB/s")
    axis.grid(axis="y", alpha=0.3)
    return figure


def draw_training(documents: Sequence[Kept], kept: Sequence[Kept]) -> Figure:
    """Draw the share of their speed that islands keep while they exchange, by line and system."""
    figure, axes = plt.subplots(1, len(documents), figsize=(5 * len(documents), 3.6), squeeze=False)
    for axis, one in zip(axes[0], documents, strict=True):
        rows = one.figures["rows"]
        uplinks = list(dict.fromkeys(row["uplink"] for row in rows))
        systems = list(dict.fromkeys(row["system"] for row in rows))
        for place, system in enumerate(systems):
            of_it = [row for row in rows if row["system"] == system]
            at = [uplinks.index(row["uplink"]) + _beside(place, len(systems)) for row in of_it]
            _points(axis, at, [row["spread"]["speed_kept"] for row in of_it], system)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylim(0.0, 1.1 * max(1.0, *(row["spread"]["speed_kept"]["high"] for row in rows)))
        axis.set_xticks(range(len(uplinks)), uplinks)
        axis.set_xlim(-0.5, len(uplinks) - 0.5)
        axis.set_xlabel("what each island may send")
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("speed kept")
    return figure


def draw_memory(documents: Sequence[Kept], kept: Sequence[Kept]) -> Figure:
    """Draw what the largest peer holds beyond training over the size of the model, with the goal."""
    figure, axis = plt.subplots(figsize=(5, 3.6))
    longest = max(row["parameters"] for one in documents for row in one.figures["rows"])
    ends = [0.0, 1.1 * longest]
    goal = [(GOAL_BYTES_PER_PARAMETER * end + GOAL_CONSTANT_BYTES) / MIB for end in ends]
    axis.plot([end / 1e6 for end in ends], goal, color="black", linewidth=0.8, label="goal")
    for number, one in enumerate(documents):
        rows, colour = one.figures["rows"], f"C{number}"
        sizes = [row["parameters"] / 1e6 for row in rows]
        peers = f"{one.figures['peers']} peers"
        axis.plot(sizes, [row["beyond_mib"] for row in rows], "o-", color=colour, label=f"{peers}, at the peak")
        steady = [row["steady_beyond_mib"] for row in rows]
        axis.plot(sizes, steady, "o--", color=colour, markersize=3, label=f"{peers}, on average")
    axis.set_xlabel("parameters, millions")
    axis.set_ylabel("MiB beyond training alone")
    axis.set_xlim(0.0, None)
    axis.set_ylim(0.0, 1.1 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return figure


def draw_goodput(documents: Sequence[Kept], kept: Sequence[Kept]) -> Figure:
    """Draw the curves over the number of islands, with the published points."""
    figure, axes = plt.subplots(len(documents), len(CHIPS), figsize=(10, 4 * len(documents)), squeeze=False)
    for row_axes, one in zip(axes, documents, strict=True):
        for axis, chips in zip(row_axes, CHIPS, strict=True):
            rows = [row for row in one.figures["rows"] if row["chips"] == chips]
            for system, style in CURVES.items():
                curve = sorted((row["islands"], row["goodput"]) for row in rows if row["system"] == system)
                axis.plot(*zip(*curve, strict=True), style, markersize=3, label=f"{system}, model")
            known = [row for row in rows if row["published"] is not None]
            for is_elastic, marker in ((True, "ko"), (False, "kx")):
                points = [(row["islands"], row["published"]) for row in known if row["elastic"] == is_elastic]
                label = "published" if is_elastic else "published, not elastic"
                axis.plot(*zip(*points, strict=True), marker, markersize=5, label=label)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_ylim(0.0, 1.0)
            axis.set_xlabel("learners or islands")
            axis.set_title(f"{chips:,} chips", fontsize=10)
            axis.grid(alpha=0.3)
        row_axes[0].set_ylabel("goodput")
        row_axes[0].legend(fontsize=7, loc="lower right")
    return figure


def _points(axis: Axes, at: Sequence[float], spreads: Sequence[Mapping[str, float]], system: str) -> None:
    middles = [spread["middle"] for spread in spreads]
    below = [spread["middle"] - spread["low"] for spread in spreads]
    above = [spread["high"] - spread["middle"] for spread in spreads]
    colour, name = COLOURS.get(system), NAMES.get(system, system)
    axis.errorbar(at, middles, yerr=[below, above], fmt="o", capsize=3, color=colour, label=name)


def _beside(place: int, count: int) -> float:
    """Return how far from the middle of its place one of several points is drawn."""
    return 0.15 * (place - (count - 1) / 2)


def _can_be_drawn(one: Kept) -> bool:
    """Return whether there is something beside ours, where only ratios are drawn."""
    return one.figures.get("ratios") != {}


_DRAWINGS: dict[str, Callable[[Sequence[Kept], Sequence[Kept]], Any]] = {
    "averaging": draw_averaging,
    "vectors": draw_vectors,
    "state": draw_state,
    "training": draw_training,
    "memory": draw_memory,
    "goodput": draw_goodput,
}


def main(folder: Path = HERE) -> None:
    """Draw all there is, and write its tables."""
    mpl.rcParams.update({"svg.hashsalt": "p2p_diloco", "svg.fonttype": "none"})
    kept = read_kept(folder)
    plots = {}
    for bench, draw in _DRAWINGS.items():
        documents = [one for one in kept if one.bench == bench and _can_be_drawn(one)]
        if documents:
            plots[bench] = f"{bench}.svg"
            figure = draw(documents, kept)
            figure.savefig(folder / plots[bench], metadata={"Date": None}, bbox_inches="tight")
            plt.close(figure)
    (folder / "tables.md").write_text("\n".join(performance_lines(kept, plots)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
