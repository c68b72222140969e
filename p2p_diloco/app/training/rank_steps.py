"""Steps that the ranks of an island make together: each trains on its part of one batch of the island.

A step is the same as that of one process: rank 0 draws the island's batch and shares it out, and the gradients of the
parts are added. So an island of several devices makes faster steps, not longer ones, and a text is needed only on
rank 0. The model is copied to all ranks (DistributedDataParallel), or its tensors are cut into shards (`fully_shard`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from p2p_diloco.app.models.text_model import TextModel, WithLoss
from p2p_diloco.app.text.data import Batches
from p2p_diloco.app.training.micro_batch import blocks_of
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.ranks import Ranks

BYTES_OF_A_PARAMETER = 16
"""Memory of training without shards: float32 parameters, gradients and two moments."""
SHARE_FOR_PARAMETERS = 0.6
"""Largest share of a device's memory for that; the rest is for activations."""


def needs_shards(num_parameters: int, device: torch.device) -> bool:
    """Return whether a copy of the model is too large to be trained on each device of this kind."""
    if device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(device).total_memory
    return num_parameters * BYTES_OF_A_PARAMETER > SHARE_FOR_PARAMETERS * memory


def parts_of_batch(windows: int, count: int) -> list[int]:
    """Return how many windows of a batch each rank gets; they differ by at most one."""
    return [windows * (rank + 1) // count - windows * rank // count for rank in range(count)]


class RankBatches:
    """This rank's parts of the island's batches.

    Args:
        source: the island's batches, on rank 0.
        batch, context: windows of the island's first batch, and predicted tokens in a window.
    Raises:
        ConfigError: there are fewer windows than ranks.
    """

    def __init__(self, ranks: Ranks, source: Batches | None, *, batch: int, context: int) -> None:
        if batch < ranks.count:
            raise ConfigError(
                f"a step of this run has {batch} windows, too few for the {ranks.count} ranks of this island; start "
                f"at most {batch}, with --ranks {batch}"
            )
        self.context = context
        self._ranks = ranks
        self._source = source
        self.batch = batch

    @property
    def batch(self) -> int:
        """Windows of the island's next batch; all ranks set it before the same batch."""
        return self._batch

    @batch.setter
    def batch(self, windows: int) -> None:
        self._batch, self._parts = windows, parts_of_batch(windows, self._ranks.count)
        if self._source is not None:
            self._source.batch = windows

    def next_batch(self) -> Tensor:
        """Return this rank's windows of the next batch; all ranks call this."""
        if self._source is None:
            own = torch.empty((self._parts[self._ranks.rank], self.context + 1), dtype=torch.int64)
            return self._ranks.receive(own, 0)
        parts = torch.split(self._source.next_batch(), self._parts)
        for rank in self._ranks.others:
            self._ranks.send(parts[rank].contiguous(), rank)
        return parts[0]


class RankSteps:
    """The model of this rank, wrapped so that the ranks add their gradients.

    Args:
        ranks: the ranks; their default process group exchanges the gradients.
        has_shards: cut the tensors into shards, instead of copying them.
        uses_all: whether each step uses all parameters; otherwise, each step looks for those that it does not use.
    """

    def __init__(self, ranks: Ranks, *, has_shards: bool, uses_all: bool) -> None:
        self.count = ranks.count
        self.has_shards = has_shards
        self._ranks = ranks
        self._uses_all = uses_all
        self._device = torch.device("cpu")
        self._copies: nn.parallel.DistributedDataParallel | None = None

    def __str__(self) -> str:
        return f"{self.count} ranks, each with {'a shard' if self.has_shards else 'a copy'} of the model"

    def check_batch(self, batch: int) -> None:
        """Refuse a batch that these ranks cannot share.

        Raises:
            ConfigError: shards need as many parts on each rank.
        """
        if self.has_shards and batch % self.count:
            fitting = max(count for count in range(1, self.count) if batch % count == 0)
            raise ConfigError(
                f"a step of this run has {batch} windows, which {self.count} ranks that hold shards cannot share "
                f"equally; start with --ranks {fitting}, or with copies of the model: --shards never"
            )

    def wrap(self, model: TextModel, device: torch.device) -> nn.Module:
        """Return a module that computes the loss of windows; all ranks call this, with the model on the device."""
        self._device = device
        self._copy_from_rank_0(model.module)
        whole = WithLoss(model)
        if not self.has_shards:
            self._copies = nn.parallel.DistributedDataParallel(
                whole,
                device_ids=[device] if device.type == "cuda" else None,
                find_unused_parameters=not self._uses_all,
            )
            return self._copies
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (self.count,))
        shard = partial(fully_shard, mesh=mesh)
        for block in blocks_of(model.module):
            shard(block)  # blocks are gathered one at a time
        shard(whole)
        return whole

    def without_exchange(self) -> AbstractContextManager[None]:
        """Return a context in which copies of the model only collect gradients, for all but the last part of a step."""
        if self._copies is None:
            return nullcontext()
        no_sync: AbstractContextManager[None] = self._copies.no_sync()
        return no_sync

    def mean(self, value: float) -> float:
        """Return the mean of a number over all ranks; all of them call this."""
        return self._reduced(value, dist.ReduceOp.SUM) / self.count

    def least(self, value: int) -> int:
        """Return the least of a number on all ranks; all of them call this."""
        return int(self._reduced(value, dist.ReduceOp.MIN))

    def _reduced(self, value: float, kind: Any) -> float:
        number = torch.tensor(value, dtype=torch.float32, device=self._device)
        dist.all_reduce(number, kind)
        return float(number)

    def _copy_from_rank_0(self, module: nn.Module) -> None:
        """Set all parameters and buffers to those of rank 0, which may have loaded weights."""
        for tensor in (*module.parameters(), *module.buffers()):
            held = tensor.detach().cpu().contiguous()
            self._ranks.broadcast(held)
            with torch.no_grad():
                tensor.copy_(held)
