"""One rank of an island: `python island_rank.py ORDER.json [RANK]`, with the tasks of the tests of islands.

`torchrun` passes the rank in the environment.

Each rank writes what it has found to `said-RANK.json` beside its order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import p2p_diloco
from p2p_diloco.app.models.model import build_model, token_loss
from p2p_diloco.app.models.run_model import build_run_model
from p2p_diloco.app.models.text_model import TextModel, decoder_text_model
from p2p_diloco.app.training import built_in
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.rank_steps import RankBatches, RankSteps
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.island.island import Island, plan_text
from p2p_diloco.island.parameters import LocalParameters, sizes, trained
from p2p_diloco.island.rank_parameters import RankParameters
from p2p_diloco.island.ranks import Ranks
from p2p_diloco.island.shards import local_part, reshard
from p2p_diloco.outer.fragments import plan_fragments
from tests.session.small_run import ORGANISER, EveryThird, small_plan, start_states, write_text

HOME = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "no_port_mapping": True}


class Net(nn.Module):
    """Layers of few and uneven rows, a frozen layer, a buffer, and a head tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 33), nn.Linear(33, 3)
        self.frozen, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.words, self.again = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.again.weight = self.words.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.second(nn.functional.gelu(self.first(numbers)))) * self.scale
        word = self.words(torch.zeros(len(numbers), dtype=torch.int64))
        found: torch.Tensor = self.last(hidden) + 0.01 * self.again(word).sum(dim=1, keepdim=True)
        return found


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def wrapped(model: Net, kind: str) -> nn.Module:
    """Return the model as an island of this kind trains it."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model.first)
        fully_shard(model)
    if kind == "mixed":  # the other tensors are whole on all ranks
        fully_shard(model.first)
        fully_shard(model.second)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest_of(model: nn.Module) -> str:
    """Return a digest of all trained tensors, whole; all ranks call this."""
    sha = hashlib.sha256()
    for name, tensor in sorted(trained(model).items()):
        sha.update(name.encode() + whole(tensor.detach()).clone().numpy().tobytes())
    return sha.hexdigest()


# -- tasks


def parameters(order: dict[str, Any]) -> dict[str, Any]:
    """Read, write and add slices, on this island and on a plain model; compare."""
    model, twin = wrapped(make_net(), order["kind"]), make_net()
    fragments = plan_fragments(sizes(twin), 2)
    ranks = Ranks(20.0)
    island, tensors = Island(ranks), trained(model)
    island.attach(model, tensors, {}, Path())
    ours, theirs = RankParameters(model, tensors, fragments, ranks), LocalParameters(twin, fragments)
    ranks.announce(plan_text(fragments, "run"))
    draw = np.random.default_rng(7)

    def work(reports: list[list[float]]) -> int:
        for fragment in fragments:
            assert np.array_equal(ours.read(fragment.index), theirs.read(fragment.index))
        for number in range(60):
            fragment = fragments[number % 2]
            start, stop = sorted(draw.integers(0, fragment.elements + 1, 2).tolist())
            values_N = draw.standard_normal(stop - start).astype(np.float32)
            values_N.flags.writeable = False
            for parameters in (ours, theirs):
                (parameters.write if number % 3 else parameters.add)(fragment.index, start, stop, values_N)
            assert np.array_equal(ours.read(fragment.index, start, stop), theirs.read(fragment.index, start, stop))
            assert np.array_equal(ours.view(fragment.index, start, stop), theirs.view(fragment.index, start, stop))
        return len(fragments)

    checked = island.call("wait", work)
    before = digest_of(model)
    island.call("wait", lambda reports: ours.keep())
    island.call("wait", lambda reports: ours.write(0, 0, fragments[0].elements, theirs.read(0) * 0))
    cleared = digest_of(model)
    island.call("wait", lambda reports: ours.restore_all())
    return {
        "checked": checked,
        "equal": before == digest_of(twin) if ranks.leads else None,
        "digest": before,
        "restored": [before != cleared, before == digest_of(model)],
        "held": sum(local_part(tensor).numel() for tensor in tensors.values()),
    }


def loop(order: dict[str, Any]) -> dict[str, Any]:
    """Train in a run until it is over."""
    rank, folder = dist.get_rank(), Path(order["folder"])
    seed = order.get("model_seed", 0) + (rank if order.get("differs") == "values" else 0)
    model = make_net(seed)
    if order.get("differs") == "rest" and rank:
        model.scale[:] = 2.0
    if order.get("differs") == "shape" and rank:
        model.last = nn.Linear(3, 2)
    if order.get("differs") == "name" and rank:
        model.extra = nn.Linear(3, 2)
    model = wrapped(model, order["kind"])
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    around: dict[str, Any] = {
        "settings": {"state_directory": folder / "state", **HOME},
        "until_round": order.get("until_round"),
        "rank_timeout": order.get("rank_timeout", 20.0),
    }
    if "invite" in order:
        swarm = p2p_diloco.join(order["invite"], model, optimizer, timeout=60.0, **around)
    else:
        swarm = p2p_diloco.found(order["run"], model, optimizer, **around)
    said: dict[str, Any] = {"losses": [], "seed": swarm.seed, "progress": [swarm.progress]}
    said["momentum"] = sum(
        state["exp_avg"].abs().sum().item() for state in map(dict, optimizer.state.values()) if state
    )
    (folder / f"began-{rank}").touch()
    draw, steps = torch.Generator().manual_seed(swarm.seed), 0
    with swarm:
        while True:
            numbers = torch.rand(16, 8, generator=draw)
            loss = nn.functional.mse_loss(model(numbers), numbers.sum(dim=1, keepdim=True))
            if order.get("trains", True):
                loss.backward()
            if order.get("kind") == "plain" and order.get("exchanges", True) and dist.get_world_size() > 1:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
            if (steps, rank) == (order.get("breaks_at"), order.get("dying")):
                next(local_part(p) for p in model.parameters() if p.requires_grad).fill_(float("nan"))
            said["losses"].append(loss.item())
            steps += 1
            time.sleep(order.get("pause", 0.01))
            if steps == order.get("anchor_at"):
                said["anchor"] = look_at_anchor(swarm, model, numbers)
            is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if (steps, rank) == (order.get("dies_at"), order.get("dying")) and is_first_start:
                os.kill(os.getpid(), signal.SIGKILL)
            if (steps, rank) == (order.get("hangs_at"), order.get("dying")):
                os.kill(os.getpid(), signal.SIGSTOP)
            if (steps, rank) == (order.get("fails_at"), order.get("dying")):
                raise RuntimeError("the caller's own error")
            began = time.monotonic()
            try:
                goes_on = swarm.step(tokens=len(numbers) + rank, loss=loss.item())
            except p2p_diloco.P2PDilocoError as error:
                said["error"] = [kind_of(error), str(error), time.monotonic() - began]
                write(folder, rank, said)
                raise
            if not goes_on or steps == order.get("steps"):
                break
    status = swarm.status
    said |= {"digest": status.state_digest, "steps": steps, "tokens": status.tokens, "counted": status.inner_steps}
    said |= {"undone": status.steps_undone, "finite": all(map(math.isfinite, said["losses"][-5:]))}
    said["restarts"] = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    said["progress"].append(swarm.progress)
    said["left"] = momentum_of(optimizer)
    with swarm.anchor():
        said["shared"] = digest_of(model)
    if "export" in order:
        swarm.export(folder / "export")
        try:
            swarm.export(folder / "export")
        except p2p_diloco.ConfigError as error:
            said["again"] = str(error)
    return said


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the sum of this rank's part of all first moments."""
    moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
    return sum(float(local_part(moment).abs().sum()) for moment in moments)


