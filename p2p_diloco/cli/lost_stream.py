"""Output that cannot be written any more: its reader has gone, or the disk under it is full."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def discard(stream: TextIO) -> None:
    """Send what `stream` still holds, and all that comes, nowhere.

    Else the interpreter tries to write it once more when it ends, and ends with an exit code of its own.
    """
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, or a closed one, holds nothing back
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
        stream.flush()


def flush_or_discard(stream: TextIO) -> None:
    """Write what `stream` holds if that can be."""
    try:
        stream.flush()
    except (OSError, ValueError):
        discard(stream)


def print_to_stderr(line: str) -> None:
    """Print a line for people if that can be: there may be nobody left to read even that."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
