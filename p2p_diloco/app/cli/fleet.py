"""The machines of `plan --islands 1xH100,4xlaptop`: the speed of each kind, and its share of a run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from p2p_diloco.config.rounds import DAY_SECONDS, Plan, Question
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.batch_size import LARGEST_BATCH, batch_sizes, nearest_size
from p2p_diloco.rate import WIRE_SHARE, check_count, check_positive

REACHED_SHARE = 0.4
"""Share of the peak that training reaches, as it did for large models (38 to 43 %, arXiv 2407.21783). Small models and
small steps reach far less of a GPU."""
PEAK_TFLOPS = {
    "h200": 989, "h100": 989, "a100": 312, "l40s": 362, "l4": 121, "t4": 65, "rtx4090": 165, "rtx3090": 71,
    "desktop": 1.0, "laptop": 0.5,
}  # fmt: skip
"""Dense peak by kind: with 16 bits, as NVIDIA states it; of a desktop or laptop without a GPU, float32 on 16 or 8
cores."""
LEAST_STEP_SECONDS = 0.02
"""Shortest step that is assumed: a step of a model of 0.1 M parameters took 23 ms on an H100, all of it the host's
(research/lab-log.md)."""
OPERATIONS = 6.0
"""Floating-point operations per parameter and token, forward and backward (arXiv 2001.08361)."""
_GROUP = re.compile(r"(?:(\d+)\s*x\s*)?(?:(\d+\.?\d*)\s*(tflops|tokens/s)|([a-z0-9][a-z0-9 -]*))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Islands of one kind; `assumed_tflops` is what each reaches if the speed is that of the table."""

    kind: str
    count: int
    tokens_per_second: float
    assumed_tflops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The share of a run of each machine of a kind.

    Attributes:
        windows: its batch.
        token_share, equal_share: its share of the run's tokens, and of the weight where none counts for more than most.
        day_bytes: bytes that it sends and receives in a day, on the wire.
    """

    kind: str
    count: int
    windows: int
    cycle_steps: float
    hour_tokens: float
    token_share: float
    equal_share: float
    day_bytes: float


def parse_islands(text: str, name: str, parameters: int, step_tokens: int) -> tuple[Machines, ...]:
    """Parse `1xH100,4xlaptop`, `2x40TFLOPS`, `3x1300tokens/s`; nothing for a plain number of islands.

    Args:
        step_tokens: tokens of a planned step.
    Raises:
        ConfigError: it is neither, or names an unknown kind.
    """
    if re.fullmatch(r"\s*[+-]?\d+\s*", text):
        check_count(int(text), name)
        return ()
    fastest = LARGEST_BATCH * step_tokens / LEAST_STEP_SECONDS
    return tuple(_parse_group(group.strip(), name, parameters, fastest) for group in text.split(","))


def _parse_group(text: str, name: str, parameters: int, fastest: float) -> Machines:
    found = _GROUP.fullmatch(text.lower())
    if found is None:
        raise ConfigError(
            f"{name} has {text!r}; expected a number of islands, or counts of kinds such as 1xH100,4xlaptop, "
            "2x40TFLOPS or 3x1300tokens/s"
        )
    count, kind, rate = int(found[1] or 1), (found[4] or "").replace(" ", "").replace("-", ""), 1e12 / parameters
    check_count(count, f"the count of {name} {text}")
    if found[2] is not None:
        check_positive(float(found[2]), f"the speed of {name} {text}", "40TFLOPS")
        speed = float(found[2]) * (rate / OPERATIONS if found[3] == "tflops" else 1.0)
        return Machines(
            kind=f"{found[2]} {found[3].replace('tf', 'TF').replace('lops', 'LOPS')}",
            count=count,
            tokens_per_second=speed,
        )
    if kind not in PEAK_TFLOPS:
        near = difflib.get_close_matches(kind, PEAK_TFLOPS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{name} names {found[4]!r}; {hint}known are {', '.join(PEAK_TFLOPS)}, or give the speed that training "
            "reaches, such as 2x40TFLOPS or 3x1300tokens/s"
        )
    speed = min(REACHED_SHARE * PEAK_TFLOPS[kind] * rate / OPERATIONS, fastest)
    return Machines(kind=kind, count=count, tokens_per_second=speed, assumed_tflops=speed * OPERATIONS / rate)


def middle_speed(fleet: Sequence[Machines]) -> float:
    """Return the tokens per second of the middle island (the slower of two), which a run is planned for."""
    ordered = sorted(fleet, key=lambda each: each.tokens_per_second)
    upto = list(accumulate(each.count for each in ordered))
    return next(each.tokens_per_second for each, last in zip(ordered, upto, strict=True) if upto[-1] <= 2 * last)


def contributions(
    fleet: Sequence[Machines], question: Question, plan: Plan, *, windows: int, context: int
) -> tuple[Contribution, ...]:
    """Return what each kind adds; the time of a step is taken to grow with its windows.

    Args:
        windows: windows of a planned step.
        context: tokens of a window.
    """
    most = middle_speed(fleet)
    total = sum(each.count * each.tokens_per_second for each in fleet)
    weight = sum(each.count * min(each.tokens_per_second, most) for each in fleet)
    cycle_bytes = WIRE_SHARE * question.parameters * (plan.bytes_per_parameter + plan.received_per_parameter)
    added = []
    for each in fleet:
        cycle_windows = each.tokens_per_second * plan.cycle_seconds / context
        size = nearest_size(batch_sizes(windows), cycle_windows / plan.steps)
        added.append(
            Contribution(
                kind=each.kind,
                count=each.count,
                windows=size,
                cycle_steps=cycle_windows / size,
                hour_tokens=3600.0 * each.tokens_per_second * plan.utilisation,
                token_share=each.tokens_per_second / total,
                equal_share=min(each.tokens_per_second, most) / weight,
                day_bytes=cycle_bytes * DAY_SECONDS / plan.cycle_seconds,
            )
        )
    return tuple(added)
