"""The document that each benchmark writes for `--json`: command, figures and machine."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PATHS = frozenset({"json", "costs"})
"""Options that name files, and are left out of the recorded command."""


def bench_document(
    name: str, options: DataclassInstance, figures: Mapping[str, Any], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the document of a benchmark: its figures, with `command` and `machine` added."""
    return {"command": command_words(name, options), **figures, "machine": dict(machine)}


def command_words(name: str, options: DataclassInstance) -> str:
    """Return the arguments of `python -m benchmarks` that repeat a measurement, with defaults, as these may change."""
    words = [name]
    for field in dataclasses.fields(options):
        if field.name not in _PATHS:
            words += [f"--{field.name.replace('_', '-')}", str(getattr(options, field.name))]
    return shlex.join(words)
