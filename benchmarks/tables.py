"""Markdown tables of the benchmark results in a folder: ratios first, medians with their spread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.averaging.figures import MEASURED
from benchmarks.averaging.systems import GLOO, HIVEMIND_FLOAT16, HIVEMIND_FLOAT32, OURS
from benchmarks.footprint.figures import GOAL_BYTES_PER_PARAMETER, GOAL_CONSTANT_BYTES, MIB
from benchmarks.goodput.model import OURS_AS_CLAIMED
from benchmarks.kept_figures import Kept
from benchmarks.vectors import PARTS

NAMES = {
    HIVEMIND_FLOAT16: "hivemind, fp16",
    HIVEMIND_FLOAT32: "hivemind, float32",
    GLOO: "gloo, float32",
}
"""Displayed names of systems; others are shown by their name in the document."""
_PASSING = frozenset({"load", "date"})
"""Fields of a machine that differ between runs on the same machine."""
_DIGITS = (3, 1, 3, 0)
"""Number of decimals of each figure in `MEASURED`."""
_NOTED_CORES = 0.05
"""Number of cores used by waiting processes above which the page says so."""


def performance_lines(kept: Sequence[Kept], plots: Mapping[str, str]) -> list[str]:
    """Return the whole page. Benchmarks without results are left out.

    Args:
        kept: results in the order of the page.
        plots: file name of the plot of each benchmark, in the folder of the page.
    """
    lines = ["# Tables of what an exchange costs", ""]
    if not kept:
        return [*lines, "There are no results yet: `make bench` measures them in half an hour and writes this page."]
    lines += [
        "Written by `make bench` from the JSON files in this folder; `python benchmarks/figures/draw.py`"
        " only draws the page again. "
        "Figures are medians with quartiles in brackets, or with minimum and maximum for fewer than four repeats. "
        "Ratios are from one run in which all systems took turns. Seconds and nanoseconds hold for the named machine.",
        "",
        *_machine_lines(kept),
    ]
    for bench, (title, tables) in _SECTIONS.items():
        documents = [one for one in kept if one.bench == bench]
        if documents:
            lines += ["", f"## {title}", "", *(_source_line(one, kept) for one in documents), ""]
            lines += [f"![{bench}]({plots[bench]})", ""] if bench in plots else []
            lines += tables(documents, kept)
    return lines


def peers_by_parameters(figures: Mapping[str, Any]) -> str:
    """Return a text like `4 x 10M`."""
    return f"{figures['peers']} x {short_count(figures['parameters'])}"


def short_count(count: int) -> str:
    """Return a short form of a count, such as 10M, rounded to a tenth of a million."""
    return f"{round(count / 1e6, 1):g}M"


def spread_words(spread: Mapping[str, float], digits: int, unit: str = "") -> str:
    """Return a median with its spread in brackets."""
    middle, low, high = (f"{spread[which]:,.{digits}f}" for which in ("middle", "low", "high"))
    return f"{middle}{unit} ({low} to {high})"


# -- sources of the figures


def _machines(kept: Sequence[Kept]) -> list[dict[str, Any]]:
    """Return the distinct machines."""
    found: list[dict[str, Any]] = []
    for one in kept:
        machine = {name: value for name, value in one.figures["machine"].items() if name not in _PASSING}
        if machine not in found:
            found.append(machine)
    return found


def _machine_lines(kept: Sequence[Kept]) -> list[str]:
    machines = _machines(kept)
    if len(machines) == 1:
        return [f"Machine: {_machine_words(machines[0])}."]
    return [f"- Machine {number}: {_machine_words(machine)}" for number, machine in enumerate(machines, 1)]


def _machine_words(machine: Mapping[str, Any]) -> str:
    name = machine["processor"] or "unnamed processor"
    return (
        f"{name}, {machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']} GiB, "
        f"{machine['kernel']}, Python {machine['python']}, torch {machine['torch']}"
    )


def _source_line(one: Kept, kept: Sequence[Kept]) -> str:
    machine = one.figures["machine"]
    machines = _machines(kept)
    same = {name: value for name, value in machine.items() if name not in _PASSING}
    which = f", machine {machines.index(same) + 1}" if len(machines) > 1 else ""
    words = (
        f"- [{one.name}]({one.name}.json): `python -m benchmarks {one.figures['command']}`, {machine['date']}{which}"
    )
    return f"{words}; load before it {machine['load']:.2f}"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heading, ["---"] * len(heading), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


# -- averaging, and the work on vectors in it


def _averaging(documents: Sequence[Kept], kept: Sequence[Kept]) -> list[str]:
    ratios, rows, remarks = [], [], []
    for one in documents:
        figures, setting = one.figures, peers_by_parameters(one.figures)
        for system, found in figures["ratios"].items():
            wall, *others = (spread_words(found[name], 2, " x") for name in MEASURED)
            ratios.append([setting, NAMES.get(system, system), _bold_middle(wall), *others])
        for system, found in figures["systems"].items():
            words = [
                spread_words(found["spread"][name], digits) for name, digits in zip(MEASURED, _DIGITS, strict=True)
            ]
            name = f"{OURS}, {figures['codec']}" if system == OURS else NAMES.get(system, system)
            rows.append([setting, name, *words, "equal" if found["results_equal"] else "differ"])
        remarks += _averaging_remarks(setting, figures)
    heading = ["peers x parameters", "times ours"]
    costs = ["wall", "CPU, all processes", "bytes on the wire", "peak memory of a peer"]
    units = ["wall, s", "CPU, ns per parameter and peer", "bytes per parameter and peer", "peak of a peer, MiB"]
    lines = [*_table([*heading, *costs], ratios), ""] if ratios else []
    return [*lines, *_table([heading[0], "", *units, "results"], rows), *(["", *remarks] if remarks else [])]


def _averaging_remarks(setting: str, figures: Mapping[str, Any]) -> list[str]:
    remarks = []
    if not figures["own_network"]:
        remarks.append("bytes include those of other programs: no private network could be created")
    if not figures["processes_kept_alive"]:
        remarks.append("processes were started for each turn, because memory is too small for all at once")
    if figures["idle_cores"] >= _NOTED_CORES:
        remarks.append(f"waiting processes used {figures['idle_cores']:.2f} cores")
    return [f"{setting}: {'; '.join(remarks)}."] if remarks else []


def vector_parts(figures: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the CPU time of each step of a cycle, in ns per parameter and peer."""
    return [(step["name"], step["share"] * step["compiled"]["middle"]) for step in figures["steps"] if step["share"]]


