"""A custom training loop that uses only public names: `python own_loop_peer.py ORDER.json`.

It writes a line of `said.jsonl` about twice a second, and one when it ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import p2p_diloco

SAY_SECONDS = 0.5


class Problems(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sums of eight numbers, without end."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        draw = torch.Generator().manual_seed(self._seed + (worker.id if worker is not None else 0))
        while True:
            numbers = torch.rand(8, generator=draw)
            yield numbers, numbers.sum(dim=0, keepdim=True)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def main(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    torch.set_num_threads(1)
    torch.manual_seed(order["seed"])
    device = torch.device(order.get("device", "cpu"))
    torch.set_float32_matmul_precision("high")  # otherwise a compiler for GPUs warns
    model = make_model().to(device)
    stepped = torch.compile(model, backend=order.get("compiler", "aot_eager")) if order.get("compiles") else model
    # As for float16: float32 parameters, and scaled losses so that small gradients are not lost.
    halves = torch.float16 if order.get("scales") else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=bool(order.get("scales")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    settings = {"state_directory": folder, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "no_port_mapping": True}
    around: dict[str, Any] = {"settings": settings, "until_round": order["until_round"]}
    if order["run"] is not None:
        swarm = p2p_diloco.found(order["run"], stepped, optimizer, **around)
    else:
        swarm = p2p_diloco.join(order["invite"], stepped, optimizer, timeout=60.0, **around)

    def say(**figures: Any) -> None:
        with (folder / "said.jsonl").open("a") as file:
            file.write(json.dumps(figures) + "\n")

    with swarm:
        workers = order.get("workers", 0)
        context = order.get("context") if workers else None
        loader = DataLoader(Problems(swarm.seed), batch_size=64, num_workers=workers, multiprocessing_context=context)
        said_at, paused, calls = 0.0, False, deque[float](maxlen=256)
        for numbers, sums in loader:
            with torch.autocast(device.type, halves, enabled=bool(order.get("autocast"))):
                loss = nn.functional.mse_loss(stepped(numbers.to(device)).float(), sums.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            time.sleep(0.005)
            value, began = loss.item(), time.perf_counter()
            goes_on = swarm.step(tokens=len(numbers), loss=value)
            calls.append(time.perf_counter() - began)
            if not goes_on:
                break
            status = swarm.status
            if time.monotonic() - said_at > SAY_SECONDS:
                said_at = time.monotonic()
                say(
                    round=status.round,
                    loss=value,
                    log_digest=status.log_digest,
                    invite=swarm.invite,
                    phase=status.phase,
                    entries=status.entries_absorbed,
                    step_seconds=swarm.step_seconds,
                    call_seconds=fmean(calls),
                )
            if status.round >= order.get("pause_at", 1 << 30) and not paused:
                paused = True
                time.sleep(order["pause_seconds"])
            if (folder / "fail").exists():
                raise RuntimeError("the caller's own error")
    say(ended=True, digest=swarm.status.state_digest)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
