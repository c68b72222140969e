"""Benchmark results in a folder: JSON files written by `python -m benchmarks ... --json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_diloco.errors import StateError

BENCHES = ("averaging", "vectors", "state", "training", "memory", "failures", "goodput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One results file.

    Attributes:
        name: name of the file, without its suffix.
        figures: contents of the document.
    """

    name: str
    figures: Mapping[str, Any]

    @property
    def bench(self) -> str:
        """Name of the benchmark that wrote the file."""
        return str(self.figures["command"]).split()[0]


def read_kept(folder: Path) -> tuple[Kept, ...]:
    """Return all results in a folder, ordered by benchmark, then by size.

    Raises:
        StateError: a file is not a benchmark document, or is from a version that recorded no command and machine.
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
        f"{path.name} is not a document of python -m benchmarks with a command and a machine; measure it again with "
        "--json, or remove it"
    )


def _place(kept: Kept) -> tuple[int, int, int, str]:
    size = kept.figures.get("megabytes", kept.figures.get("parameters", 0))
    return BENCHES.index(kept.bench), kept.figures.get("peers", 0), size, kept.name