def exchange_of_as_many(kept: Sequence[Kept], codec: str) -> Mapping[str, Any] | None:
    """Return the largest recorded exchange among `PARTS` peers with this codec, or None."""
    found = [
        one.figures
        for one in kept
        if one.bench == "averaging" and (one.figures["peers"], one.figures["codec"]) == (PARTS, codec)
    ]
    return max(found, key=lambda figures: int(figures["parameters"]), default=None)


def _vectors(documents: Sequence[Kept], kept: Sequence[Kept]) -> list[str]:
    lines: list[str] = []
    for one in documents:
        figures = one.figures
        rows = []
        for step in figures["steps"]:
            compiled, numpy = step["compiled"], step["numpy"]
            ratio = f"{numpy['middle'] / compiled['middle']:.1f} x"
            share = f"{step['share']:g}" if step["share"] else "not in the sum"
            rows.append([step["name"], ratio, spread_words(compiled, 2), spread_words(numpy, 2), share])
        cycle = figures["cycle"]
        whole = [f"{cycle['numpy'] / cycle['compiled']:.1f} x", f"{cycle['compiled']:.2f}", f"{cycle['numpy']:.2f}"]
        rows.append([f"**a cycle of {PARTS} peers**", *whole, ""])
        heading = ["step", "NumPy alone, times ours", "ours, ns per element", "NumPy alone", "of all parameters"]
        lines += ["", *_table(heading, rows)] if lines else _table(heading, rows)
        exchange = exchange_of_as_many(kept, figures["codec"])
        if exchange is not None:
            cpu = exchange["systems"][OURS]["cpu_ns_per_parameter_per_peer"]
            lines += [
                "",
                f"That is {cycle['compiled'] / cpu:.0%} of the {cpu:.1f} ns that an exchange of "
                f"{peers_by_parameters(exchange)} takes in all processes. The true share is lower: steps are measured "
                "one by one here, but a peer contributes in one pass and follows an entry in one pass.",
            ]
    return lines


