"""Text that the model writes, made by `p2p-diloco sample` in a process of its own while somebody looks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

EVERY_SECONDS = 300.0
LONGEST_SECONDS = 120.0
PROMPT = "The "
NUM_BYTES = 400
MOST_TEXT = 4_000
NO_SAMPLE = "No sample yet"
_NOTHING_LEARNT = b"before anything was learnt"
"""Part of what `sample` says beside a text of random values."""


class SampleText:
    """The latest sample of one state directory.

    Args:
        folder: state directory, whose newest checkpoint is read.
        write: returns a new sample, or why there is none; by default the command makes it.
        now: seconds of a steady clock.
    """

    def __init__(
        self,
        folder: Path,
        *,
        write: Callable[[Path], str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._now = folder, now
        self._write = write or write_sample
        self._text = "The first sample comes in a minute."
        self._asked_at = float("-inf")
        self._thread: threading.Thread | None = None

    def latest(self, *, shows_errors: bool) -> str | None:
        """Return the latest sample. If it is old, a new one is begun, at the lowest priority.

        Args:
            shows_errors: whether to return why there is no sample, which may name folders; None otherwise.
        """
        if self._now() - self._asked_at >= EVERY_SECONDS and (self._thread is None or not self._thread.is_alive()):
            self._asked_at = self._now()
            self._thread = threading.Thread(target=self._renew, name="sample", daemon=True)
            self._thread.start()
        return None if self._text.startswith(NO_SAMPLE) and not shows_errors else self._text

    def wait(self) -> None:
        """Wait for a sample that is being made."""
        if self._thread is not None:
            self._thread.join()

    def _renew(self) -> None:
        self._text = self._write(self._folder)[:MOST_TEXT]


def write_sample(folder: Path) -> str:
    """Return text by the newest model in a state directory, or why there is none."""
    command = [sys.executable, "-m", "p2p_diloco", "sample", PROMPT, "--bytes", str(NUM_BYTES)]
    command += ["--state-directory", str(folder)]
    nice = ["nice", "-n", "19"] if os.name == "posix" else []
    try:
        done = subprocess.run(
            [*nice, *command],
            capture_output=True,
            timeout=LONGEST_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{NO_SAMPLE}: {error}"
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"{NO_SAMPLE}: {lines[-1] if lines else 'the command failed'}"
    if _NOTHING_LEARNT in done.stderr:
        return f"{NO_SAMPLE}: the newest checkpoint is from before anything was learnt; it is replaced within minutes"
    return done.stdout.decode("utf-8", "replace").strip()
