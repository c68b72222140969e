"""The pseudo-gradient: an island's distance from the anchor, less what it has already sent.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2p_diloco.outer.vector import Vector, euclidean_norm

# Scaling rounds every element by up to 2⁻²⁴ of itself, and the factor likewise: this margin keeps the clipped norm
# within the limit in spite of both.
_CLIP_MARGIN = 1.0 - 2.0**-22


def pseudo_gradient(anchor_N: Vector, local_N: Vector, in_flight: Sequence[Vector]) -> Vector:
    """Return Δ = φ − θ − Σ in-flight c; a descent direction, to be subtracted.

    Contributions in flight are still in θ but already sent. Sending them again would count them twice, and with an
    exchange longer than a cycle the residual would oscillate or grow.

    Args:
        anchor_N: φ, float32, shape (N,). Not changed.
        local_N: θ, same shape. Not changed.
        in_flight: unresolved decoded contributions, in order of rounds. Not changed.
    Returns:
        Δ, freshly allocated. Not finite where θ is not.
    """
    delta_N = np.empty_like(anchor_N)
    with np.errstate(over="ignore", invalid="ignore"):
        np.subtract(anchor_N, local_N, out=delta_N)
        for decoded_N in in_flight:
            np.subtract(delta_N, decoded_N, out=delta_N)
    return delta_N


def clip_to_norm(delta_N: Vector, limit: float) -> tuple[Vector, float]:
    """Scale Δ to a norm of at most `limit`, keeping its direction.

    The clipped part is not lost: it stays in θ and is part of the next Δ.

    Args:
        delta_N: Δ, float32, shape (N,). Not changed.
        limit: largest Euclidean norm allowed; infinity for none.
    Returns:
        The clipped Δ (the same array if it is within the limit) and its norm before clipping; with a non-finite norm
        nothing is clipped.
    """
    norm = euclidean_norm(delta_N)
    if not limit < norm < float("inf"):
        return delta_N, norm
    return np.multiply(delta_N, np.float32(limit / norm * _CLIP_MARGIN)), norm
