"""The outer step of the anchor along the agreed update, and the merge, by which what the island trains follows it.

The outer step is one Nesterov step, bitwise identical on every machine.

The merge `keep` moves the local parameters along with the anchor and removes what was sent, whether or not it was
included: what was not sent (codec error, clipped part, steps since the snapshot) stays in θ and is part of the next Δ.
There is no error-feedback buffer: the residual is in the weights. `blend` mixes local and anchor; with alpha 0 it
overwrites local.

Legend: N = elements of one span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from p2p_diloco.codec.codes import Rates
from p2p_diloco.codec.vectors import (
    BLOCK,
    LARGEST_RATE,
    SMALLEST_RATE,
    Vector,
    count_non_finite,
    is_finite,
    iterate_blocks,
    with_loop,
    zero_small,
)
from p2p_diloco.errors import ConfigError, NonFiniteUpdate
from p2p_diloco.memory.slabs import empty_vector

_KINDS = ("keep", "blend")
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

    @property
    def rates(self) -> Rates:
        """η and μ in float32."""
        return np.float32(self.learning_rate), np.float32(self.momentum)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRule:
    """The rule by which local parameters follow the anchor; part of the manifest.

    Attributes:
        kind: `keep` or `blend`.
        alpha: for `blend`, the *local* share (torchft's `fragment_update_alpha`); 0.0 with `keep`.
    """

    kind: Literal["keep", "blend"] = "keep"
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"merge is {self.kind!r}; expected one of {', '.join(_KINDS)}")
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"fragment_update_alpha is {self.alpha}; expected 0 to 1, the local share")
        if self.kind != "blend" and self.alpha != 0.0:
            raise ConfigError(
                f"fragment_update_alpha is {self.alpha} but merge is {self.kind!r}; set merge to 'blend' or alpha to 0"
            )

    @property
    def in_flight_share(self) -> float:
        """Factor by which a merge multiplies the contributions still in flight: 1 for `keep`, otherwise alpha."""
        return 1.0 if self.kind == "keep" else self.alpha


def apply_outer_step(anchor_N: Vector, momentum_N: Vector, update_N: Vector, rule: OuterRule) -> tuple[Vector, Vector]:
    """Move the anchor one Nesterov step along the agreed update: m ← μ m + g; φ ← φ − η (g + μ m).

    Peers given the same bytes must return the same bytes: float32 on the host, with separate multiply and add. Values
    too small for the agreed state become zero, so that a thread that flushes subnormal numbers
    (`torch.set_flush_denormal`) gets the same bytes; see `codec/vectors.py`.

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
    Source: DiLoCo, arXiv 2311.08105, algorithm 1; Nesterov as in torch.optim.SGD. Momentum 0.3 instead of 0.9 for
        asynchrony.
    """
    assert anchor_N.shape == momentum_N.shape == update_N.shape, "the span's vectors differ in length"
    next_anchor_N, next_momentum_N = empty_vector(len(anchor_N)), empty_vector(len(momentum_N))
    # A non-finite g or m makes φ non-finite too (0 · inf is NaN), so checking φ is enough.
    if not outer_step(anchor_N, momentum_N, update_N, rule.rates, next_anchor_N, next_momentum_N):
        raise NonFiniteUpdate(
            f"the update holds {count_non_finite(update_N)} and the step along it {count_non_finite(next_anchor_N)} "
            f"non-finite numbers among {len(update_N)}; the span is skipped this round"
        )
    return next_anchor_N, next_momentum_N


@with_loop(fewest=BLOCK, of_vectors=True)
def outer_step(
    anchor_N: Vector, momentum_N: Vector, update_N: Vector, rates: Rates, next_anchor_N: Vector, next_momentum_N: Vector
) -> bool:
    """m ← μ m + g; φ ← φ − η (g + μ m); too small values become zero. False if an element of φ is not finite."""
    rate, momentum = rates
    with np.errstate(over="ignore", invalid="ignore"):
        for block in iterate_blocks(len(anchor_N)):
            update_B, momentum_B, anchor_B = update_N[block], next_momentum_N[block], next_anchor_N[block]
            np.multiply(momentum_N[block], momentum, out=momentum_B)
            np.add(momentum_B, update_B, out=momentum_B)
            zero_small(momentum_B)
            np.multiply(momentum_B, momentum, out=anchor_B)
            np.add(update_B, anchor_B, out=anchor_B)
            np.multiply(anchor_B, rate, out=anchor_B)
            np.subtract(anchor_N[block], anchor_B, out=anchor_B)
            zero_small(anchor_B)
    return is_finite(next_anchor_N)


def merge_local(
    local_N: Vector, anchor_before_N: Vector, anchor_after_N: Vector, resolved_N: Vector | None, rule: MergeRule
) -> Vector:
    """Move the local parameters along with the anchor by one entry (or by a replacement of the span).

    `keep`: θ + (φ_new − φ_old) + c, so that φ − θ − Σ in-flight is unchanged. `blend`: α θ + (1 − α) φ_new; the caller
    multiplies what remains in flight by `rule.in_flight_share`.

    Args:
        local_N: θ, float32, shape (N,). Not changed.
        anchor_before_N, anchor_after_N: φ before and after the entry. Not changed.
        resolved_N: our whole decoded contribution of the entry's round, included or not; None if none is in flight.
        rule: from the manifest.
    Returns:
        The next θ, freshly allocated.
    """
    if rule.kind != "keep":
        return _blend(local_N, anchor_after_N, rule.alpha)
    merged_N = np.empty_like(local_N)
    if resolved_N is not None:
        follow(local_N, anchor_before_N, anchor_after_N, resolved_N, merged_N)
        return merged_N
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add(local_N, np.subtract(anchor_after_N, anchor_before_N, out=merged_N), out=merged_N)


@with_loop(fewest=BLOCK, of_vectors=True)
def follow(local_N: Vector, before_N: Vector, after_N: Vector, leaving_N: Vector, merged_N: Vector) -> None:
    """θ + ((φ_new − φ_old) + c). The small terms come first: c nearly cancels the move, so θ is rounded only once."""
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged θ is handled by its island, not by the merge
        for block in iterate_blocks(len(local_N)):
            merged_B = merged_N[block]
            np.subtract(after_N[block], before_N[block], out=merged_B)
            np.add(merged_B, leaving_N[block], out=merged_B)
            np.add(local_N[block], merged_B, out=merged_B)


def _blend(local_N: Vector, anchor_after_N: Vector, alpha: float) -> Vector:
    if alpha == 0.0:
        return anchor_after_N.copy()  # not 0 · θ + φ: overwriting also repairs a non-finite θ
    local_share, anchor_share = np.float32(alpha), np.float32(1.0 - alpha)
    merged_N = np.empty_like(local_N)
    for block in iterate_blocks(len(local_N)):
        np.multiply(local_N[block], local_share, out=merged_N[block])
        np.add(merged_N[block], np.multiply(anchor_after_N[block], anchor_share), out=merged_N[block])
    return merged_N
