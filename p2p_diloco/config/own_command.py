"""Format the commands that this program prints, so that users can paste them into their shell.

In a checkout, a command must contain the path that was typed, `.venv/bin/p2p-diloco`; for an installed tool, the plain
name.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "p2p-diloco"
_MAIN_MODULE = Path(__file__).parent.with_name("__main__.py")


def own_command(*words: str) -> str:
    """Return a command line of these words: with the plain name if that is on PATH, else as this program was started.

    Other programs that use this package print the plain name.
    """
    typed = sys.argv[0] if sys.argv else ""
    if _same_file(typed, str(_MAIN_MODULE)):
        return shlex.join([sys.orig_argv[0], "-m", "p2p_diloco", *words])
    if Path(typed).name == NAME and not _same_file(typed, shutil.which(NAME)):
        return shlex.join([typed, *words])
    return shlex.join([NAME, *words])


def join_line(invite: str, *, own_model: bool) -> str:
    """Return the line that joins a run, ready to paste; for a run with a user's own model, the Python call."""
    if own_model:
        return f'p2p_diloco.join("{invite}", model, optimizer), from the training loop of the model'
    return f'{own_command("join")} "{invite}"'


def _same_file(one: str, other: str | None) -> bool:
    # Never raises: the program file may have been removed while it runs.
    return other is not None and os.path.realpath(one) == os.path.realpath(other)
