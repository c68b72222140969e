"""The reports of the benchmarks: progress, a table, and a document with command, figures and machine."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.options import BenchOptions
from p2p_diloco.app.cli.output import STANDARD_OUTPUT, write_figures
from p2p_diloco.errors import ConfigError

_PATHS = frozenset({"json", "costs"})
"""Options that name files, and are left out of the recorded command."""


def check_linux(name: str, needed: str) -> None:
    """Refuse to measure on another system than Linux.

    Raises:
        ConfigError: this is another system.
    """
    if sys.platform != "linux":
        raise ConfigError(f"the {name} benchmark needs {needed}; run it on Linux")


def show(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def report(
    name: str,
    options: BenchOptions,
    figures: Mapping[str, Any],
    machine: Mapping[str, Any],
    lines: Sequence[str],
) -> None:
    """Write the document of a benchmark to the file that `--json` names, and print the table unless that was printed.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_figures(options.json, bench_document(name, options, figures, machine))
    if options.json != STANDARD_OUTPUT:
        print("\n".join(lines))


def bench_document(
    name: str, options: BenchOptions, figures: Mapping[str, Any], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the document of a benchmark: its figures, with `command` and `machine` added."""
    return {"command": command_words(name, options), **figures, "machine": dict(machine)}


def command_words(name: str, options: BenchOptions) -> str:
    """Return the arguments of `python -m benchmarks` that repeat a measurement, with defaults, as these may change."""
    words = [name]
    for field in dataclasses.fields(options):
        if field.name not in _PATHS:
            words += [f"--{field.name.replace('_', '-')}", str(getattr(options, field.name))]
    return shlex.join(words)
