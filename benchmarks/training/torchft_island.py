"""Island of torchft's DiLoCo, with torchft's manager, a quorum by its lighthouse, and float32 all-reduce over gloo.

Model, text, inner steps and threads are those of our islands. It runs in a separate environment.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import distributed

from benchmarks.training.figures import steps_within
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.run_text import open_run_text, open_stream
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.ids import PeerId, sha256

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Nesterov outer optimiser of DiLoCo, arXiv 2311.08105."""
_TIMEOUT = timedelta(minutes=10)
_JOIN_MILLISECONDS = 60_000


class OpenLoop(InnerLoop):
    """Inner loop that exposes its optimiser, because torchft hooks into its steps."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The AdamW optimiser."""
        return self.optimizers[0]


class TorchftIsland:
    """One replica of one process. The first island also runs the lighthouse."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self._place, self._num_islands = int(order["place"]), int(order["num_islands"])
        self._address, self._sync_every = str(order["address"]), int(order["sync_every"])
        plan = plan_run(decode_signed_manifest(bytes.fromhex(order["manifest"])).manifest)
        corpus = open_run_text(plan.manifest.data, None)
        # Each island reads its own part of the text, as our peers do by their identities.
        stream = open_stream(corpus, plan, PeerId(sha256(bytes([self._place]))), 1)
        self._loop = OpenLoop(build_model(plan.shape, plan.manifest.model.seed), stream, plan.inner)
        self._borders: list[float] = []
        self._included = 0.0
        self._ends: list[Callable[[], object]] = []
        self._diloco: Any = None

    def close(self) -> None:
        """Shut down the manager and the lighthouse."""
        for end in reversed(self._ends):
            end()

    # -- start

    def start(self) -> dict[str, Any]:
        """Start the lighthouse on the first island."""
        if self._place:
            return {}
        lighthouse = import_module("torchft.coordination").LighthouseServer(
            bind="0.0.0.0:0", min_replicas=self._num_islands, join_timeout_ms=_JOIN_MILLISECONDS
        )
        self._ends.append(lighthouse.shutdown)
        return {"lighthouse": f"http://{self._address}:{lighthouse.address().rsplit(':', 1)[1].strip('/')}"}

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Create the manager and DiLoCo. The first exchange forms the group."""
        # torchft advertises this machine's host name, which does not resolve in the private network.
        socket.gethostname = lambda: self._address
        torchft, local_sgd = import_module("torchft"), import_module("torchft.local_sgd")
        store = distributed.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # not exported
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self._num_islands,
            use_async_quorum=False,
            timeout=_TIMEOUT,
            quorum_timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=self._address,
            store_port=store.port,
            lighthouse_addr=words[0]["lighthouse"],
            replica_id=f"island_{self._place}",
            hostname=self._address,
            init_sync=False,  # all islands have built the same model
        )
        self._ends += [lambda: manager.shutdown(wait=False), lambda: store]
        outer = torch.optim.SGD(self._loop.model.parameters(), OUTER_RATE, OUTER_MOMENTUM, nesterov=True)
        self._diloco = local_sgd.DiLoCo(
            manager, [self._loop.model], self._loop.optimizer, outer, sync_every=self._sync_every
        )
        self._count_commits(manager)

    def roster(self, round: int) -> dict[str, Any]:
        """Return that no island is missing: the first exchange formed the group."""
        return {"missing": ""}

    def _count_commits(self, manager: Any) -> None:
        should_commit = manager.should_commit

        def counted(*words: Any, **more: Any) -> bool:
            commits = bool(should_commit(*words, **more))
            self._included += commits and manager.is_participating()
            return commits

        manager.should_commit = counted

    # -- windows

    def train(self, at: float, seconds: float) -> dict[str, Any]:
        """Train without an exchange."""
        while time.monotonic() < at:
            self._step()
        before = time.process_time()
        while time.monotonic() < at + seconds:
            self._step()
        return self._answer(at, at + seconds, before)

    def exchange(self, round: int, num_rounds: int, num_cycles: int, at: float) -> dict[str, Any]:
        """Train for `num_cycles` cycles of steps, with an exchange at the end of each."""
        while time.monotonic() < at:
            self._step()
        before, self._included = time.process_time(), 0.0
        began = self._borders[-1]
        with self._diloco:
            for _ in range(num_cycles * self._sync_every):
                self._step()
        return self._answer(began, self._borders[-1], before, included=self._included, due=float(num_cycles))

    def _step(self) -> None:
        self._loop.step()
        self._borders.append(time.monotonic())

    def _answer(self, began: float, ended: float, before: float, **more: float) -> dict[str, Any]:
        steps = steps_within(self._borders, began, ended)
        work = {"training": time.process_time() - before}
        return {"seconds": ended - began, "steps": steps, "work": work, **more}
