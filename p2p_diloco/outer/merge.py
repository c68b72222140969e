"""The merge: how an entry changes the parameters that the island trains.

`keep` moves the local parameters along with the anchor and removes what was sent, whether or not it was included: what
was not sent (codec error, clipped part, steps since the snapshot) stays in θ and is part of the next Δ. There is no
error-feedback buffer: the residual is in the weights. `blend` mixes local and anchor; with alpha 0 it overwrites local.

Legend: N = elements of one span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from p2p_diloco.errors import ConfigError
from p2p_diloco.kernels.operations import follow, iterate_blocks
from p2p_diloco.outer.vector import Vector

_KINDS = ("keep", "blend")


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


def merge_local(
    local_N: Vector, anchor_before_N: Vector, anchor_after_N: Vector, resolved_N: Vector | None, rule: MergeRule
) -> Vector:
    """Move the local parameters along with the anchor by one entry (or by a replacement of the span).

    `keep`: θ + (φ_new − φ_old) + c, so that φ − θ − Σ in-flight is unchanged. `blend`: α θ + (1 − α) φ_new; the caller
    multiplies what remains in flight by `rule.in_flight_share`.

    Args:
        local_N: θ, float32, shape (N,). Not changed.
        anchor_before_N: φ before the entry. Not changed.
        anchor_after_N: φ after the entry. Not changed.
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


def _blend(local_N: Vector, anchor_after_N: Vector, alpha: float) -> Vector:
    if alpha == 0.0:
        return anchor_after_N.copy()  # not 0 · θ + φ: overwriting also repairs a non-finite θ
    local_share, anchor_share = np.float32(alpha), np.float32(1.0 - alpha)
    merged_N = np.empty_like(local_N)
    for block in iterate_blocks(len(local_N)):
        np.multiply(local_N[block], local_share, out=merged_N[block])
        np.add(merged_N[block], np.multiply(anchor_after_N[block], anchor_share), out=merged_N[block])
    return merged_N