# -- state, training, memory


def _state(documents: Sequence[Kept], kept: Sequence[Kept]) -> list[str]:
    rows = []
    for one in documents:
        figures, spread = one.figures, one.figures["spread"]
        rows.append(
            [
                f"{figures['megabytes']:,} MB, {figures['donors']} donors, {figures['killed']} killed",
                f"**{spread_words(spread['megabytes_per_second'], 0)}**",
                spread_words(spread["installed_seconds"], 2),
                spread_words(spread["seconds"], 2),
                spread_words(spread["cpu_ns_per_byte"], 1),
                spread_words(spread["daemon_cpu_ns_per_byte"], 1),
                f"{spread['received_share']['middle']:.3f}",
                f"{spread['peak_joiner_mib']['middle']:,.0f} and {spread['peak_donor_mib']['middle']:,.0f}",
                f"{spread['late_milliseconds']['middle']:.0f} and {spread['latest_milliseconds']['middle']:.0f}",
                "equal" if figures["equal"] else "differ",
            ]
        )
    heading = ["state", "MB/s, overall", "s until all spans arrived", "s until verified", "CPU, ns per byte"]
    heading += ["of that, libp2p daemons", "received / size of state", "peak of newcomer and donor, MiB"]
    return _table([*heading, "lag of donors' loops, ms: p99 and max", "results"], rows)


def _training(documents: Sequence[Kept], kept: Sequence[Kept]) -> list[str]:
    lines: list[str] = []
    for one in documents:
        figures = one.figures
        rows = []
        for row in figures["rows"]:
            percent = {which: 100.0 * value for which, value in row["spread"]["speed_kept"].items()}
            left = row["processor_left"]
            rows.append(
                [
                    row["uplink"],
                    NAMES.get(row["system"], row["system"]),
                    _bold_middle(spread_words(percent, 1, " %")),
                    f"{row['participation']:.0%}",
                    f"{row['cycle_seconds']:.2f}",
                    f"{row['inner_steps_per_cycle']:.1f}",
                    _cost_words(row) if left is not None else "",
                    f"{left:.1%}" if left is not None else "",
                ]
            )
        what = f"{figures['islands']} islands, {short_count(figures['parameters'])} parameters, {figures['codec']}:"
        heading = ["uplink", "", "speed kept", "included", "cycle, s", "steps in it"]
        heading += ["CPU s per island and cycle: outer, slower steps, rest, daemon", "CPU left"]
        lines += ["", what] if lines else [what]
        lines += ["", *_table(heading, rows)]
    return lines


def _cost_words(row: Mapping[str, Any]) -> str:
    cost = row["cpu_seconds_per_cycle_per_island"]
    parts = ", ".join(f"{cost[name]:.2f}" for name in ("outer", "slower_steps", "rest", "daemon"))
    return f"{sum(cost.values()):.2f}: {parts}"


def _memory(documents: Sequence[Kept], kept: Sequence[Kept]) -> list[str]:
    rows, lines = [], []
    for one in documents:
        figures = one.figures
        for row in figures["rows"]:
            held = [row[name] for name in ("training_mib", "peer_mib", "daemon_mib", "beyond_mib", "goal_mib")]
            words = [f"{value:,.0f}" for value in (*held, row["steady_beyond_mib"])]
            words[3] = f"**{words[3]}**"
            ratio = f"{row['beyond_mib'] / row['goal_mib']:.2f} x"
            equal = "equal" if row["results_equal"] else "differ"
            rows.append([f"{figures['peers']} x {short_count(row['parameters'])}", ratio, *words, equal])
        if figures["slope_bytes_per_parameter"] is not None:
            line = figures["slope_bytes_per_parameter"], figures["constant_mib"] * MIB / 1e6
            lines.append(f"{one.name}: {line[0]:.2f} bytes per parameter and {line[1]:.0f} MB beyond training.")
    lines.append(f"The goal: {GOAL_BYTES_PER_PARAMETER:g} bytes per parameter and {GOAL_CONSTANT_BYTES / 1e6:g} MB.")
    heading = ["peers x parameters", "times the goal", "training alone, MiB", "largest peer", "its daemon"]
    return [*_table([*heading, "beyond training", "goal", "beyond on average", "results"], rows), "", *lines]


