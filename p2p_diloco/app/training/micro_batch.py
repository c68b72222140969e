"""Fit steps into the memory of a device: windows in several parts, and blocks that recompute their activations.

A step trains on a number of windows that `island/batch_size.py` chooses. A device with little memory takes them in
several parts, whose gradients are added. The activations of a block are what its forward pass keeps for its backward
pass. A block that recomputes them keeps only its inputs, and runs its forward pass again in the backward pass: the
same gradients, for about a third more work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MARGIN = 0.9
"""Share of the largest number of windows that fits which is used: memory use varies from step to step."""
_MESSAGES = ("out of memory", "can't allocate memory", "DefaultCPUAllocator")


def most_windows(fits: Callable[[int], bool], wanted: int) -> int:
    """Return the largest number of windows up to `wanted` that fits; 0 if not even one does.

    Doubles until something does not fit, then bisects.

    Args:
        fits: tries a number of windows; if one number fits, all smaller ones do.
    """
    fitting, next_size = 0, 1
    while fitting < wanted and fits(next_size):
        fitting, next_size = next_size, min(2 * next_size, wanted)
    if fitting == wanted:
        return wanted
    too_many = next_size
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def with_margin(fitting: int, wanted: int) -> int:
    """Return the number of windows to use: all that are wanted if they fit, otherwise fewer than fit, at least one."""
    return wanted if fitting >= wanted else max(1, int(MARGIN * fitting))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of PyTorch means that memory has run out, on any device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)


def free_unused(device: torch.device) -> None:
    """Return cached memory of an accelerator to it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


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
