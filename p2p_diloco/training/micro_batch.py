"""Choose how many windows pass through a model at a time: as many as fit into the memory of the device.

A step trains on the same windows on every device. A device with little memory takes them in several parts, whose
gradients are added.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
