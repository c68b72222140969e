"""The repeated layers of a model, such as those of a transformer, and how to train them with less memory.

The activations of a block are what its forward pass keeps for its backward pass. A block that recomputes them keeps
only its inputs, and runs its forward pass again in the backward pass: the same gradients, for about a third more work.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

Recompute = Literal["auto", "always", "never"]
"""When activations are recomputed; auto: once the memory is too small for a single window."""


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model: the outermost modules in lists."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in blocks_of(child)]


def recompute_blocks(module: nn.Module) -> bool:
    """Let the blocks of a model recompute their activations from now on; return whether it has any.

    The blocks change their class, not their place, so all names and tensors stay the same. Copies of the model
    recompute too, but not without gradients.
    """
    blocks = blocks_of(module)
    for block in blocks:
        if not isinstance(block, _Recomputed):
            kind = type(block)
            block.__class__ = type(kind.__name__, (_Recomputed, kind), {"__module__": kind.__module__})
    return bool(blocks)


class _Recomputed(nn.Module):
    """Precedes the class of a block. Without gradients, its forward pass runs as it is."""

    def forward(self, *values: Any, **named: Any) -> Any:
        return checkpoint(super().forward, *values, use_reentrant=False, **named)
