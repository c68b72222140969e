"""How long a trial would take over a line of some rate: from the bytes that it counted and the steps that it made.

Islands compute side by side, each a step at a time, all at one speed. Data-parallel sends after every step and may send
a step's gradients while it still works on the rest of that step; who overlaps sends while it goes on training; who
blocks trains, then sends. Nothing is lost, nobody is late, latency is nought: kind to whoever waits.
"""

from __future__ import annotations

from research.setting import PARTED, Outcome, Setting

OVERLAPPING = PARTED | {"data-parallel"}
"""Systems that train while they send; the others wait."""


def tick_seconds(
    setting: Setting, outcome: Outcome, *, parameters: int, step_seconds: float, bits_per_second: float
) -> float:
    """Return how long a tick takes, on the average of the run.

    Args:
        outcome: how many bytes an island sent per parameter.
        parameters: of the model.
        step_seconds: of an inner step of an island; one of data-parallel takes as long, its batch being spread.
        bits_per_second: that an island can send.
    """
    line = 8.0 * outcome.bytes_sent_per_parameter * parameters / bits_per_second / setting.ticks
    return max(step_seconds, line) if setting.system in OVERLAPPING else step_seconds + line


def ticks_to_loss(outcome: Outcome, loss: float) -> float | None:
    """Return after how many ticks a trial's curve falls to a loss, between points on a straight line; None: never.

    Before the first point nothing is known; a loss that is reached there counts as reached at it.
    """
    before: tuple[int, float] | None = None
    for tick, value in outcome.curve:
        if value <= loss:
            if before is None:
                return float(tick)
            return before[0] + (tick - before[0]) * (before[1] - loss) / (before[1] - value)
        before = (tick, value)
    return None
