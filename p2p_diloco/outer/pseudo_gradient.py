"""The pseudo-gradient: how far an island has come from the anchor, less what it has already sent.

Legend: N = elements of one span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2p_diloco.outer.vector import Vector, euclidean_norm, iterate_blocks, loops_for, read_only

# Scaling rounds every element by up to 2⁻²⁴ of itself, and the factor by as much: this little less keeps the clipped
# norm at or under the limit in spite of both.
_CLIP_MARGIN = 1.0 - 2.0**-22


def pseudo_gradient(anchor_N: Vector, local_N: Vector, in_flight: Sequence[Vector]) -> Vector:
    """Return Δ = φ − θ − Σ in-flight c; a descent direction, so whoever applies it subtracts it.

    What is in flight is still in θ but already sent. Sending it again would count it twice, and with an exchange longer
    than a cycle the residual would oscillate or grow.

    Args:
        anchor_N: φ, float32, shape (N,). Not changed.
        local_N: θ, same shape. Not changed.
        in_flight: decoded contributions that no entry has resolved yet, in order of rounds. Not changed.
    Returns:
        Δ, freshly allocated. Non-finite where θ is.
    """
    delta_N = np.empty_like(anchor_N)
    loops = loops_for(anchor_N, local_N, *in_flight)
    if loops is not None:
        loops.difference(read_only(anchor_N), read_only(local_N), delta_N)
        for decoded_N in in_flight:
            loops.subtract(read_only(decoded_N), delta_N)
        return delta_N
    with np.errstate(over="ignore", invalid="ignore"):
        for block in iterate_blocks(len(anchor_N)):
            np.subtract(anchor_N[block], local_N[block], out=delta_N[block])
            for decoded_N in in_flight:
                np.subtract(delta_N[block], decoded_N[block], out=delta_N[block])
    return delta_N


def clip_to_norm(delta_N: Vector, limit: float) -> tuple[Vector, float]:
    """Shrink Δ to a norm of at most `limit`; its direction stays.

    What is cut off is not lost: it stays in θ and is part of the next Δ.

    Args:
        delta_N: Δ, float32, shape (N,). Not changed.
        limit: largest Euclidean norm allowed; infinity for none.
    Returns:
        The clipped Δ (the same array when it fits) and its norm before clipping; a norm that is not finite clips
        nothing.
    """
    norm = euclidean_norm(delta_N)
    if not limit < norm < float("inf"):
        return delta_N, norm
    return np.multiply(delta_N, np.float32(limit / norm * _CLIP_MARGIN)), norm
