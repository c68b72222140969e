"""The buffers of a model that training changes, such as the running statistics of BatchNorm: private to each rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from p2p_diloco.training.parameters import first_not_finite, plain_name
from p2p_diloco.training.shards import is_sharded


class Buffers:
    """The persistent buffers of a model. For the training thread.

    Those that are not finite from the start are constants, such as the mask of an attention, and are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            plain_name(f"{prefix}.{key}" if prefix else key): (module, key)
            for prefix, module in model.named_modules()
            for key, buffer in module.named_buffers(recurse=False)
            if key not in module._non_persistent_buffers_set
            and not is_sharded(buffer)
            and (not buffer.is_floating_point() or bool(buffer.isfinite().all()))
        }
        self._sound: Mapping[str, Tensor] = {}
        self.state_dict()

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers by name, as they are now: a module may replace one by another tensor."""
        return {name: getattr(module, key) for name, (module, key) in self._places.items()}

    def floats(self) -> dict[str, Tensor]:
        """Return those that are floating-point numbers."""
        return {name: tensor for name, tensor in self.tensors().items() if tensor.is_floating_point()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all buffers, to which `clear_state` returns if all are finite."""
        copies = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        if not first_not_finite(self.floats()):
            self._sound = copies
        return copies

    @torch.no_grad()
    def begin_with(self, buffers: Mapping[str, Tensor]) -> None:
        """Take over those of a run that this one continues, where the model has them; others are left alone."""
        for name, tensor in self.tensors().items():
            if name in buffers and buffers[name].shape == tensor.shape:
                tensor.copy_(buffers[name])
        self.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore all buffers.

        Raises:
            ValueError: the model has other buffers.
        """
        tensors = self.tensors()
        if {name: tensor.shape for name, tensor in tensors.items()} != {name: state[name].shape for name in state}:
            raise ValueError("the model has other buffers")
        for name, tensor in tensors.items():
            tensor.copy_(state[name])

    def clear_state(self) -> None:
        """Return to the buffers as they were when they were saved last, or at the start."""
        self.load_state_dict(self._sound)
