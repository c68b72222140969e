"""Output that can no longer be written: its reader has closed it, or the disk is full."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Discard what `stream` has buffered, and everything written later.

    Otherwise the interpreter tries to write it once more at exit, and exits with another code.
    """
    with contextlib.suppress(OSError, ValueError):  # a stream that has no descriptor or is closed buffers nothing
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()


def flush_or_discard(stream: TextIO) -> None:
    """Flush `stream`, or discard it if that fails."""
    try:
        stream.flush()
    except (OSError, ValueError):
        discard(stream)


def print_to_stderr(line: str) -> None:
    """Print a line to standard error, unless that is closed too."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
