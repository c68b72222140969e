"""Format numbers and commands for people.

A number has about three digits and a unit, or is a dash if it is missing. Users paste the commands: in a checkout, one
contains the path that was typed, `.venv/bin/p2p-diloco`; for an installed tool, the plain name.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

NOTHING = "–"
NAME = "p2p-diloco"
_MAIN_MODULE = Path(__file__).with_name("__main__.py")
_STEP = 1000.0
_PLAIN_PHRASES = (
    (re.compile(r"\bin no entry\b"), "in no update of the shared model"),
    (re.compile(r"\bnot on roster \d+ of (\d+ member)"), r"not among the \1"),
)
_PLAIN_WORDS = {
    "roster": "member list",
    "rosters": "member lists",
    "anchor": "shared model",
    "anchors": "shared models",
    "span": "part",
    "spans": "parts",
    "entry": "update",
    "entries": "updates",
}
_OUR_WORDS = re.compile(rf"""("[^"]*")|(?<![\w/.-])({"|".join(_PLAIN_WORDS)})(?![\w/.])""")


def format_count(value: float | None) -> str:
    """Return `12`, `3.4k`, `1.2M`."""
    return NOTHING if value is None or not math.isfinite(value) else _scaled(value, ("", "k", "M", "G", "T"))


def format_bytes(value: float | None) -> str:
    """Return `512 B`, `3.4 kB`, `1.2 MB`; powers of ten."""
    return NOTHING if value is None or not math.isfinite(value) else _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def format_loss(value: float | None) -> str:
    """Return nats per token with three decimals."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.3f}"


def format_share(value: float | None) -> str:
    """Return a share as a percentage with one decimal, at most 100 %."""
    return NOTHING if value is None or not math.isfinite(value) else f"{100 * min(value, 1.0):.1f} %"


def format_seconds(value: float | None) -> str:
    """Return `4.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def format_how_far(share: float | None, seconds_left: float | None) -> str:
    """Return `38 % · about 3 days left`, `planned end reached` or `no end set`."""
    if share is None or seconds_left is None:
        return "no end set"
    if share >= 1.0:
        return "planned end reached"
    for unit, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds_left >= 2 * seconds:
            return f"{100 * share:.0f} % · about {seconds_left / seconds:.0f} {unit} left"
    return f"{min(100 * share, 99):.0f} % · less than 2 minutes left"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def plain_words(sentence: str) -> str:
    """Replace the protocol's words by those that a volunteer knows; what is quoted, and paths, stay as they are."""
    for phrase, plain in _PLAIN_PHRASES:
        sentence = phrase.sub(plain, sentence)
    return _OUR_WORDS.sub(lambda found: found[1] or _PLAIN_WORDS[found[2]], sentence)


def install_line(extra: str) -> str:
    """Return the command that adds an extra of this package to the Python that runs.

    The package is on no index. Where it is installed, pip needs none for it; elsewhere this names its folder.
    """
    try:
        importlib.metadata.distribution("p2p-diloco")
        package = ["p2p-diloco"]
    except importlib.metadata.PackageNotFoundError:
        package = ["-e", str(Path(__file__).parent.parent)]
    return shlex.join([sys.executable, "-m", "pip", "install", *package[:-1], f"{package[-1]}[{extra}]"])


def short_peer(text: str) -> str:
    """Shorten a peer's text id to `..x7Yz9fQ4` for a table: the eight characters that lines of the log show too."""
    return text if len(text) <= 10 else f"..{text[-8:]}"


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


def _scaled(value: float, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= _STEP and power < len(units) - 1:
        value, power = value / _STEP, power + 1
    digits = 0 if power == 0 and value == int(value) else 1
    return f"{value:.{digits}f}{units[power]}"
