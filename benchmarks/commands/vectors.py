"""`python -m benchmarks vectors`: measure the steps of a cycle, with compiled loops and with NumPy alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.averaging.our_run import check_codec
from benchmarks.commands.document import report
from benchmarks.machine import describe_machine
from benchmarks.options import VectorsOptions, check_within
from benchmarks.vectors import PARTS, StepFigures, measure_vectors
from p2p_diloco.app.cli.output import check_target
from p2p_diloco.rate import count_named


def bench_vectors(options: VectorsOptions) -> int:
    """Measure, print, and return the exit code, 0.

    Raises:
        ConfigError: an option is invalid.
    """
    elements = count_named(options.parameters)
    check_within("--repeat", options.repeat, 1)
    check_codec(options.codec)
    check_target(options.json)
    machine = describe_machine()
    steps = measure_vectors(codec_name=options.codec, elements=elements, repeats=options.repeat)
    figures = vectors_figures(options, elements, steps)
    report("vectors", options, figures, machine, vectors_lines(options.codec, steps))
    return 0


def vectors_figures(options: VectorsOptions, elements: int, steps: Sequence[StepFigures]) -> dict[str, Any]:
    """Return the document for `--json`, in nanoseconds of CPU time per element."""
    return {
        "codec": options.codec,
        "parameters": elements,
        "repeats": options.repeat,
        "steps": [dataclasses.asdict(step) for step in steps],
        "cycle": {"compiled": _cycle(steps, "compiled"), "numpy": _cycle(steps, "numpy")},
    }


def vectors_lines(codec: str, steps: Sequence[StepFigures]) -> list[str]:
    """Return the printed table."""
    lines = [
        f"{codec}, nanoseconds of one core per element: median and quartiles, compiled loops and NumPy alone in turn",
        f"{'':28}  ratio  compiled               numpy                  of all parameters",
    ]
    for step in steps:
        ratio = step.numpy.middle / step.compiled.middle
        share = f"{step.share:.2f}" if step.share else "not in the sum"
        lines.append(f"{step.name:<28}  {ratio:4.1f}x  {_words(step, 'compiled')}  {_words(step, 'numpy')}  {share}")
    compiled, numpy = _cycle(steps, "compiled"), _cycle(steps, "numpy")
    lines.append(f"{f'a cycle, {PARTS} peers':<28}  {numpy / compiled:4.1f}x  {compiled:6.2f}{'':15}  {numpy:6.2f}")
    return lines


def _cycle(steps: Sequence[StepFigures], which: str) -> float:
    return float(sum(step.share * getattr(step, which).middle for step in steps))


def _words(step: StepFigures, which: str) -> str:
    spread = getattr(step, which)
    return f"{spread.middle:6.2f} ({spread.low:5.2f}–{spread.high:5.2f})"
