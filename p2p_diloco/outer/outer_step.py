"""The outer step: one Nesterov step of the anchor along the agreed update, bitwise identical on every machine.

Legend: N = elements of one span.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from p2p_diloco.errors import ConfigError, NonFiniteUpdate
from p2p_diloco.kernels.bounds import LARGEST_RATE, SMALLEST_RATE
from p2p_diloco.kernels.operations import outer_step
from p2p_diloco.memory.slabs import empty_vector
from p2p_diloco.outer.vector import Vector, count_non_finite

FALL_STARTS = 0.75
"""Share of the planned entries after which the outer rate falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterRule:
    """The rule by which the anchor follows updates; part of the manifest.

    Attributes:
        learning_rate: outer learning rate η.
        momentum: outer Nesterov momentum μ; 0.0 is plain SGD.
        final_share: share of η left after the planned entries; it falls over the last quarter of them.
        planned_entries: number of entries that each span is planned to get; None: η stays as it is.
    """

    learning_rate: float = 0.7
    momentum: float = 0.3
    final_share: float = 1.0
    planned_entries: int | None = None

    def __post_init__(self) -> None:
        if not SMALLEST_RATE <= self.learning_rate <= LARGEST_RATE:
            least, most = f"{SMALLEST_RATE:.3g}", f"{LARGEST_RATE:g}"
            raise ConfigError(f"outer learning_rate is {self.learning_rate}; expected a number from {least} to {most}")
        if self.momentum != 0.0 and not SMALLEST_RATE <= self.momentum < 1.0:
            least = f"{SMALLEST_RATE:.3g}"
            raise ConfigError(f"outer momentum is {self.momentum}; expected 0, or from {least} to less than 1")
        if not 0.0 < self.final_share <= 1.0:
            raise ConfigError(f"outer final_share is {self.final_share}; expected more than 0, and at most 1")

    def at(self, height: int) -> OuterRule:
        """Return the rule of a span that has absorbed `height` entries: the same on all peers, whatever their clocks.

        The rate is constant for the first three quarters of the planned entries, then falls linearly, and stays at its
        final share after them.
        """
        if self.planned_entries is None or self.final_share == 1.0:
            return self
        late = min(1.0, max(0.0, (height / self.planned_entries - FALL_STARTS) / (1.0 - FALL_STARTS)))
        rate = self.learning_rate * (1.0 - (1.0 - self.final_share) * late)
        return OuterRule(learning_rate=max(SMALLEST_RATE, rate), momentum=self.momentum)


def apply_outer_step(anchor_N: Vector, momentum_N: Vector, update_N: Vector, rule: OuterRule) -> tuple[Vector, Vector]:
    """Move the anchor one Nesterov step along the agreed update: m ← μ m + g; φ ← φ − η (g + μ m).

    Peers given the same bytes must return the same bytes: float32 on the host, with separate multiply and add. Values
    too small for the agreed state become zero, so that a thread that flushes subnormal numbers
    (`torch.set_flush_denormal`) gets the same bytes; see `kernels/bounds.py`.

    Args:
        anchor_N: the span as all peers hold it; float32, shape (N,). Not changed.
        momentum_N: outer momentum, same shape; zeros before the first round. Not changed.
        update_N: decoded update, a mean of `anchor - local`, plain or radial: a descent direction, to be subtracted.
        rule: outer learning rate and momentum, from the manifest.
    Returns:
        The next anchor and momentum, freshly allocated.
    Raises:
        NonFiniteUpdate: `update_N`, or the step along it, holds a NaN or an infinity. This cannot happen with a sound
            state and a decoded update, so the memory of one of them is damaged.
    Source: DiLoCo, arXiv 2311.08105, algorithm 1; Nesterov as in torch.optim.SGD. Momentum 0.5 instead of 0.9 for
        asynchrony.
    """
    assert anchor_N.shape == momentum_N.shape == update_N.shape, "the span's vectors differ in length"
    next_anchor_N, next_momentum_N = empty_vector(len(anchor_N)), empty_vector(len(momentum_N))
    rates = (np.float32(rule.learning_rate), np.float32(rule.momentum))
    # A non-finite g or m makes φ non-finite too (0 · inf is NaN), so checking φ is enough.
    if not outer_step(anchor_N, momentum_N, update_N, rates, next_anchor_N, next_momentum_N):
        raise NonFiniteUpdate(
            f"the update holds {count_non_finite(update_N)} and the step along it {count_non_finite(next_anchor_N)} "
            f"non-finite numbers among {len(update_N)}; the span is skipped this round"
        )
    return next_anchor_N, next_momentum_N
