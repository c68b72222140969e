"""Where `--json` goes: standard output or a file, looked at before minutes are spent on what is to be written there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p2p_diloco.errors import ConfigError, StateError

STANDARD_OUTPUT = "-"


def check_target(target: str | None) -> None:
    """See that figures can be written there later.

    Raises:
        ConfigError: the folder is not there.
    """
    if target not in (None, STANDARD_OUTPUT) and not Path(str(target)).parent.is_dir():
        raise ConfigError(f"there is no folder {Path(str(target)).parent} for --json")


def write_figures(target: str | None, document: Mapping[str, Any]) -> None:
    """Write figures as JSON; nowhere when nobody asked.

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
        raise StateError(f"cannot write {target}: {error.strerror}; name another file with --json") from None
