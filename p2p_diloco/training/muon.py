"""Muon: momentum whose matrices are made orthogonal, for the matrices of the blocks.

PyTorch's own (`torch.optim.Muon`) makes them so one by one and in bfloat16, for which most processors of laptops have
no instructions: a step of the small model takes ten times as long there. Here it is float32 on a processor, and
matrices of a shape go together. Where there is a GPU it is bfloat16 as well.

Source: Jordan et al. 2024, Muon (the iteration and its coefficients); Liu et al., arXiv 2502.16982 (steps as long as
AdamW's, so that one rate and one decay serve both).

Legend: B = matrices of a shape, m ≤ n = their short and their long side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2
"""Of a step over its rate, that of AdamW's steps."""
_TINY = 1e-7
_MOST_STACKED = 1 << 18
"""Elements that are worked on together: small matrices gain by company, large ones would only take memory."""


def orthogonal(matrices_Bmn: torch.Tensor) -> torch.Tensor:
    """Return, for each matrix, one of the same singular vectors whose singular values are all close to 1.

    Five steps of a quintic Newton-Schulz iteration, which is in a hurry: they end between 0.7 and 1.2. A matrix of
    zeros stays one. Works in bfloat16 on a GPU, else in float32; returns float32.
    """
    a, b, c = COEFFICIENTS
    x_Bmn = matrices_Bmn.to(torch.bfloat16 if matrices_Bmn.is_cuda else torch.float32)
    x_Bmn = x_Bmn / x_Bmn.flatten(1).norm(dim=1).clamp(min=_TINY)[:, None, None]
    for _ in range(ITERATIONS):
        gram_Bmm = x_Bmn @ x_Bmn.mT
        x_Bmn = torch.baddbmm(x_Bmn, torch.baddbmm(gram_Bmm, gram_Bmm, gram_Bmm, beta=b, alpha=c), x_Bmn, beta=a)
    return x_Bmn.float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal; decay is decoupled.

    Args:
        groups: parameters, matrices all, and what differs between them.
        learning_rate: under the name `lr` in each group, as all optimisers have it.
        weight_decay: per step, times the rate.
        momentum: of the running mean of gradients.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        learning_rate: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step along the gradients that are there; nobody needs `closure`."""
        assert closure is None, "gradients are taken before"
        for group in self.param_groups:
            for stack in _stacks([matrix for matrix in group["params"] if matrix.grad is not None]):
                self._step_together(stack, group)

    def _step_together(self, stack: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        rows, columns = stack[0].shape
        is_tall = rows > columns
        updates_Bmn = torch.stack([_lying(self._direction(matrix, momentum), is_tall) for matrix in stack])
        length = RMS * math.sqrt(max(rows, columns))
        for matrix, update in zip(stack, orthogonal(updates_Bmn), strict=True):
            matrix.mul_(1.0 - rate * group["weight_decay"])
            matrix.add_(_lying(update, is_tall), alpha=-rate * length)

    def _direction(self, matrix: torch.Tensor, momentum: float) -> torch.Tensor:
        assert matrix.grad is not None, "only such are stacked"
        state = self.state[matrix]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(matrix)
        mean: torch.Tensor = state["mean"]
        mean.lerp_(matrix.grad, 1.0 - momentum)
        return matrix.grad.lerp(mean, momentum)


def _stacks(matrices: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the matrices of each shape, as many at a time as are worth it, one at least."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for alike in by_shape.values():
        together = max(1, _MOST_STACKED // alike[0].numel())
        for start in range(0, len(alike), together):
            yield alike[start : start + together]


def _lying(matrix: torch.Tensor, is_tall: bool) -> torch.Tensor:
    return matrix.mT if is_tall else matrix
