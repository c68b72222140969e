"""Peer of `torch.distributed` with gloo: an all-reduce in float32 over plain TCP among a fixed set of ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.averaging.textbook import FlatOuter, seed_of, wait_for_moment

STORE_FILE = "gloo-store"
_TIMEOUT = timedelta(minutes=10)


class GlooPeer:
    """One rank of the gloo group."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._place, self._num_peers = int(order["place"]), int(order["num_peers"])
        self._store = Path(order["folder"]).parent / STORE_FILE
        self._outer = FlatOuter(int(order["parameters"]))

    def start(self) -> dict[str, Any]:
        """Do nothing: ranks need no addresses."""
        return {}

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Form the process group."""
        dist.init_process_group(
            "gloo", init_method=f"file://{self._store}", rank=self._place, world_size=self._num_peers, timeout=_TIMEOUT
        )

    def prepare(self, turn: int) -> None:
        """Fill the tensor that is reduced."""
        self._outer.fill(seed_of(self._place, turn))

    def play(self, turn: int, at: float, is_trial: bool) -> dict[str, Any]:
        """Sum over all ranks, divide by their number, and apply the outer step."""
        wait_for_moment(at)
        dist.all_reduce(self._outer.delta_N)
        self._outer.step(self._outer.delta_N.div_(self._num_peers))
        return {"applied_at": time.monotonic(), "trouble": ""}

    def settle(self, turn: int, at: float) -> dict[str, Any]:
        """Do nothing: gloo has nothing to settle."""
        return {"is_settled": True, "roster": ""}

    def digest(self) -> dict[str, Any]:
        """Return a hash of the anchor."""
        return {"digest": self._outer.digest()}

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
