"""A language model on a GPU in a custom loop, timed in a swarm and alone: `python gpu_speed_peer.py ORDER.json`.

Beside it runs a second process of the same file, on the processor, that makes a small step at intervals.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import p2p_diloco

PATIENCE_SECONDS = 120.0


class Reader(nn.Module):
    """A decoder over bytes, its head tied to its embedding."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        length = words.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        found = self.embedding(words) + self.places(torch.arange(length, device=words.device))
        return self.norm(self.layers(found, mask=mask, is_causal=True)) @ self.embedding.weight.T


class Loop:
    """Training steps on the text of this project, and their durations."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.device = torch.device(order["device"])
        torch.manual_seed(0)
        self.model = Reader(order["width"], order["layers"], order["context"]).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        text = b"".join(path.read_bytes() for path in sorted(Path(order["text"]).rglob("*.py")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch, self.context = order["batch"], order["context"]
        self.draw = torch.Generator().manual_seed(order["seed"])
        self.seconds: list[float] = []
        self.loss = 0.0

    def step(self, swarm: p2p_diloco.Swarm | None) -> bool:
        began = time.perf_counter()
        starts = torch.randint(len(self.text) - self.context - 1, (self.batch,), generator=self.draw)
        words = torch.stack([self.text[at : at + self.context + 1] for at in starts.tolist()]).to(self.device).long()
        with torch.autocast(self.device.type, torch.bfloat16):
            found = self.model(words[:, :-1])
        loss = nn.functional.cross_entropy(found.flatten(0, 1).float(), words[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()
        goes_on = swarm is None or swarm.step(tokens=self.batch * self.context, loss=self.loss)
        self.seconds.append(time.perf_counter() - began)
        return goes_on

    def window(self, swarm: p2p_diloco.Swarm | None, seconds: float) -> float:
        """Make steps for a time; return the steps per second."""
        began, before = time.perf_counter(), len(self.seconds)
        while time.perf_counter() - began < seconds:
            self.step(swarm)
        return (len(self.seconds) - before) / (time.perf_counter() - began)


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Time the loop alone, then in a run that it founds and that the partner joins, then alone again."""
    loop, folder = Loop(order), Path(order["folder"])
    cycle = order["round_seconds"] * order["fragments"]
    rounds = {"round_seconds": order["round_seconds"], "fragments": order["fragments"]}
    p2p_diloco.new_run(folder / "run.toml", loop.model, rounds=rounds)
    loop.window(None, 5.0)
    before = [loop.window(None, cycle / 2) for _ in range(order["windows"])]
    with p2p_diloco.found(folder / "run.toml", loop.model, loop.optimizer, settings=order["settings"]) as swarm:
        while not swarm.invite:
            loop.step(swarm)
        (folder / "invite").write_text(swarm.invite)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while swarm.status.num_ready < 2:
            assert time.monotonic() < give_up, swarm.status
            loop.step(swarm)
        loop.window(swarm, 2 * cycle)
        entries, first = swarm.status.entries_absorbed, len(loop.seconds)
        beside = [loop.window(swarm, cycle) for _ in range(2 * order["windows"])]
        status, longest, step_seconds = swarm.status, max(loop.seconds[first:]), swarm.step_seconds
        (folder / "over").touch()
    after = [loop.window(None, cycle / 2) for _ in range(order["windows"])]
    alone = statistics.median(before + after)
    return {
        "parameters": sum(parameter.numel() for parameter in loop.model.parameters()),
        "step_ms": 1000 / alone,
        "share": statistics.median(beside) / alone,
        "steps_per_second": {"before": before, "beside": beside, "after": after},
        "longest_step_ms": 1000 * longest,
        "mean_call_of_step_us": 1e6 * step_seconds,
        "entries": status.entries_absorbed - entries,
        "participation": status.participation,
        "loss": loop.loss,
    }


def accompany(order: dict[str, Any]) -> dict[str, Any]:
    """Take part with a small step on the processor at intervals."""
    loop, folder = Loop(order), Path(order["folder"])
    while not (folder / "invite").exists():
        time.sleep(0.2)
    invite = (folder / "invite").read_text()
    with p2p_diloco.join(invite, loop.model, loop.optimizer, settings=order["settings"]) as swarm:
        while not (folder / "over").exists() and loop.step(swarm):
            time.sleep(0.3)
    return {"participation": swarm.status.participation}


if __name__ == "__main__":
    order = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(4)
    print(json.dumps((measure if order["measures"] else accompany)(order)))
