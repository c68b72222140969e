"""Peer of hivemind's `DecentralizedAverager`, driven as by hivemind's optimiser: DHT, averager and daemon processes.

Matchmaking takes seconds. It is done before the exchange begins (with hivemind's `require_trigger`), so only the
all-reduce is measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.averaging.systems import HIVEMIND_FLOAT16
from benchmarks.averaging.textbook import FlatOuter, seed_of, wait_for_moment
from p2p_diloco.errors import NetworkError

PREFIX = "bench"
MATCHMAKING_SECONDS = 5.0
REQUEST_SECONDS = 3.0
GROUP_SECONDS = 120.0
EXCHANGE_SECONDS = 600.0
_LOOK_SECONDS = 0.01


class HivemindPeer:
    """One peer with a DHT and an averager. It uses no event loop, because hivemind forks."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._order = order
        self._outer = FlatOuter(int(order["parameters"]))
        self._place, self._num_peers = int(order["place"]), int(order["num_peers"])
        self._dht: Any = None
        self._averager: Any = None
        self._step: Any = None

    def start(self) -> dict[str, Any]:
        """Start the DHT of the first peer, on loopback only; the other peers join it."""
        if self._place:
            return {}
        self._start_dht([])
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def _start_dht(self, initial_peers: list[str]) -> None:
        import hivemind

        self._dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=initial_peers)

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Join the first peer's DHT, then start the averager."""
        import hivemind
        from hivemind.compression import Float16Compression, NoCompression

        if self._place:
            self._start_dht(words[0]["addresses"])
        compression = Float16Compression() if self._order["system"] == HIVEMIND_FLOAT16 else NoCompression()
        self._averager = hivemind.DecentralizedAverager(
            [self._outer.delta_N],
            self._dht,
            start=True,
            prefix=PREFIX,
            target_group_size=self._num_peers,
            min_group_size=self._num_peers,
            min_matchmaking_time=MATCHMAKING_SECONDS,
            request_timeout=REQUEST_SECONDS,
            compression=compression,
        )

    def prepare(self, turn: int) -> None:
        """Fill the tensor to average, and wait until a group is found.

        Raises:
            NetworkError: no group was found in time.
        """
        from hivemind.averaging.control import AveragingStage
        from hivemind.utils import get_dht_time

        with self._averager.get_tensors():
            self._outer.fill(seed_of(self._place, turn))
        self._step = self._averager.step(
            wait=False,
            require_trigger=True,
            scheduled_time=get_dht_time() + MATCHMAKING_SECONDS,
            timeout=GROUP_SECONDS,
        )
        deadline = time.monotonic() + GROUP_SECONDS
        while self._step.stage != AveragingStage.AWAITING_TRIGGER:
            if self._step.done() or time.monotonic() > deadline:
                raise NetworkError(f"hivemind found no group of {self._num_peers} within {GROUP_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def play(self, turn: int, at: float, is_trial: bool) -> dict[str, Any]:
        """Run the all-reduce of the group, and apply the outer step."""
        wait_for_moment(at)
        self._step.allow_allreduce()
        gathered = self._step.result(EXCHANGE_SECONDS)
        with self._averager.get_tensors() as (mean_N,):
            self._outer.step(mean_N)
        applied_at = time.monotonic()
        is_whole = len(gathered) == self._num_peers
        trouble = "" if is_whole else f"{len(gathered)} of {self._num_peers} peers in its group"
        return {"applied_at": applied_at, "trouble": trouble}

    def settle(self, turn: int, at: float) -> dict[str, Any]:
        """Do nothing: hivemind has nothing to settle."""
        return {"is_settled": True, "roster": ""}

    def digest(self) -> dict[str, Any]:
        """Return a hash of the anchor."""
        return {"digest": self._outer.digest()}

    def close(self) -> None:
        """Shut down the averager and the DHT."""
        if self._averager is not None:
            self._averager.shutdown()
        if self._dht is not None:
            self._dht.shutdown()