# -- failures, and goodput under them


def _failures(documents: Sequence[Kept], kept: Sequence[Kept]) -> list[str]:
    lines: list[str] = []
    for one in documents:
        figures, rows = one.figures, []
        for row in figures["rows"]:
            error, rejoin = row["lost_seconds_error"], row["rejoin_rounds"]
            rows.append(
                [
                    f"{row['islands']}",
                    f"**{row['lost_seconds']:.1f}**" + (f" ± {error:.1f}" if error is not None else ""),
                    f"{row['others_seconds']:.1f}",
                    f"{row['skipped_cycles']:.2f}",
                    f"{row['stalled_rounds']:.1f}",
                    f"{rejoin:.1f}, at most {row['most_rejoin_rounds']}" if rejoin is not None else "",
                    f"{row['failures'] - row['not_rejoined']} of {row['failures']}",
                    f"{row['sustained_share']:.1%}",
                    f"{row['expected_share']:.1%}",
                    f"{row['sustained_failures']} in {row['sustained_cycles']}",
                ]
            )
        what = (
            f"A cycle of {figures['cycle_seconds']:g} s in {figures['rounds_per_cycle']} rounds; an island starts "
            f"again {figures['pause_seconds']:g} s after its failure. Means per failure with their standard error, in "
            "seconds of one island's training:"
        )
        heading = ["islands", "lost, with the pause", "of that, by others", "cycles skipped", "rounds stalled"]
        heading += ["rounds until included again", "included again", "counted while failures keep coming"]
        lines += ["", what] if lines else [what]
        lines += ["", *_table([*heading, "expected", "failures, cycles"], rows)]
    return lines


def _goodput(documents: Sequence[Kept], kept: Sequence[Kept]) -> list[str]:
    lines: list[str] = []
    for one in documents:
        figures = one.figures
        constants = figures["constants"]
        published = [
            [
                row["system"] + (", elastic" if row["elastic"] else ", not elastic"),
                f"{row['islands']}",
                f"{row['chips']:,}",
                f"{row['goodput']:.1%}",
                f"{row['published']:.0%}",
                row["basis"],
            ]
            for row in figures["rows"]
            if row["published"] is not None
        ]
        claimed = {
            (row["chips"], row["islands"]): f"{row['goodput']:.1%}"
            for row in figures["rows"]
            if row["system"] == OURS_AS_CLAIMED
        }
        curves = [
            [
                f"{row['chips']:,}",
                f"{row['islands']:,}",
                f"**{row['goodput']:.1%}**",
                claimed[row["chips"], row["islands"]],
                row["basis"],
            ]
            for row in figures["rows"]
            if row["system"] == OURS
        ]
        what = (
            f"{figures['num_constants']} constants fitted to {figures['num_fitted_points']} points: a failure stops a "
            f"unit for {constants['elastic_pause_seconds']:.1f} s, or for {constants['rigid_pause_seconds']:.1f} s if "
            f"it is not elastic; {1.0 - figures['share_present']:.1%} of the chips of elastic units are away."
        )
        lines += ["", what] if lines else [what]
        lines += ["", *_table(["", "units", "chips", "model", "published", "point"], published)]
        lines += [
            "",
            f"{OURS}:",
            "",
            *_table(["chips", "islands", "goodput", "carried work not counted", "rests on"], curves),
        ]
    return lines


def _bold_middle(words: str) -> str:
    middle, bracket, rest = words.partition(" (")
    return f"**{middle}**{bracket}{rest}"


_SECTIONS: dict[str, tuple[str, Callable[[Sequence[Kept], Sequence[Kept]], list[str]]]] = {
    "averaging": ("Averaging", _averaging),
    "vectors": ("Vector operations of an exchange", _vectors),
    "state": ("State: the cost of joining", _state),
    "training": ("Training while exchanging", _training),
    "memory": ("Memory", _memory),
    "failures": ("What a failure costs", _failures),
    "goodput": ("Goodput of a million chips", _goodput),
}
