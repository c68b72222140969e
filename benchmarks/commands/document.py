"""The document that every bench writes for `--json`: its command, its figures, and the machine."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PATHS = frozenset({"json"})
"""Options that name files: of no use to who measures again."""


def bench_document(
    name: str, options: DataclassInstance, figures: Mapping[str, Any], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the document of a bench: its figures under their own names, `command` and `machine` beside."""
    return {"command": command_words(name, options), **figures, "machine": dict(machine)}


def command_words(name: str, options: DataclassInstance) -> str:
    """Return the words after `python -m benchmarks` that measure the same again, with defaults: those may change."""
    words = [name]
    for field in dataclasses.fields(options):
        if field.name not in _PATHS:
            words += [f"--{field.name.replace('_', '-')}", str(getattr(options, field.name))]
    return shlex.join(words)
