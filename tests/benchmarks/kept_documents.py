"""Documents as benches write them, without measuring: what tables and plots are made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.averaging import figures as averaging
from benchmarks.averaging.systems import GLOO, HIVEMIND_FLOAT16, OURS
from benchmarks.commands.failures import failures_figures
from benchmarks.commands.vectors import vectors_figures
from benchmarks.footprint import figures as footprint
from benchmarks.goodput import failures
from benchmarks.goodput import figures as goodput
from benchmarks.goodput.figures import KeptCost
from benchmarks.interleaved import Spread
from benchmarks.options import FailuresOptions, VectorsOptions
from benchmarks.state import transfer
from benchmarks.training import figures as training
from benchmarks.vectors import StepFigures

MIB = averaging.MIB
MACHINE: dict[str, Any] = {
    "processor": "A Processor", "architecture": "x86_64", "cores": 2, "memory_gib": 7.8, "load": 0.25,
    "kernel": "Linux 6.1", "python": "3.11.7", "torch": "2.10.0", "date": "2026-01-02",
}  # fmt: skip


def averaging_document(*, peers: int = 4, parameters: int = 10_000_000, alone: bool = False) -> dict[str, Any]:
    """Ours takes 0.5 s and 6 ns; hivemind four and five times that, gloo half."""

    def turn(wall: float, cpu_ns: float, are_equal: bool) -> averaging.Turn:
        return averaging.Turn(
            wall_seconds=wall,
            cpu_seconds=cpu_ns * 1e-9 * peers * parameters,
            wire_bytes=8 * peers * parameters // 10,
            peak_rss_bytes=400 * MIB,
            others_cpu_seconds=0.0,
            results_equal=are_equal,
        )

    turns = {OURS: [turn(0.5, 6.0, True)] * 3}
    if not alone:
        turns |= {HIVEMIND_FLOAT16: [turn(2.0, 30.0, False)] * 3, GLOO: [turn(0.25, 3.0, True)] * 3}
    comparison = averaging.Comparison(
        num_peers=peers, parameters=parameters, codec="int4", turns=turns, on_own_network=True, kept_alive=not alone,
        num_cores=2,
    )  # fmt: skip
    command = f"averaging --peers {peers} --parameters {parameters // 1_000_000}M"
    return {"command": command, **averaging.document_of(comparison), "machine": MACHINE}


def vectors_document() -> dict[str, Any]:
    """A cycle of 3 ns with compiled loops, of 8 with NumPy."""

    def step(name: str, share: float, compiled: float, numpy: float) -> StepFigures:
        spreads = [Spread(middle=value, low=value, high=value) for value in (compiled, numpy)]
        return StepFigures(name=name, share=share, compiled=spreads[0], numpy=spreads[1])

    steps = [step("encode", 1.0, 2.0, 6.0), step("mean", 0.25, 4.0, 8.0), step("digest", 0, 9.0, 9.0)]
    options = VectorsOptions(codec="int4", parameters="1M", repeat=3, json=None)
    return {"command": "vectors", **vectors_figures(options, 1_000_000, steps), "machine": MACHINE}


def state_document() -> dict[str, Any]:
    """800 MB in four seconds, and once in five."""
    transfers = [
        transfer.Transfer(
            seconds=seconds,
            installed_seconds=seconds - 0.5,
            cpu_seconds=8.0,
            daemon_cpu_seconds=4.0,
            received_bytes=801_000_000,
            peak_joiner_bytes=1600 * MIB,
            peak_donor_bytes=1500 * MIB,
            late_seconds=(0.004, 0.04),
            is_equal=True,
        )
        for seconds in (4.0, 5.0, 4.0)
    ]
    plan = transfer.TransferPlan(megabytes=800, donors=3, killed=1, repeats=3)
    return {"command": "state --megabytes 800", **transfer.document_of(plan, transfers), "machine": MACHINE}


def training_document() -> dict[str, Any]:
    """Ours keeps 95 % of its speed and torchft as much, whose CPU nobody tells apart."""
    alone = training.IslandWindow(seconds=10.0, steps=100.0, work=training.Work(training=5.0))
    exchanging = training.IslandWindow(
        seconds=20.0, steps=190.0, included=7.0, due=8.0,
        work=training.Work(training=10.0, outer=0.5, rest=0.6, daemon=0.4),
    )  # fmt: skip
    turn = training.Turn(before=(alone,), exchanging=(exchanging,), after=(alone,))
    rows = [
        training.Row(
            system=system,
            uplink=uplink,
            cycle_seconds=10.0,
            transmission_seconds=2.5,
            steps_per_cycle=95.0,
            turns=(turn,),
        )
        for uplink in ("20mbit", "unlimited")
        for system in (training.OURS, training.TORCHFT)
    ]
    setting = training.Setting(
        islands=4, parameters=10_081_600, model="small", batch=1, context=64, codec="int4", fragments=1,
        spans_per_fragment=32, repeats=1, machine=MACHINE,
    )  # fmt: skip
    return {"command": "training", **training.document_of(setting, rows)}


def memory_document() -> dict[str, Any]:
    """Nine bytes for each parameter and 160 MiB."""

    def size(parameters: int) -> footprint.SizeFigures:
        alone = footprint.Footprint(peak=300 * MIB + 16 * parameters, steady=280 * MIB + 14 * parameters)
        held = alone.peak + 9 * parameters + 100 * MIB
        peer = footprint.PeerFootprint(
            peer=footprint.Footprint(peak=held, steady=alone.steady + 100 * MIB),
            daemon=footprint.Footprint(peak=60 * MIB, steady=60 * MIB),
        )
        return footprint.SizeFigures(
            parameters=parameters, alone=alone, peers=(peer, peer), num_rounds=6, num_entries=192, results_equal=True
        )

    sizes = [size(10_000_000), size(40_000_000)]
    return {"command": "memory --peers 2", **footprint.document_of(sizes, 2), "machine": MACHINE}


def failures_document() -> dict[str, Any]:
    """Two sizes, with 40 and 44 seconds lost; of the second, one island of two was not included again."""

    def row(islands: int, rejoin_rounds: int | None) -> dict[str, Any]:
        costs = [
            failures.FailureCost(
                lost_seconds=lost, others_seconds=12.0, skipped_cycles=0.5, stalled_rounds=1, rejoin_rounds=rounds
            )
            for lost, rounds in ((40.0, 3), (44.0, rejoin_rounds))
        ]
        plan = failures.FailurePlan(
            islands=islands, failures=2, pause_seconds=18.0, cycle_seconds=24.0, every_seconds=30.0, sustained_cycles=9
        )
        measured = failures.Measured(islands=islands, costs=tuple(costs), sustained_failures=9, sustained_share=0.75)
        return failures.measured_row(plan, measured)

    options = FailuresOptions(
        islands="4,16", repeat=2, cycle_seconds=24.0, pause_seconds=18.0, every_seconds=30.0, sustained_cycles=9,
        json=None,
    )  # fmt: skip
    figures = failures_figures(options, [row(4, 5), row(16, None)])
    return {"command": "failures --islands 4,16", **figures, "machine": MACHINE}


def goodput_document() -> dict[str, Any]:
    """Curves with 24 seconds beside the pause that no entry names, half of them carried later."""
    costs = [KeptCost(islands=4, further_seconds=24.0, carried_seconds=12.0)]
    return {"command": "goodput", **goodput.goodput_document(costs), "machine": MACHINE}


def keep(folder: Path, **documents: dict[str, Any]) -> Path:
    """Write documents as files of these names, with `-` for `_`; return the folder."""
    for name, document in documents.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def keep_one_of_each(folder: Path) -> Path:
    """Write one document of every bench; return the folder."""
    return keep(
        folder,
        averaging_4x10M=averaging_document(),
        vectors=vectors_document(),
        state_800MB=state_document(),
        training=training_document(),
        memory=memory_document(),
        failures=failures_document(),
        goodput=goodput_document(),
    )
