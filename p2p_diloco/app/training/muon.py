"""Muon: orthogonalised momentum, for the matrices of the blocks.

PyTorch's version (`torch.optim.Muon`) orthogonalises one matrix at a time and in bfloat16, for which most laptop CPUs
have no instructions; there a step of the small model takes ten times as long. This one uses float32 on a CPU and
batches matrices of the same shape. On a GPU it uses bfloat16 too. Of a matrix in shards, each rank gathers the whole
gradient and computes the whole step, one batch of matrices at a time.

Source: Jordan et al. 2024, Muon (the iteration and its coefficients); Liu et al., arXiv 2502.16982 (steps as long as
AdamW's, so that both share one learning rate and one weight decay).

Legend: B = matrices of one shape, m ≤ n = their short and long side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from p2p_diloco.island.shards import is_sharded, local_part, row_bounds, whole_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
RMS = 0.2
"""Root mean square of a step divided by the learning rate, as for AdamW."""
_TINY = 1e-7
_MOST_STACKED = 1 << 18
"""Maximum elements in a batch: small matrices are faster in batches, large ones would only need more memory."""


def orthogonal(matrices_Bmn: torch.Tensor) -> torch.Tensor:
    """Return matrices with the same singular vectors and all singular values close to 1.

    Five steps of a quintic Newton-Schulz iteration, tuned for speed: singular values end between 0.7 and 1.2. A zero
    matrix stays zero. Computes in bfloat16 on a GPU, otherwise in float32; returns float32.
    """
    a, b, c = COEFFICIENTS
    x_Bmn = matrices_Bmn.to(torch.bfloat16 if matrices_Bmn.is_cuda else torch.float32)
    x_Bmn = x_Bmn / x_Bmn.flatten(1).norm(dim=1).clamp(min=_TINY)[:, None, None]
    for _ in range(ITERATIONS):
        gram_Bmm = x_Bmn @ x_Bmn.mT
        x_Bmn = torch.baddbmm(x_Bmn, torch.baddbmm(gram_Bmm, gram_Bmm, gram_Bmm, beta=b, alpha=c), x_Bmn, beta=a)
    return x_Bmn.float()


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum with decoupled weight decay.

    Args:
        groups: parameter groups; all parameters are matrices.
        learning_rate: called `lr` in each group, as in all optimisers.
        weight_decay: per step, multiplied by the learning rate.
        momentum: decay of the running mean of gradients.
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
        """Make one step with the current gradients; `closure` is not supported."""
        assert closure is None, "compute gradients before the step"
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
            own = local_part(matrix)
            own.mul_(1.0 - rate * group["weight_decay"])
            own.add_(_own_rows(_lying(update, is_tall), matrix), alpha=-rate * length)

    def _direction(self, matrix: torch.Tensor, momentum: float) -> torch.Tensor:
        assert matrix.grad is not None, "only matrices with a gradient are stacked"
        state = self.state[matrix]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(matrix)
        mean: torch.Tensor = state["mean"]
        mean.lerp_(matrix.grad, 1.0 - momentum)
        return whole_tensor(matrix.grad.lerp(mean, momentum))


def _stacks(matrices: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield batches of matrices of the same shape, at least one matrix each."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    for alike in by_shape.values():
        together = max(1, _MOST_STACKED // alike[0].numel())
        for start in range(0, len(alike), together):
            yield alike[start : start + together]


def _own_rows(update: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the rows of an update that belong to this rank's shard of a matrix; all if it is no shard."""
    if not is_sharded(matrix):
        return update
    first, last = row_bounds(matrix.shape[0], torch.distributed.get_rank(), torch.distributed.get_world_size())
    return update[first:last]


def _lying(matrix: torch.Tensor, is_tall: bool) -> torch.Tensor:
    return matrix.mT if is_tall else matrix
