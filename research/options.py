"""The options of an experiment, each declared once: name, type, default and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cyclopts import Parameter

from p2p_diloco.app.cli.options import FiguresFlag


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentOptions:
    """The options of an experiment.

    Attributes:
        quick: use two seeds, and two tokens per parameter
        size: size of the model: micro, tiny, small or base
        islands: number of islands
        speeds: for mixed: windows that each island trains on in the time of a planned step, relative to the planned
            ones, such as 1,1,1,1,16; sets the number of islands
        steps: inner steps of each island; default as many as 20 tokens per parameter take
        tokens_per_parameter: length of a trial in place of steps: tokens of all islands for each parameter of the model
        optimizer: inner optimizer of all rows: adamw or muon
        inner_rate: inner learning rate of all rows; by default tuned for the size and the optimizer
        inner_schedule: inner rate after warm-up: cosine (down to a tenth) or constant
        windows: windows of text per step of all islands together, at least one for each
        rows: names of the rows to run, separated by commas; default all. The first is compared with the others. For
            tune, also names of experiments, for all of their rows; default primary
        seeds: trials of each row
        data: file with a text; by default the source of Python's standard library
        device: cpu, cuda, cuda:N, mps or auto (the fastest available); a GPU makes the steps of several trials together
        keep: file of outcomes, one per line: trials in the file are not repeated, new ones are added
        tuned: file of tuned values: tune writes them, the other experiments read them
    """

    quick: bool = False
    size: str = "micro"
    islands: int = 4
    speeds: str | None = None
    steps: int | None = None
    tokens_per_parameter: float | None = None
    optimizer: Literal["adamw", "muon"] = "muon"
    inner_rate: float | None = None
    inner_schedule: Literal["cosine", "constant"] = "cosine"
    windows: int = 32
    rows: str | None = None
    seeds: int | None = None
    data: str | None = None
    device: str = "cpu"
    keep: str | None = None
    tuned: str = "research/results/tuned.json"
    json: FiguresFlag = None
