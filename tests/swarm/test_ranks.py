"""Islands of several ranks in real processes: access to their parameters, and models that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import p2p_diloco
from p2p_diloco.config.run_file import read_run_toml
from p2p_diloco.island.parameters import trained
from p2p_diloco.island.shards import reshard
from p2p_diloco.testing import local_swarm
from tests.swarm.island_rank import make_net, wrapped
from tests.swarm.rank_processes import rank_processes

ROUNDS = {"round_seconds": 1.0, "fragments": 2, "spans_per_fragment": 3}


def new_run(folder: Path) -> Path:
    run = folder / "run.toml"
    p2p_diloco.new_run(run, make_net(), rounds=ROUNDS)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.long),
        ("fsdp", 2),
        pytest.param("fsdp", 4, marks=pytest.mark.long),
        pytest.param("mixed", 4, marks=pytest.mark.long),
    ],
)
def test_slices_of_all_ranks_are_those_of_the_plain_model(tmp_path: Path, kind: str, count: int) -> None:
    with rank_processes(tmp_path / "island", count, "parameters", kind=kind) as island:
        said = island.said()
    assert [one["checked"] for one in said] == [2] * count
    assert said[0]["equal"] is True
    assert len({one["digest"] for one in said}) == 1
    assert all(one["restored"] == [True, True] for one in said)
    elements = sum(tensor.numel() for tensor in trained(make_net()).values())
    held = [one["held"] for one in said]
    assert held == [elements] * count if kind == "ddp" else max(held) < elements
    assert kind != "fsdp" or sum(held) == elements, "no element is on two ranks"


@pytest.mark.parametrize(
    ("differs", "kind", "expected"),
    [
        ("shape", "plain", r"rank 1 does not train the same tensors as rank 0: last.weight is of shape \(2, 3\) there"),
        pytest.param(
            "name",
            "plain",
            r"rank 1 does not train the same tensors as rank 0: extra.weight is of shape \(2, 3\) there",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "values",
            "plain",
            "parameter first.weight has other values on rank 1 than on rank 0",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "rest",
            "fsdp",
            "tensor scale, which is not trained, has other values on rank 1 than on rank 0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_with_different_models_are_refused(tmp_path: Path, differs: str, kind: str, expected: str) -> None:
    order = {"run": str(new_run(tmp_path)), "kind": kind, "differs": differs}
    with rank_processes(tmp_path / "island", 2, "loop", **order) as island:
        assert island.end() == [1, 1]
        for rank in range(2):
            kind, text, _ = island.found(rank)["error"]
            assert kind == "ConfigError"
            assert re.match(expected, text), text


@pytest.mark.long
def test_ranks_that_do_not_exchange_their_gradients_are_refused(tmp_path: Path) -> None:
    order = {"run": str(new_run(tmp_path)), "kind": "plain", "exchanges": False}
    with rank_processes(tmp_path / "island", 2, "loop", **order) as island:
        assert island.end() == [1, 1]
        for rank in range(2):
            kind, text, _ = island.found(rank)["error"]
            assert kind == "ConfigError"
            assert "so the ranks do not exchange their gradients; wrap the model in DistributedDataParallel" in text


@pytest.mark.long
def test_own_exchange_of_gradients_is_accepted(tmp_path: Path) -> None:
    order = {"run": str(new_run(tmp_path)), "kind": "plain", "until_round": 6}
    with rank_processes(tmp_path / "island", 2, "loop", **order) as island:
        said = island.said()
    assert said[0]["shared"] == said[1]["shared"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_one_rank_has_broken_is_undone_on_all(tmp_path: Path, kind: str) -> None:
    order = {"run": str(new_run(tmp_path)), "kind": kind, "steps": 40, "breaks_at": 30, "dying": 1}
    with rank_processes(tmp_path / "island", 2, "loop", **order) as island:
        said = island.said()
    assert said[0]["undone"] == 1
    assert said[0]["counted"] in range(said[0]["steps"] - 4, said[0]["steps"]), "all others count, but the last"
    assert said[0]["finite"]
    assert said[1]["finite"]
    assert kind == "fsdp" or said[0]["left"] == pytest.approx(said[1]["left"]), "equal moments"
    assert kind == "fsdp" or said[0]["shared"] == said[1]["shared"]


@pytest.mark.slow
def test_a_sharded_model_of_one_rank_trains_without_a_network(tmp_path: Path) -> None:
    """As under `torchrun --nproc-per-node 1`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = wrapped(make_net(), "fsdp")
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
        draw, losses = torch.Generator().manual_seed(0), []
        with local_swarm() as local, local.found(model, optimizer, until_round=12) as swarm:
            while True:
                numbers = torch.rand(16, 8, generator=draw)
                loss = nn.functional.mse_loss(model(numbers), numbers.sum(dim=1, keepdim=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if not swarm.step(tokens=16, loss=loss.item()):
                    break
            swarm.save(tmp_path / "shared.safetensors")
            with swarm.anchor(), torch.no_grad():
                shared = {name: tensor.full_tensor().clone() for name, tensor in trained(model).items()}
                outputs = [model(numbers)]  # without a backward pass FSDP's root stays gathered
            with torch.no_grad():
                outputs.append(model(numbers))
            reshard(model)
            with torch.no_grad():
                outputs.append(model(numbers))
        saved = load_file(tmp_path / "shared.safetensors")
        assert all(torch.equal(saved[name], tensor) for name, tensor in shared.items())
        assert {"frozen.weight", "again.weight", "scale"} < saved.keys(), "the whole state_dict"
        assert torch.equal(outputs[1], outputs[2]), "the model holds its own parameters again"
        assert not torch.equal(outputs[0], outputs[1])
        assert losses[-1] < 0.5 * losses[0]
        assert swarm.status.entries_absorbed > 0
    finally:
        dist.destroy_process_group()


def test_the_description_of_a_wrapped_model_is_that_of_the_plain_one(tmp_path: Path) -> None:
    p2p_diloco.new_run(tmp_path / "plain.toml", make_net(), name="run", rounds=ROUNDS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for kind in ("ddp", "fsdp", "mixed"):
            written = p2p_diloco.new_run(
                tmp_path / f"{kind}.toml", wrapped(make_net(), kind), name="run", rounds=ROUNDS
            )
            assert written.model == read_run_toml(tmp_path / "plain.toml").model
    finally:
        dist.destroy_process_group()
