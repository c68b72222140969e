"""`p2p-diloco replay`: makes a recorded run again in this process and says how close it comes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId
from p2p_diloco.island.data import Corpus
from p2p_diloco.key_file import read_key_file
from p2p_diloco.lab.learning.pace import Pace, pace_of
from p2p_diloco.lab.learning.recording import Recording, read_recording
from p2p_diloco.lab.learning.setting import Circumstances, Setting, run_trial
from p2p_diloco.lab.learning.twin import Twin, TwinResult
from p2p_diloco.settings import IDENTITY_FILE
from p2p_diloco.trainer.run_text import open_run_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """As typed.

    Attributes:
        folders: state directories of the peers of one run.
        data: this machine's copy of the run's text.
        with_data_parallel: train one machine on as many tokens beside it.
        json: file for the figures, `-` for standard output.
    """

    folders: tuple[Path, ...]
    data: str | None
    with_data_parallel: bool
    json: str | None


def replay(options: ReplayOptions) -> int:
    """Replay, print, and return the exit code, 0.

    Raises:
        ConfigError: there is no folder, or one is no peer's, or the text is another one.
        StateError: the recording is not whole.
    """
    if not options.folders:
        raise ConfigError("replay needs the state directories of the run's peers: p2p-diloco replay <folder> <folder>")
    check_target(options.json)
    recording = read_recording(dict(_peer_of(folder) for folder in options.folders))
    corpus = open_run_text(recording.plan.manifest.data, options.data)
    result = Twin(recording, corpus).play(_progress(sys.stderr))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    pace = pace_of(recording)
    figures = dataclasses.asdict(result) | {"round_steps": pace.round_steps, "steps_late": pace.late}
    if options.with_data_parallel:
        figures["data_parallel_loss"] = _data_parallel(recording, corpus, result)
    write_figures(options.json, figures)
    if options.json != STANDARD_OUTPUT:
        print("\n".join(replay_lines(result, pace, figures.get("data_parallel_loss"))))
    return 0


def replay_lines(result: TwinResult, pace: Pace, data_parallel: float | None) -> Sequence[str]:
    """Return the result for people."""
    lines = [
        f"run {result.real_loss:.4f}, replay {result.twin_loss:.4f}: {100 * result.gap:+.3f} %",
        f"{result.equal_entries} of {result.entries} entries equal, byte for byte; {result.islands} starts of islands, "
        f"{result.tokens:,} tokens",
        f"a round has {pace.round_steps:g} steps; steps from a contribution to the entry: {pace.late_at_most(0.5)} or "
        f"fewer for half of them, {pace.late_at_most(0.9)} or fewer for nine of ten",
    ]
    if data_parallel is not None:
        against = 100 * (result.real_loss / data_parallel - 1.0)
        lines.append(f"data-parallel, as many tokens: {data_parallel:.4f}; the swarm {against:+.2f} %")
    return lines


def _peer_of(folder: Path) -> tuple[PeerId, Path]:
    identity = folder / IDENTITY_FILE
    if not identity.is_file():
        raise ConfigError(f"{folder} is no state directory of a peer: it holds no {IDENTITY_FILE}")
    return read_key_file(identity).peer, folder


def _data_parallel(recording: Recording, corpus: Corpus, result: TwinResult) -> float:
    """Return the held-out loss of one machine with the batch of all after as many tokens, with the run's inner rule."""
    plan = recording.plan
    islands = len(recording.lives)
    steps = result.tokens // (islands * plan.inner.batch * plan.shape.context)
    setting = Setting(
        name="data-parallel",
        system="data-parallel",
        islands=islands,
        ticks=steps,
        batch=plan.inner.batch,
    )
    return run_trial(setting, 0, within=Circumstances(shape=plan.shape, rule=plan.inner, corpus=corpus)).loss


def _progress(stream: TextIO) -> Callable[[int, int], None]:
    def heard(done: int, of: int) -> None:
        if stream.isatty():
            print(f"\r\033[K{done} of {of} lines of diaries", end="", file=stream, flush=True)

    return heard
