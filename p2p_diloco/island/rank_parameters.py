"""Access the parameters of an island of several ranks, replicated or sharded, from rank 0.

Rank 0 reads and writes θ by fragment as for one process. Each access is an order to the other ranks, which do their
part of it. Only the requested slice travels, through host memory: no device ever holds the whole of a sharded model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from p2p_diloco.codec.vectors import CHUNK_ELEMENTS
from p2p_diloco.island.parameters import LocalParameters, check_values
from p2p_diloco.island.ranks import Order, OrderKind, Ranks
from p2p_diloco.island.shards import HeldPiece, is_sharded, local_part, pieces_held, reshard, row_bounds, sharded_rows
from p2p_diloco.outer.fragments import Fragment


class RankParameters(LocalParameters):
    """Reads and writes θ of all ranks. On the others than rank 0, `follow` does what rank 0 orders.

    Args:
        model: the model of this rank, wrapped or sharded; the same on all ranks.
        tensors: its trained tensors by name, taken while none was gathered.
        fragments: the same on all ranks.
    """

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, Tensor], fragments: Sequence[Fragment], ranks: Ranks
    ) -> None:
        super().__init__(model, fragments, tensors)
        self._model = model
        self._ranks = ranks
        self._rows = sharded_rows(tensors)
        self._parameters = {name: local_part(tensor) for name, tensor in tensors.items()}
        self._flat = {name: tensor.view(-1) for name, tensor in self._parameters.items()}
        self._copies: list[list[Tensor]] = []
        self._known_pieces: dict[tuple[int, int, int, int], tuple[HeldPiece, ...]] = {}

    # -- on rank 0

    def read(self, fragment: int, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Return a fresh host copy of elements `start` to `stop` (default: all) of a fragment, float32."""
        stop = self.fragments[fragment].elements if stop is None else stop
        if not self._is_cut(fragment, start, stop):
            return super().read(fragment, start, stop)
        whole_N = np.empty(stop - start, np.float32)
        with self._ranks.order(OrderKind.READ, fragment, start, stop):
            _put(whole_N, self._held(fragment, start, stop, 0), self._taken(self._held(fragment, start, stop, 0)))
            for rank in self._ranks.others:
                pieces = self._own_pieces(fragment, start, stop, rank)
                if pieces:
                    _put(whole_N, pieces, self._ranks.receive(torch.empty(_length(pieces)), rank))
        return whole_N

    def write(self, fragment: int, start: int, stop: int, values_N: NDArray[np.float32]) -> None:
        self._change(OrderKind.WRITE, fragment, start, stop, values_N)

    def add(self, fragment: int, start: int, stop: int, values_N: NDArray[np.float32]) -> None:
        self._change(OrderKind.ADD, fragment, start, stop, values_N)

    def view(self, fragment: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return elements `start` to `stop` of a fragment, read-only; of a sharded tensor it is a copy."""
        is_cut = self._is_cut(fragment, start, stop)
        return self.read(fragment, start, stop) if is_cut else super().view(fragment, start, stop)

    def on_device(self, fragment: int, start: int, stop: int) -> Tensor | None:
        """Return elements `start` to `stop` of a fragment on this rank's device; None if others hold some of them."""
        return None if self._is_cut(fragment, start, stop) else super().on_device(fragment, start, stop)

    def keep(self) -> None:
        """Copy θ of each rank to its host memory; see `restore`."""
        with self._ranks.order(OrderKind.KEEP):
            self._keep_here()

    def restore_all(self) -> None:
        with self._ranks.order(OrderKind.RESTORE):
            self.restore()

    def _change(self, kind: OrderKind, fragment: int, start: int, stop: int, values_N: NDArray[np.float32]) -> None:
        check_values(values_N, stop - start)
        values = torch.tensor(values_N)  # a copy: from_numpy would warn about the read-only arrays of the agreed state
        with self._ranks.order(kind, fragment, start, stop):
            if not self._is_cut(fragment, start, stop):
                self._ranks.broadcast(values)
            else:
                for rank in self._ranks.others:
                    pieces = self._held(fragment, start, stop, rank)
                    if pieces:
                        self._ranks.send(_joined(values, pieces), rank)
            own = self._held(fragment, start, stop, 0)
            self._apply(kind, own, _joined(values, own))

    # -- on the other ranks

    def follow(self, order: Order) -> None:
        """Do this rank's part of an access."""
        fragment, start, stop = order.numbers
        if order.kind == OrderKind.KEEP:
            self._keep_here()
        elif order.kind == OrderKind.RESTORE:
            self.restore()
        elif order.kind == OrderKind.READ:
            pieces = self._own_pieces(fragment, start, stop, self._ranks.rank)
            if pieces:
                self._ranks.send(self._taken(pieces), 0)
        else:
            held = self._held(fragment, start, stop, self._ranks.rank)
            values = torch.empty(_length(held))
            if not self._is_cut(fragment, start, stop):
                self._ranks.broadcast(values)
            elif held:
                self._ranks.receive(values, 0)
            self._apply(order.kind, held, values)

    # -- on all ranks

    def restore(self) -> None:
        """Set θ to the latest copy of `keep`, which is dropped; each rank does this by itself."""
        reshard(self._model)
        with torch.no_grad():
            for flat, copy in zip(self._flat.values(), self._copies.pop(), strict=True):
                flat.copy_(copy)

    def _keep_here(self) -> None:
        self._copies.append([flat.to("cpu", copy=True) for flat in self._flat.values()])

    def _is_cut(self, fragment: int, start: int, stop: int) -> bool:
        """Return whether a slice holds elements of a sharded tensor."""
        slots = self.fragments[fragment].tensors
        return any(slot.name in self._rows and slot.start < stop and start < slot.stop for slot in slots)

    def _held(self, fragment: int, start: int, stop: int, rank: int) -> tuple[HeldPiece, ...]:
        known = self._known_pieces.get((fragment, start, stop, rank))
        if known is None:
            plan = self.fragments[fragment]
            if not 0 <= start <= stop <= plan.elements:
                raise ValueError(f"elements {start} to {stop} are not within fragment {fragment} of {plan.elements}")
            known = pieces_held(plan.tensors, self._rows, start, stop, rank=rank, num_ranks=self._ranks.count)
            self._known_pieces[fragment, start, stop, rank] = known
        return known

    def _own_pieces(self, fragment: int, start: int, stop: int, rank: int) -> tuple[HeldPiece, ...]:
        """Return the pieces of a slice that only this rank holds."""
        return tuple(piece for piece in self._held(fragment, start, stop, rank) if not piece.is_whole)

    def _taken(self, pieces: Sequence[HeldPiece]) -> Tensor:
        return torch.cat([self._piece(piece).float() for piece in pieces] or [torch.empty(0)]).cpu()

    def _piece(self, piece: HeldPiece) -> Tensor:
        return self._flat[piece.name][piece.low : piece.low + piece.elements]

    @torch.no_grad()
    def _apply(self, kind: OrderKind, pieces: Sequence[HeldPiece], values: Tensor) -> None:
        """Write or add the values of these pieces, in chunks to limit the use of device memory."""
        reshard(self._model)
        at = 0
        for piece in pieces:
            here = self._piece(piece)
            for low in range(0, piece.elements, CHUNK_ELEMENTS):
                high = min(low + CHUNK_ELEMENTS, piece.elements)
                chunk = values[at + low : at + high].to(here.device)
                if kind == OrderKind.ADD:
                    here[low:high].add_(chunk)
                else:
                    here[low:high].copy_(chunk)
            at += piece.elements


def gather_tensor(tensor: Tensor, ranks: Ranks) -> Tensor | None:
    """Return a whole tensor in host memory on rank 0, and None on the other ranks; all ranks call this."""
    part = local_part(tensor).cpu().contiguous()
    if not is_sharded(tensor) or not sharded_rows({"": tensor}):
        return part if ranks.leads else None
    if not ranks.leads:
        if part.numel():
            ranks.send(part.view(-1).view(torch.uint8), 0)
        return None
    parts = [part]
    for rank in ranks.others:
        first, last = row_bounds(tensor.shape[0], rank, ranks.count)
        rows = torch.empty((last - first, *tensor.shape[1:]), dtype=tensor.dtype)
        if rows.numel():
            ranks.receive(rows.view(-1).view(torch.uint8), rank)
        parts.append(rows)
    return torch.cat(parts)


def _length(pieces: Sequence[HeldPiece]) -> int:
    return sum(piece.elements for piece in pieces)


def _joined(values: Tensor, pieces: Sequence[HeldPiece]) -> Tensor:
    """Return the values of these pieces of a slice, end to end."""
    parts = [values[piece.offset : piece.offset + piece.elements] for piece in pieces]
    return torch.cat(parts) if len(parts) > 1 else (parts or [values[:0]])[0].contiguous()


def _put(whole_N: NDArray[np.float32], pieces: Sequence[HeldPiece], values: Tensor) -> None:
    values_N, at = values.numpy(), 0
    for piece in pieces:
        whole_N[piece.offset : piece.offset + piece.elements] = values_N[at : at + piece.elements]
        at += piece.elements
