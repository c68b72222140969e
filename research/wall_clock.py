"""Estimated duration of a trial at a given upload rate, from its bytes and steps.

Islands compute in parallel at the same speed. Data-parallel sends after every step, and may send gradients while it
computes the rest of the step. Overlapping systems send while they train; blocking systems train, then send. Nothing is
lost or late, and latency is zero, which favours systems that wait.
"""

from __future__ import annotations

from research.setting import PARTED, Outcome, Setting

OVERLAPPING = PARTED | {"data-parallel", "data-parallel-int4"}
"""Systems that train while they send; others wait."""


def tick_seconds(
    setting: Setting, outcome: Outcome, *, parameters: int, step_seconds: float, bits_per_second: float
) -> float:
    """Return the average duration of a tick.

    Args:
        outcome: outcome of the trial, with the bytes sent per parameter.
        parameters: number of parameters of the model.
        step_seconds: duration of an inner step of an island; a step of data-parallel takes as long, as its batch is
            spread over all islands.
        bits_per_second: upload rate of an island.
    """
    line = 8.0 * outcome.bytes_sent_per_parameter * parameters / bits_per_second / setting.ticks
    return max(step_seconds, line) if setting.system in OVERLAPPING else step_seconds + line


def ticks_to_loss(outcome: Outcome, loss: float) -> float | None:
    """Return the number of ticks after which a trial's curve reaches a loss, or None if it never does.

    Points are interpolated linearly. A loss reached before the first point counts as reached at this point.
    """
    before: tuple[int, float] | None = None
    for tick, value in outcome.curve:
        if value <= loss:
            if before is None:
                return float(tick)
            return before[0] + (tick - before[0]) * (before[1] - loss) / (before[1] - value)
        before = (tick, value)
    return None
