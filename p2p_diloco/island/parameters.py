"""Access an island's parameters as flat float32 vectors of fragments on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from p2p_diloco.codec.vectors import CHUNK_ELEMENTS
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.shards import is_sharded
from p2p_diloco.outer.fragments import Fragment

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")
"""Prefixes that `torch.compile`, activation checkpointing and `DistributedDataParallel` add to parameter names."""


def plain_name(name: str) -> str:
    """Return a parameter's name without wrapper prefixes, so that peers may wrap the same model differently."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained tensors by name, in model order.

    A tied tensor appears once, under its first name.
    """
    return {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor that holds a NaN or an infinity; an empty text if all are finite.

    One norm over all tensors is a single pass through memory, an exact look costs ten times as much. The norm of a
    tensor that is not finite never is, so the exact look follows only then, or if the norm itself overflows.
    """
    if not tensors or math.isfinite(float(nn.utils.get_total_norm(tensors.values()))):
        return ""
    return next((name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())), "")


def is_embedding(model: nn.Module, tensor: Tensor) -> bool:
    """Return whether a tensor is the weight of an embedding, perhaps tied to the head."""
    return any(tensor is module.weight for module in model.modules() if isinstance(module, nn.Embedding))


def is_head(model: nn.Module, tensor: Tensor) -> bool:
    """Return whether a tensor is the weight of the last linear layer, with one row per class."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return bool(linear) and tensor is linear[-1].weight


def sizes(model: nn.Module) -> list[tuple[str, int]]:
    """Return (name, elements) of every trained tensor in model order, for `plan_fragments`."""
    return [(name, parameter.numel()) for name, parameter in trained(model).items()]


@torch.no_grad()
def lay_end_to_end(model: nn.Module, fragments: Sequence[Fragment]) -> None:
    """Move the tensors of each fragment into one contiguous buffer, in the fragment's order.

    Spans can then be read, contributed and merged in place, instead of being gathered from a dozen tensors, which cost
    a sixth to a third of the work. Tensor objects stay the same. A fragment whose tensors differ in device or type is
    not moved.
    """
    parameters = trained(model)
    for fragment in fragments:
        tensors = [parameters[slot.name] for slot in fragment.tensors]
        if len({(tensor.device, tensor.dtype) for tensor in tensors}) > 1 or len(tensors) == 1:
            continue
        whole = torch.empty(fragment.elements, dtype=tensors[0].dtype, device=tensors[0].device)
        for slot, tensor in zip(fragment.tensors, tensors, strict=True):
            place = whole[slot.start : slot.stop].view_as(tensor)
            place.copy_(tensor)
            tensor.data = place


@dataclass(frozen=True, slots=True)
class _Piece:
    """A contiguous part of a slice of a fragment; `host_N` is the same memory as a NumPy array, if on the host."""

    flat: Tensor
    offset: int
    host_N: NDArray[np.float32] | None


class LocalParameters:
    """Reads and writes θ by fragment, on any device; the interface is always float32 on the host.

    Use it from the training thread between two steps: a write during a step would corrupt its gradients.

    Args:
        tensors: the trained tensors of the model, if they were looked up before.
    Raises:
        ConfigError: the fragments do not cover the model's tensors exactly once each.
    """

    def __init__(
        self, model: nn.Module, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        self.fragments = tuple(fragments)
        self._parameters: dict[str, Tensor] = dict(trained(model) if tensors is None else tensors)
        self._known: dict[tuple[int, int, int], list[_Piece]] = {}
        self._kept: list[Sequence[NDArray[np.float32]]] = []
        planned = [(slot.name, slot.elements) for fragment in self.fragments for slot in fragment.tensors]
        if sorted(planned) != sorted((name, tensor.numel()) for name, tensor in self._parameters.items()):
            raise ConfigError(
                f"the fragments plan {len(planned)} tensors with {sum(size for _, size in planned)} elements, "
                f"the model has {len(self._parameters)} with {sum(p.numel() for p in self._parameters.values())}; "
                "expected the same names and sizes; is this the model of the run?"
            )

    @torch.no_grad()
    def read(self, fragment: int, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Return a fresh host copy of elements `start` to `stop` (default: all) of a fragment, float32."""
        stop = self.fragments[fragment].elements if stop is None else stop
        pieces = [piece.flat.float() for piece in self._pieces(fragment, start, stop)]
        if not pieces:
            return np.empty(0, np.float32)
        # One concatenation on the device and one copy to the host, instead of a transfer per tensor.
        joined: NDArray[np.float32] = torch.cat(pieces).cpu().numpy()
        return joined

    @torch.no_grad()
    def write(self, fragment: int, start: int, stop: int, values_N: NDArray[np.float32]) -> None:
        """Set elements `start` to `stop` of a fragment to `values_N`, float32, shape (stop - start,); it is copied."""
        check_values(values_N, stop - start)
        for piece in self._pieces(fragment, start, stop):
            here_N = values_N[piece.offset : piece.offset + piece.flat.numel()]
            if piece.host_N is not None:
                np.copyto(piece.host_N, here_N)
            else:
                # torch.tensor copies; torch.from_numpy would warn about the read-only arrays of the agreed state.
                piece.flat.copy_(torch.tensor(here_N))

    def view(self, fragment: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return elements `start` to `stop` of a fragment, float32, read-only.

        The result may share memory with θ, if that is contiguous on the host: it then changes with the next write or
        step.
        """
        pieces = self._pieces(fragment, start, stop)
        if len(pieces) == 1 and pieces[0].host_N is not None:
            return pieces[0].host_N
        return self.read(fragment, start, stop)

    @torch.no_grad()
    def add(self, fragment: int, start: int, stop: int, values_N: NDArray[np.float32]) -> None:
        """Add `values_N`, float32, shape (stop - start,), to elements `start` to `stop` of a fragment, in place.

        On a device this works in chunks, to limit its memory use.
        """
        check_values(values_N, stop - start)
        for piece in self._pieces(fragment, start, stop):
            here_N = values_N[piece.offset : piece.offset + piece.flat.numel()]
            if piece.host_N is not None:
                with np.errstate(over="ignore", invalid="ignore"):  # a diverged θ is handled by its island
                    np.add(piece.host_N, here_N, out=piece.host_N)
                continue
            for at in range(0, len(here_N), CHUNK_ELEMENTS):
                chunk = torch.tensor(here_N[at : at + CHUNK_ELEMENTS], device=piece.flat.device)
                piece.flat[at : at + CHUNK_ELEMENTS].add_(chunk)

    def on_device(self, fragment: int, start: int, stop: int) -> Tensor | None:
        """Return elements `start` to `stop` of a fragment on its device, flat; None unless contiguous and float32.

        The tensor shares memory with θ: the next step trains on what is written to it.
        """
        pieces = self._pieces(fragment, start, stop)
        return pieces[0].flat if len(pieces) == 1 and pieces[0].flat.dtype == torch.float32 else None

    def read_all(self) -> tuple[NDArray[np.float32], ...]:
        return tuple(self.read(fragment.index) for fragment in self.fragments)

    def load_flat(self, vectors: Sequence[NDArray[np.float32]]) -> None:
        """Set θ to `vectors`, one per fragment by index, as a restarted or newly joined peer does with the anchor."""
        for fragment, vector_N in zip(self.fragments, vectors, strict=True):
            self.write(fragment.index, 0, fragment.elements, vector_N)

    def keep(self) -> None:
        """Copy θ, for `restore`."""
        self._kept.append(self.read_all())

    def restore(self) -> None:
        """Set θ to the latest copy of `keep`, which is dropped."""
        self.load_flat(self._kept.pop())

    def restore_all(self) -> None:
        """Restore θ on all ranks that train it, which here is one."""
        self.restore()

    def _pieces(self, fragment: int, start: int, stop: int) -> list[_Piece]:
        """Return flat views of the model's tensors under a slice of a fragment, with their offsets in the slice."""
        plan = self.fragments[fragment]
        if not 0 <= start <= stop <= plan.elements:
            raise ValueError(f"elements {start} to {stop} are not within fragment {fragment} of {plan.elements}")
        known = self._known.get((fragment, start, stop))
        if known is not None:
            return known
        pieces: list[_Piece] = []
        for slot in plan.tensors:
            low, high = max(start, slot.start), min(stop, slot.start + slot.elements)
            if low < high:
                flat = self._parameters[slot.name].detach().view(-1)[low - slot.start : high - slot.start]
                joined = _joined(pieces[-1].flat, flat) if pieces else None
                if joined is None:
                    pieces.append(_piece(flat, low - start))
                else:
                    pieces[-1] = _piece(joined, pieces[-1].offset)
        self._known[fragment, start, stop] = pieces
        return pieces


def check_values(values_N: NDArray[np.float32], elements: int) -> None:
    """Check the values that a caller wants to write; anything else than that many float32 is its bug."""
    if values_N.shape != (elements,) or values_N.dtype != np.float32:
        raise ValueError(f"got {values_N.dtype} of shape {values_N.shape}; expected float32 of ({elements},)")


def _piece(flat: Tensor, offset: int) -> _Piece:
    is_on_host = flat.device.type == "cpu" and flat.dtype == torch.float32
    return _Piece(flat, offset, flat.numpy() if is_on_host else None)


def _joined(first: Tensor, second: Tensor) -> Tensor | None:
    """Return both tensors as one view if the second begins where the first ends, otherwise None."""
    end = first.storage_offset() + first.numel()
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr() or second.storage_offset() != end:
        return None
    return first.as_strided((first.numel() + second.numel(),), (1,))


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
