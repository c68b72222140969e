"""Lies of an island: what it sends in place of its contributions (SECURITY.md, "What is not defended")."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from p2p_diloco.codec.vectors import BLOCK, Vector, num_blocks
from p2p_diloco.errors import ConfigError
from p2p_diloco.span_log import LONGEST_BLOCK

VAST_CLAIM = 10**6
"""Factor by which a liar multiplies the tokens that it claims."""
_SLACK = np.float32(0.98)  # rounding to four bits may lengthen a vector


class Liar:
    """One lying island. It trains like the others, and lies about what it has learnt.

    Args:
        lie: name of the lie; empty: none.
        others: contributions to the round under way by fragment, of islands that were asked before.
    """

    def __init__(self, lie: str, others: Mapping[int, Sequence[Vector]]) -> None:
        name, _, claim = lie.partition("+")
        if lie and (name not in LIES or lie not in (name, f"{name}+claim")):
            raise ConfigError(f"unknown lie {lie!r}; expected one of {', '.join(LIES)}, each also with +claim")
        self.claims = VAST_CLAIM if claim else 1
        self._lie = LIES[name] if lie else None
        self._others = others
        self._last: dict[int, Vector] = {}

    def instead_of(self, honest_N: Vector, fragment: int, limit: float) -> Vector:
        """Return what is sent.

        Args:
            honest_N: the contribution of an honest island.
            limit: largest norm that reducers accept.
        """
        assert self._lie is not None, "only a liar lies"
        drift_N = self._last.setdefault(fragment, _drift(len(honest_N), fragment))
        return self._lie(honest_N, self._others[fragment], drift_N, limit)


Lie = Callable[[Vector, Sequence[Vector], Vector, float], Vector]
"""From the honest contribution, those of others, a fixed direction, and the norm limit."""


def _drift(elements: int, fragment: int) -> Vector:
    drift_N: Vector = np.random.default_rng(fragment).standard_normal(elements).astype(np.float32)
    return drift_N


def _at(vector_N: Vector, norm: float) -> Vector:
    length = float(np.linalg.norm(vector_N))
    return vector_N * (np.float32(norm / length) * _SLACK) if length else vector_N


def _one_block(vector_N: Vector, limit: float) -> Vector:
    """Return the block of the vector that is longest, at the limit, and zeros elsewhere."""
    lengths = [float(np.linalg.norm(vector_N[b * BLOCK : (b + 1) * BLOCK])) for b in range(num_blocks(len(vector_N)))]
    alone_N = np.zeros_like(vector_N)
    block = int(np.argmax(lengths))
    here = slice(block * BLOCK, (block + 1) * BLOCK)
    alone_N[here] = vector_N[here]
    return _at(alone_N, limit)


def _mean(others: Sequence[Vector]) -> Vector:
    mean_N: Vector = np.mean(np.stack(others), axis=0, dtype=np.float32)
    return mean_N


def _flip_in_blocks(others: Sequence[Vector], limit: float, *, flipped: int = 1) -> Vector:
    """Return the direction of the others' mean, each block as long as counts, with minus in each `flipped`-th block."""
    mean_N = _mean(others)
    padded = num_blocks(len(mean_N)) * BLOCK
    stacked_PBK = np.stack([np.pad(one_N, (0, padded - len(one_N))).reshape(-1, BLOCK) for one_N in others])
    medians_B = np.sort(np.linalg.norm(stacked_PBK, axis=2), axis=0)[(len(others) - 1) // 2]
    blocks_BK = np.pad(mean_N, (0, padded - len(mean_N))).reshape(-1, BLOCK)
    lengths_B = np.linalg.norm(blocks_BK, axis=1)
    longest_B = _SLACK * LONGEST_BLOCK * medians_B
    factors_B = np.divide(longest_B, lengths_B, out=np.zeros_like(lengths_B), where=lengths_B > 0)
    factors_B[::flipped] *= -1.0
    long_N: Vector = (blocks_BK * factors_B[:, None]).astype(np.float32).reshape(-1)[: len(mean_N)]
    return long_N if float(np.linalg.norm(long_N)) < limit else _at(long_N, limit)


LIES: dict[str, Lie] = {
    "flip": lambda honest_N, others, drift_N, limit: -honest_N,
    "flip-longest": lambda honest_N, others, drift_N, limit: _at(-honest_N, limit),
    "flip-mean": lambda honest_N, others, drift_N, limit: _at(-_mean(others), limit),
    "one-block": lambda honest_N, others, drift_N, limit: _one_block(-honest_N, limit),
    "drift": lambda honest_N, others, drift_N, limit: _at(drift_N, limit),
    "drift-short": lambda honest_N, others, drift_N, limit: _at(drift_N, float(np.linalg.norm(honest_N))),
    "copy": lambda honest_N, others, drift_N, limit: others[0],
    "zeros": lambda honest_N, others, drift_N, limit: np.zeros_like(honest_N),
    "flip-in-blocks": lambda honest_N, others, drift_N, limit: _flip_in_blocks(others, limit),
    "flip-half": lambda honest_N, others, drift_N, limit: _flip_in_blocks(others, limit, flipped=2),
}
"""Lies by name. `flip-mean` is made for equal weights, `flip-in-blocks` for the limit on blocks, and `flip-half` for
that and for the comparison of directions: it agrees with the others in every second block."""
