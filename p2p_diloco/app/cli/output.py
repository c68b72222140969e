"""Output of commands: streams whose reader has left or whose disk is full, and the file that `--json` names."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from p2p_diloco.errors import ConfigError, StateError

STANDARD_OUTPUT = "-"
"""The target of `--json` that is no file."""


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


def check_target(target: str | None) -> None:
    """Check that figures can be written there later; an existing file is not changed.

    Raises:
        ConfigError: the folder does not exist.
        StateError: the file cannot be written, or is a folder.
    """
    if target is None or target == STANDARD_OUTPUT:
        return
    path = Path(target)
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} for --json")
        _try_to_write(path)
    except OSError as error:
        raise _unwritable(target, error) from None


def write_figures(target: str | None, document: Mapping[str, Any]) -> None:
    """Write figures as JSON; nowhere if `target` is None.

    Raises:
        StateError: the file cannot be written.
    """
    if target is None:
        return
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(target, error) from None


def _try_to_write(path: Path) -> None:
    """Open `path` for writing as `write_figures` will; remove the empty file if it is new."""
    is_new = not path.exists()
    if not (is_new or path.is_file() or path.is_dir()):
        return  # closing a pipe would end its reader
    path.open("ab").close()
    if is_new:
        path.unlink()


def _unwritable(target: str, error: OSError) -> StateError:
    return StateError(f"cannot write {target}: {error.strerror}; name another file with --json")
