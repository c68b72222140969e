"""`p2p-diloco demo`: a local swarm that survives the loss of a volunteer and the bootstrap, and a late join."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from p2p_diloco.cli.child_processes import OUTPUT_FILE, ChildProcesses
from p2p_diloco.cli.demo_plan import BOOTSTRAP, LONE, DemoOptions, DemoPlan, plan_demo
from p2p_diloco.cli.demo_report import PEER_COLUMNS, demo_report, figure_rows, peer_rows, verdict_line
from p2p_diloco.cli.demo_result import DemoResult, TextLosses, Traces, has_finished, judge_demo
from p2p_diloco.cli.demo_swarm import DemoStory, DemoSwarm, RunFiles
from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.cli.flags import Surroundings
from p2p_diloco.config.key_file import create_key_file
from p2p_diloco.config.run_file import KEY_FILE, draft_manifest, write_run_toml
from p2p_diloco.errors import ConfigError, P2PDilocoError, StateError
from p2p_diloco.span.vector_work import warm_up
from p2p_diloco.status.event_log import EVENTS_FILE, read_events
from p2p_diloco.status.report import write_report
from p2p_diloco.status.status_file import STATUS_FILE, read_status
from p2p_diloco.status.table import LOG_WIDTH

SAMPLE_PROMPT = "def "
SAMPLE_BYTES = 300
SAMPLE_TEMPERATURE = 0.8


def run_demo(options: DemoOptions, around: Surroundings) -> int:
    """Run the demo; return 0 only if every check passed.

    Raises:
        ConfigError: an option is invalid, or the text is too short.
        StateError: the report, the figures or a temporary file cannot be written.
        P2PDilocoError: a process exited too early.
    """
    if around.files or around.overrides:
        given = str(around.files[0]) if around.files else f"--{next(iter(around.overrides))}"
        raise ConfigError(f"the demo makes its own run and does not take {given}; try: p2p-diloco new")
    plan_demo(options, now_seconds=time.time())
    _check_outputs(options)
    # If standard output carries the JSON, text for people goes to standard error.
    stream = sys.stderr if options.json == STANDARD_OUTPUT else sys.stdout
    show = partial(print, file=stream, flush=True)
    show("measuring the text")
    text = measure_text(options)
    warm_up()  # once here instead of once in every process
    with ChildProcesses() as children:
        plan = plan_demo(options, now_seconds=time.time())
        try:
            swarm = DemoSwarm(plan, children=children, clock=time, show=show, run_files=_write_runs(plan, children))
            story = swarm.run()
        except P2PDilocoError:
            _keep_outputs(options.report, children, plan)
            raise
        traces = {name: _traces(children.folder(name), started) for name, started in story.started.items()}
        finished = [name for name in plan.peers if name in traces and has_finished(traces[name].status)]
        sample = _sample_if_any(children.folder(finished[0]), show) if finished else None
        result = judge_demo(plan, story, traces, text, sample)
        if result.failures:
            _keep_outputs(options.report, children, plan)
    path = write_report(options.report, demo_report(plan, story, traces, result))
    print_result(plan, story, traces, result, stream)
    show(f"report: {path}")
    write_figures(options.json, result.document())
    return P2PDilocoError.exit_code if result.failures else 0


def print_result(
    plan: DemoPlan, story: DemoStory, traces: Mapping[str, Traces], result: DemoResult, stream: TextIO
) -> None:
    """Print the tables and the verdict."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    peers = Table(*PEER_COLUMNS, box=None, header_style="dim", pad_edge=False)
    for row in peer_rows(plan, story, traces):
        peers.add_row(*row)
    figures = Table(box=None, show_header=False, pad_edge=False)
    for what, figure in figure_rows(result):
        figures.add_row(what, figure)
    console.print()
    console.print(peers)
    console.print()
    console.print(figures)
    console.print()
    if result.sample is not None:
        console.print(f"text generated after {SAMPLE_PROMPT!r}:", style="dim")
        console.print(result.sample, soft_wrap=True)
        console.print()
    console.print(verdict_line(result), style="red" if result.failures else "green", soft_wrap=True)


def measure_text(options: DemoOptions) -> TextLosses:
    """Measure the losses on the text before any training.

    Raises:
        ConfigError: the text is missing or too short.
    """
    from p2p_diloco.config.manifest import ModelSection
    from p2p_diloco.training.data import bigram_entropy, open_corpus
    from p2p_diloco.training.evaluation import held_out_loss
    from p2p_diloco.training.model import build_model, model_shape

    corpus = open_corpus(options.data)
    start = build_model(model_shape(options.model), ModelSection().seed)
    return TextLosses(start=held_out_loss(start, corpus), bigram=bigram_entropy(corpus))


def sample_of(folder: Path) -> str:
    """Return the text that the model in a peer's state directory generates after `SAMPLE_PROMPT`; deterministic.

    Raises:
        P2PDilocoError: there is no checkpoint that can be read, or the run has diverged.
    """
    from p2p_diloco.cli.sample import sample_text
    from p2p_diloco.peer.learnt_model import load_learnt_model

    pieces = sample_text(
        load_learnt_model(folder),
        SAMPLE_PROMPT.encode(),
        num_bytes=SAMPLE_BYTES,
        temperature=SAMPLE_TEMPERATURE,
        seed=0,
    )
    return "".join(pieces)


def _sample_if_any(folder: Path, show: Callable[[str], None]) -> str | None:
    try:
        return sample_of(folder)
    except P2PDilocoError as error:
        show(f"no sample: {error}")
        return None


def _write_runs(plan: DemoPlan, children: ChildProcesses) -> RunFiles:
    folder = children.folder("runs")
    files = RunFiles(swarm=folder / "run.toml", lone=folder / "lone.toml")
    key = create_key_file(folder / KEY_FILE)
    for path, values in ((files.swarm, plan.manifest_values()), (files.lone, plan.lone_values())):
        if plan.options.data is not None:
            values["data.path"] = plan.options.data
        manifest = draft_manifest(organiser=key.peer, now_seconds=plan.clock_start, name="demo", values=values)
        write_run_toml(path, manifest)
    return files


def _traces(folder: Path, started: float) -> Traces:
    return Traces(status=read_status(folder), events=read_events(folder), started=started)


def _check_outputs(options: DemoOptions) -> None:
    """Check up front that the report and the figures can be written: the demo takes minutes."""
    try:
        options.report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(
            f"cannot make the folder {options.report}: {error.strerror}; name another with --report"
        ) from None
    check_target(options.json)


def _keep_outputs(report: Path, children: ChildProcesses, plan: DemoPlan) -> None:
    """Copy the logs and status files of the processes into the report folder, to explain a failure."""
    for name in (BOOTSTRAP, *plan.peers, LONE):
        for path in (children.folder(name) / file for file in (OUTPUT_FILE, EVENTS_FILE, STATUS_FILE)):
            if path.exists():
                (report / "logs" / name).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, report / "logs" / name / path.name)
