"""The target of `--json`: standard output or a file, checked before the figures are computed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2p_diloco.errors import ConfigError, StateError

STANDARD_OUTPUT = "-"


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
