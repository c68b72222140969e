"""Output that cannot be written: its reader has closed it, the disk is full, or its encoding lacks a character."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO


def take_any_text() -> None:
    """Let standard output print a question mark for a character that its encoding lacks, instead of failing.

    A stream that was closed before the start reads nothing and discards what is written.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error never fails: it escapes such characters
        sys.stdout.reconfigure(errors="replace")


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
