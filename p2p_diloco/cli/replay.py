"""`p2p-diloco replay`: replay a recorded run in this process and report how close it comes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from p2p_diloco.cli.figures_file import STANDARD_OUTPUT, check_target, write_figures
from p2p_diloco.config.key_file import read_key_file
from p2p_diloco.config.settings import IDENTITY_FILE
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId
from p2p_diloco.peer.run_text import open_run_text
from p2p_diloco.replay.pace import Pace, pace_of
from p2p_diloco.replay.recording import Recording, read_recording
from p2p_diloco.replay.replay import Replay, ReplayResult
from p2p_diloco.training.data import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options as typed.

    Attributes:
        folders: state directories of the peers of one run.
        data: this machine's copy of the run's text.
        json: file for the figures, `-` for standard output.
    """

    folders: tuple[Path, ...]
    data: str | None
    json: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A replayed run and its result."""

    recording: Recording
    corpus: Text
    result: ReplayResult
    pace: Pace

    def figures(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return dataclasses.asdict(self.result) | {"round_steps": self.pace.round_steps, "steps_late": self.pace.late}

    def lines(self) -> list[str]:
        """Return the result as lines for people."""
        result, pace = self.result, self.pace
        return [
            f"run {result.real_loss:.4f}, replay {result.replay_loss:.4f}: {100 * result.gap:+.3f} %",
            f"{result.equal_entries} of {result.entries} entries are equal, byte for byte; {result.islands} starts of "
            f"islands, {result.tokens:,} tokens",
            f"steps per round: {pace.round_steps:g}; steps from a contribution to its entry: median "
            f"{pace.late_at_most(0.5)}, 90th percentile {pace.late_at_most(0.9)}",
        ]


def replay(options: ReplayOptions) -> int:
    """Replay a run and print the result; return the exit code, 0.

    Raises:
        ConfigError: no folder is given, one is not a state directory, or the text differs.
        StateError: the recording is incomplete.
    """
    check_target(options.json)
    replayed = play_again(options.folders, options.data)
    write_figures(options.json, replayed.figures())
    if options.json != STANDARD_OUTPUT:
        print("\n".join(replayed.lines()))
    return 0


def play_again(folders: Sequence[Path], data: str | None) -> Replayed:
    """Replay a recorded run; see `replay`."""
    if not folders:
        raise ConfigError("replay needs the state directories of the run's peers: p2p-diloco replay <folder> <folder>")
    recording = read_recording(dict(_peer_of(folder) for folder in folders))
    if recording.plan.built_in is None:  # before its model is built, which could run code of its organiser
        raise ConfigError(
            f'"{recording.plan.manifest.name}" does not train the built-in model; replay only builds that'
        )
    corpus = open_run_text(recording.plan.manifest.data, data)
    result = Replay(recording, corpus).play(_progress(sys.stderr))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return Replayed(recording=recording, corpus=corpus, result=result, pace=pace_of(recording))


def _peer_of(folder: Path) -> tuple[PeerId, Path]:
    identity = folder / IDENTITY_FILE
    if not identity.is_file():
        raise ConfigError(f"{folder} is not a peer's state directory: it has no {IDENTITY_FILE}")
    return read_key_file(identity).peer, folder


def _progress(stream: TextIO) -> Callable[[int, int], None]:
    def heard(done: int, of: int) -> None:
        if stream.isatty():
            print(f"\r\033[K{done} of {of} trace lines", end="", file=stream, flush=True)

    return heard