def look_at_anchor(swarm: p2p_diloco.Swarm, model: nn.Module, numbers: torch.Tensor) -> dict[str, Any]:
    """Evaluate the shared model, which leaves FSDP's root gathered, and see that training goes on from its own."""
    with swarm.anchor(), torch.no_grad():
        shared = model(numbers).sum().item()
    with torch.no_grad():
        own = model(numbers).sum().item()
        reshard(model)
        fresh = model(numbers).sum().item()
    return {"shared": shared, "own": own, "fresh": fresh}


class DrawnBatches:
    """Random windows, the same at each start."""

    def __init__(self, batch: int, shape: ModelShape) -> None:
        self.batch, self.context = batch, shape.context
        self._vocabulary = shape.vocabulary
        self._draw = torch.Generator().manual_seed(5)

    def next_batch(self) -> torch.Tensor:
        return torch.randint(0, self._vocabulary, (self.batch, self.context + 1), generator=self._draw)


class HalfUsed(nn.Module):
    """A language model with a part that only some windows use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.rare = nn.Linear(8, 8)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        hidden = self.words(windows[:, :-1])
        is_rare = windows[:, 0] < 40
        if bool(is_rare.any()):
            hidden = hidden + is_rare[:, None, None] * self.rare(hidden)
        return token_loss(self.head(hidden), windows)


def run_out_of_memory(module: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def text_model(kind: str, seed: int) -> TextModel:
    if kind == "decoder":
        return decoder_text_model(build_model(STEPS_SHAPE, seed))
    if kind == "hungry":
        return dataclasses.replace(decoder_text_model(build_model(STEPS_SHAPE, seed)), loss=run_out_of_memory)
    module = HalfUsed(seed)
    return TextModel(module=module, loss=lambda model, windows: model.loss(windows), context=16, vocabulary=256)


STEPS_SHAPE = ModelShape(layers=2, width=16, heads=2, feed_forward=33, context=16)
STEPS = 4


def train_steps(loop: InnerLoop, windows_at_once: int) -> dict[str, Any]:
    """Make a few steps; return what they were."""
    loop.windows_at_once = windows_at_once
    made = [loop.step() for _ in range(STEPS)]
    return {
        "losses": [step.loss for step in made],
        "norms": [step.gradient_norm for step in made],
        "tokens": [step.tokens for step in made],
    }


def steps(order: dict[str, Any]) -> dict[str, Any]:
    """Make steps of several models with the other ranks; rank 0 writes the parameters that they end with."""
    ranks, said = Ranks(), {}
    for case in order["cases"]:
        name, kind, has_shards, batch = case["name"], case["kind"], case["has_shards"], case["batch"]
        model = text_model(kind, seed=ranks.rank)  # rank 0's values count
        source = DrawnBatches(batch, STEPS_SHAPE) if ranks.leads else None
        together = RankSteps(ranks, has_shards=has_shards, uses_all=kind == "decoder")
        try:
            stream = RankBatches(ranks, source, batch=batch, context=STEPS_SHAPE.context)
            rule = InnerRule(warmup_steps=1)
            loop = InnerLoop(model, stream, rule, recompute=case["recompute"], ranks=together)
            said[name] = train_steps(loop, case["windows_at_once"])
        except p2p_diloco.P2PDilocoError as error:
            said[name] = {"error": str(error)}
            continue
        said[name]["recomputes"] = loop.recomputes
        held = {name: local_part(tensor).numel() for name, tensor in trained(model.module).items()}
        said[name]["held"] = sum(held.values())
        ended = {key: whole(tensor).detach().clone() for key, tensor in trained(model.module).items()}
        if ranks.leads:
            torch.save(ended, Path(order["folder"]) / f"{name}.pt")
    return said


class SharedOut(RankBatches):
    """Batches that note how many windows this rank got in each step."""

    windows: ClassVar[list[int]] = []

    def next_batch(self) -> torch.Tensor:
        batch = super().next_batch()
        self.windows.append(len(batch))
        return batch


def turns(order: dict[str, Any]) -> dict[str, Any]:
    """Train a small run with the built-in trainer, whose batch changes after every third step."""
    ranks, folder, models = Ranks(), Path(order["folder"]), list[TextModel]()
    island = Island(ranks)

    def build(*values: Any, **named: Any) -> TextModel:
        models.append(build_run_model(*values, **named))
        return models[-1]

    vars(built_in).update(RankBatches=SharedOut, BatchChoice=EveryThird, build_run_model=build)
    settings = PeerSettings(device="cpu", state_directory=folder / f"state-{ranks.rank}", shards=order["shards"])
    if not ranks.leads:
        built_in.follow_rank_0(island, settings)
    else:
        lead_turns(island, settings.model_copy(update={"data": str(write_text(folder))}), order["steps"])
    return {"windows": SharedOut.windows, "digest": digest_of(models[0].module)}


def lead_turns(island: Island, settings: PeerSettings, num_steps: int) -> None:
    """Make that many steps as rank 0, and let the others end."""
    plan = small_plan({"rounds.planned_steps": 8})
    settings.state_directory.mkdir()
    host: Any = SimpleNamespace(
        plan=plan, settings=settings, peer=ORGANISER.peer, incarnation=1, folder=settings.state_directory, text=None,
        now=lambda: 0.0, in_loop=lambda call: call(), report=lambda topic, text: None,
        report_soon=lambda topic, text: None, died=print, damaged=print,
        reporter=SimpleNamespace(note=lambda **facts: None),
    )  # fmt: skip
    training = built_in.BuiltInTraining(evaluate_seconds=0.0, founds=True, island=island)
    state = training.open(host)
    for span, start in start_states(plan).items():
        state.replace(span, start)
    until = time.monotonic() + 60.0
    while state.counts.steps < num_steps and time.monotonic() < until:
        time.sleep(0.01)
    asyncio.run(training.end())
    state.close()
    island.close()


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "parameters": parameters,
    "loop": loop,
    "steps": steps,
    "turns": turns,
}


def write(folder: Path, rank: int, said: dict[str, Any]) -> None:
    (folder / f"said-{rank}.json").write_text(json.dumps(said))


def main(order: dict[str, Any], rank: int | None) -> None:
    torch.set_num_threads(1)
    folder, patience = Path(order["folder"]), timedelta(seconds=60)
    if rank is None:
        dist.init_process_group("gloo", timeout=patience)
    else:
        store, count = f"file://{order['store']}", order["count"]
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=patience)
    try:
        write(folder, dist.get_rank(), TASKS[order["task"]](order))
    except p2p_diloco.P2PDilocoError as error:
        if not (folder / f"said-{rank}.json").exists():
            write(folder, dist.get_rank(), {"error": [kind_of(error), str(error), 0.0]})
        raise
    dist.destroy_process_group()


def kind_of(error: Exception) -> str:
    """Return the class of an error that users see."""
    kinds = (p2p_diloco.ConfigError, p2p_diloco.NetworkError, p2p_diloco.StateError)
    return next(kind.__name__ for kind in kinds if isinstance(error, kind))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]) if len(sys.argv) > 2 else None)
