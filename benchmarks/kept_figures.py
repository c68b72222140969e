"""The documents of benches that a folder keeps, one JSON file each, as `python -m benchmarks ... --json` wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_diloco.errors import StateError

BENCHES = ("averaging", "vectors", "state", "training", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One file.

    Attributes:
        name: of the file, without its suffix.
        figures: all that the document says.
    """

    name: str
    figures: Mapping[str, Any]

    @property
    def bench(self) -> str:
        """Which bench wrote it."""
        return str(self.figures["command"]).split()[0]


def read_kept(folder: Path) -> tuple[Kept, ...]:
    """Return all that a folder keeps: bench by bench, small before large.

    Raises:
        StateError: a file is no document of a bench, or one of a version that named neither command nor machine.
    """
    return tuple(sorted((_read(path) for path in folder.glob("*.json")), key=_place))


def _read(path: Path) -> Kept:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        kept = Kept(name=path.stem, figures=figures)
        if kept.bench in BENCHES and figures["machine"]:
            return kept
    except (OSError, ValueError, TypeError, LookupError):
        pass
    raise StateError(
        f"{path.name} is no document of python -m benchmarks with its command and its machine; take it again with "
        "--json, or remove it"
    )


def _place(kept: Kept) -> tuple[int, int, int, str]:
    size = kept.figures.get("megabytes", kept.figures.get("parameters", 0))
    return BENCHES.index(kept.bench), kept.figures.get("peers", 0), size, kept.name
