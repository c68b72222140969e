"""Which elements of a sharded model lie on which rank: the layout of `fully_shard`, which cuts tensors by rows.

Row r of a tensor of R rows on W ranks lies on rank r // ceil(R / W), as `torch.chunk` cuts it. The last ranks may hold
fewer rows, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.outer.fragments import TensorSlot


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A part of a fragment's slice that one rank holds.

    Attributes:
        name: its tensor.
        offset: position in the slice.
        low: position in the rank's part of the tensor, flat.
        elements: length.
        is_whole: whether all ranks hold it, because its tensor is not sharded.
    """

    name: str
    offset: int
    low: int
    elements: int
    is_whole: bool


def row_bounds(rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the rows of a sharded tensor that a rank holds: start and stop, equal if it holds none."""
    each = -(-rows // num_ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def pieces_held(
    slots: Sequence[TensorSlot], rows: Mapping[str, int], start: int, stop: int, *, rank: int, num_ranks: int
) -> tuple[HeldPiece, ...]:
    """Return the parts of elements `start` to `stop` of a fragment that a rank holds, in order.

    Every element of a sharded tensor is on exactly one rank, and every other element on all ranks.

    Args:
        slots: tensors of the fragment.
        rows: number of rows of each sharded tensor by name; a tensor that is missing is whole on all ranks.
    """
    pieces = []
    for slot in slots:
        is_whole = slot.name not in rows
        first, last = (0, 1) if is_whole else row_bounds(rows[slot.name], rank, num_ranks)
        row = slot.elements if is_whole else slot.elements // rows[slot.name]
        here = slot.start + first * row
        low, high = max(start, here), min(stop, slot.start + last * row)
        if low < high:
            pieces.append(HeldPiece(slot.name, low - start, low - here, high - low, is_whole))
    return tuple(pieces)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, so that this rank holds only its part of it.

    Without importing `torch.distributed.tensor`, which takes a while and is missing on some platforms.
    """
    return type(tensor).__name__ == "DTensor" or any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached; it shares memory with the tensor."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = _as_any(tensor).to_local()
    return part.detach()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor on this rank's device, or the tensor itself; all ranks call this."""
    if not is_sharded(tensor):
        return tensor
    whole: Tensor = _as_any(tensor).full_tensor()
    return whole


def why_unsupported(tensor: Tensor, num_ranks: int) -> str:
    """Return why the layout of a tensor is not supported, after its name; an empty string if it is."""
    if not is_sharded(tensor):
        return ""
    mesh, placements = _as_any(tensor).device_mesh, _as_any(tensor).placements
    if mesh.ndim != 1:
        return (
            f"is spread over a device mesh of {mesh.ndim} dimensions; hybrid sharding and tensor parallelism are not "
            "supported; call fully_shard without a mesh"
        )
    if mesh.mesh.flatten().tolist() != list(range(num_ranks)):
        return f"is not spread over all {num_ranks} ranks of the default group in their order; use all of them"
    if not (_is_cut_by_rows(tensor) or placements[0].is_replicate()):
        return f"is placed as {placements[0]}; only shards of rows are supported, as fully_shard makes by default"
    return ""


def sharded_rows(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of rows of each tensor that is cut by rows, by name."""
    return {name: tensor.shape[0] for name, tensor in tensors.items() if is_sharded(tensor) and _is_cut_by_rows(tensor)}


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of an FSDP model, so that its next forward pass gathers the current ones.

    After a forward pass without a backward pass, FSDP keeps some parameters gathered; it would train on them and
    ignore what is written to the shards.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        if type(module).__name__.startswith("FSDP") and hasattr(module, "reshard"):
            module.reshard()


def with_part(part: Tensor, like: Tensor) -> Tensor:
    """Return a sharded tensor of the same layout as `like`, with this rank's part of it."""
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        part,
        _as_any(like).device_mesh,
        _as_any(like).placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return whole


def _is_cut_by_rows(tensor: Tensor) -> bool:
    placement = _as_any(tensor).placements[0]
    return type(placement).__name__ == "Shard" and placement.dim == 0  # a subclass cuts otherwise


def _as_any(tensor: Tensor) -> Any:
    return tensor
