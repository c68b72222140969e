"""The beginning of the commands that this program prints, as the user's shell can run them.

A command that is printed is pasted. From a checkout it must hold the path that was typed, `.venv/bin/p2p-diloco`; from
an installed tool the plain name.
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
    """Return the command line of these words: the name where PATH leads to this program, else as it was started.

    Somebody else's program that uses this package was not started as ours: its users get the plain name.
    """
    typed = sys.argv[0] if sys.argv else ""
    if _same_file(typed, str(_MAIN_MODULE)):
        return shlex.join([sys.orig_argv[0], "-m", "p2p_diloco", *words])
    if Path(typed).name == NAME and not _same_file(typed, shutil.which(NAME)):
        return shlex.join([typed, *words])
    return shlex.join([NAME, *words])


def join_line(invite: str, *, own_model: bool) -> str:
    """Return the line that joins a run, ready to be pasted; where its model is in somebody's loop, that loop's call."""
    if own_model:
        return f'p2p_diloco.join("{invite}", model, optimizer), from the loop that has the model'
    return f'{own_command("join")} "{invite}"'


def _same_file(one: str, other: str | None) -> bool:
    # Never fails: a program may have been removed while it runs.
    return other is not None and os.path.realpath(one) == os.path.realpath(other)
