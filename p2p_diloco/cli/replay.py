"""`p2p-diloco replay`: makes a recorded run again in this process and says how close it comes."""

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
from p2p_diloco.replay.twin import Twin, TwinResult
from p2p_diloco.training.data import Corpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """As typed.

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
    """A run that was made again, and what came of it."""

    recording: Recording
    corpus: Corpus
    result: TwinResult
    pace: Pace

    def figures(self) -> dict[str, Any]:
        """Return what `--json` writes."""
        return dataclasses.asdict(self.result) | {"round_steps": self.pace.round_steps, "steps_late": self.pace.late}

    def lines(self) -> list[str]:
        """Return the result for people."""
        result, pace = self.result, self.pace
        return [
            f"run {result.real_loss:.4f}, replay {result.twin_loss:.4f}: {100 * result.gap:+.3f} %",
            f"{result.equal_entries} of {result.entries} entries equal, byte for byte; {result.islands} starts of "
            f"islands, {result.tokens:,} tokens",
            f"a round has {pace.round_steps:g} steps; steps from a contribution to the entry: {pace.late_at_most(0.5)} "
            f"or fewer for half of them, {pace.late_at_most(0.9)} or fewer for nine of ten",
        ]


def replay(options: ReplayOptions) -> int:
    """Replay, print, and return the exit code, 0.

    Raises:
        ConfigError: there is no folder, or one is no peer's, or the text is another one.
        StateError: the recording is not whole.
    """
    check_target(options.json)
    replayed = play_again(options.folders, options.data)
    write_figures(options.json, replayed.figures())
    if options.json != STANDARD_OUTPUT:
        print("\n".join(replayed.lines()))
    return 0


def play_again(folders: Sequence[Path], data: str | None) -> Replayed:
    """Make a recorded run again; see `replay`."""
    if not folders:
        raise ConfigError("replay needs the state directories of the run's peers: p2p-diloco replay <folder> <folder>")
    recording = read_recording(dict(_peer_of(folder) for folder in folders))
    corpus = open_run_text(recording.plan.manifest.data, data)
    result = Twin(recording, corpus).play(_progress(sys.stderr))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return Replayed(recording=recording, corpus=corpus, result=result, pace=pace_of(recording))


def _peer_of(folder: Path) -> tuple[PeerId, Path]:
    identity = folder / IDENTITY_FILE
    if not identity.is_file():
        raise ConfigError(f"{folder} is no state directory of a peer: it holds no {IDENTITY_FILE}")
    return read_key_file(identity).peer, folder


def _progress(stream: TextIO) -> Callable[[int, int], None]:
    def heard(done: int, of: int) -> None:
        if stream.isatty():
            print(f"\r\033[K{done} of {of} lines of diaries", end="", file=stream, flush=True)

    return heard
