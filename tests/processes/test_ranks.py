"""Islands of several ranks in a run: equal bytes, lost ranks, restarts."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import p2p_diloco
from p2p_diloco.island.parameters import trained
from p2p_diloco.storage.entry_log import EntryLog
from tests.swarm.island_rank import HOME, make_net
from tests.swarm.rank_processes import PATIENCE_SECONDS, PROGRAM, rank_processes
from tests.swarm.test_ranks import new_run

pytestmark = [pytest.mark.wall_clock, pytest.mark.long]

UNTIL_ROUND = 75
LEAST_STEPS = 20
PLAIN_PAUSE_SECONDS = 0.1
"""So that this island makes no more steps than the others, whose ranks share the machine."""
PLAIN_TOKENS = 40
"""Tokens of a step of the plain island; of an island of two ranks they are 16 + 17."""


class PlainLoop:
    """An island of one process: the test."""

    def __init__(self, folder: Path, until_round: int | None) -> None:
        self.model = make_net()
        self.optimizer = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=3e-3)
        self.swarm = p2p_diloco.found(
            new_run(folder),
            self.model,
            self.optimizer,
            settings={"state_directory": folder / "plain", **HOME},
            until_round=until_round,
        )
        self.losses: list[float] = []

    def step(self) -> bool:
        numbers = torch.rand(16, 8)
        loss = nn.functional.mse_loss(self.model(numbers), numbers.sum(dim=1, keepdim=True))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        time.sleep(PLAIN_PAUSE_SECONDS)
        return self.swarm.step(tokens=PLAIN_TOKENS, loss=loss.item())

    def invite(self) -> str:
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.swarm.invite and time.monotonic() < until:
            self.step()
        return self.swarm.invite

    def digest(self) -> str:
        sha = hashlib.sha256()
        with self.swarm.anchor():
            for name, tensor in sorted(trained(self.model).items()):
                sha.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        return sha.hexdigest()


@contextmanager
def plain_loop(folder: Path, until_round: int | None = None) -> Iterator[PlainLoop]:
    torch.manual_seed(3)
    loop = PlainLoop(folder, until_round)
    with loop.swarm:
        yield loop


def follows_from_tokens(weights: Sequence[float], tokens: int) -> bool:
    """Return whether these are the tokens of whole steps of a plain island and two of two ranks, in some order."""
    orders = itertools.permutations((PLAIN_TOKENS, 33, 33))
    are_steps = any(all(weight % one == 0 for weight, one in zip(weights, rates, strict=True)) for rates in orders)
    return are_steps and min(weights) > 0 and sum(weights) == tokens


def test_a_plain_a_replicated_and_a_sharded_island_train_one_run_to_the_same_bytes(tmp_path: Path) -> None:
    with plain_loop(tmp_path, until_round=UNTIL_ROUND) as plain:
        order = {"invite": plain.invite(), "until_round": UNTIL_ROUND, "export": True}
        with (
            rank_processes(tmp_path / "ddp", 2, "loop", kind="ddp", anchor_at=40, **order) as replicated,
            rank_processes(tmp_path / "fsdp", 2, "loop", kind="fsdp", anchor_at=40, **order) as sharded,
        ):
            while plain.step():
                pass
            shared, digest = plain.digest(), plain.swarm.status.state_digest
            plain.swarm.export(tmp_path / "export")
            said = [*replicated.said(), *sharded.said()]
    assert [one["digest"] for one in said] == [digest, "", digest, ""]
    assert {one["shared"] for one in said} == {shared}, "all ranks hold the shared model inside anchor()"
    assert min(one["steps"] for one in said) >= LEAST_STEPS
    for one in said:
        assert one["anchor"]["own"] == one["anchor"]["fresh"] != one["anchor"]["shared"]
        assert one["losses"][-1] < 0.3 * plain.losses[0]
        assert 0.0 <= one["progress"][0] <= one["progress"][1] <= 1.0
    assert len({one["seed"] for one in said}) == 4, "each rank draws its own data"
    assert all(one["tokens"] == 33 * one["counted"] > 0 for one in (said[0], said[2])), "the sum over the ranks"
    assert all(one["counted"] <= one["steps"] for one in (said[0], said[2]))
    entries = [entry for log in tmp_path.glob("plain/*/entries") for entry in EntryLog(log, keep_cycles=99).kept()]
    of_all = [entry for entry in entries if len(entry.weights) == 3 and all(entry.weights)]
    assert len(of_all) >= 8
    by_rule = [entry for entry in of_all if follows_from_tokens(entry.weights, entry.tokens)]
    assert len(by_rule) >= 0.9 * len(of_all), "newcomers and islands that have just come back count at most the median"
    whole = load_file(tmp_path / "export" / "model.safetensors")
    for folder in ("ddp", "fsdp"):
        exported = load_file(tmp_path / folder / "export" / "model.safetensors")
        assert exported.keys() == whole.keys()
        assert all(torch.equal(whole[name], exported[name]) for name in whole)
        assert all("is not empty" in one["again"] for one in said), "an error is raised on all ranks"
    make_net(5).load_state_dict(exported)


def test_four_ranks_found_a_run_from_their_shards(tmp_path: Path) -> None:
    order = {"run": str(new_run(tmp_path)), "until_round": 8, "kind": "fsdp", "export": True}
    with rank_processes(tmp_path / "island", 4, "loop", **order) as island:
        said = island.said()
    assert len({one["shared"] for one in said}) == 1
    assert said[0]["digest"] != ""
    assert said[0]["losses"][-1] < said[0]["losses"][0]


@pytest.mark.parametrize("what", ["dies", "hangs", "fails"])
@pytest.mark.parametrize("dying", [0, 1])
def test_a_lost_rank_ends_the_island_in_bounded_time(tmp_path: Path, what: str, dying: int) -> None:
    """Without gradients to exchange, so that the loss is noticed in `step`."""
    run = str(new_run(tmp_path))
    order = {"run": run, "kind": "plain", "trains": False, "dying": dying, f"{what}_at": 100, "rank_timeout": 4.0}
    with rank_processes(tmp_path / "island", 2, "loop", **order) as island:
        other = 1 - dying
        assert island.end(other) == [1]
        kind, text, seconds = island.found(other)["error"]
        assert kind == "StateError"
        assert text.startswith(f"rank {dying} of this island")
        assert text.endswith("start all its ranks again to continue") or what == "fails"
        assert seconds < 12.0
        if what == "hangs":
            assert "did not answer within" in text
    assert "finished" in (tmp_path / "island" / "state" / "events.jsonl").read_text() or dying == 0


def test_an_error_of_one_rank_ends_ranks_that_wait_for_its_gradients(tmp_path: Path) -> None:
    order = {"run": str(new_run(tmp_path)), "kind": "ddp", "dying": 1, "fails_at": 100}
    with rank_processes(tmp_path / "island", 2, "loop", **order) as island:
        island.wait_until_begun()
        assert island.end(patience_seconds=60.0) == [1, 1]
        assert "RuntimeError: the caller's own error" in island.errors()
    assert '"topic": "finished"' in (tmp_path / "island" / "state" / "events.jsonl").read_text()


def test_an_island_started_again_continues_with_the_state_of_all_its_optimisers(tmp_path: Path) -> None:
    with plain_loop(tmp_path) as plain:
        order = {"invite": plain.invite(), "kind": "fsdp"}
        folder = tmp_path / "island"
        with rank_processes(folder, 2, "loop", steps=150, **order) as island:
            while any(process.poll() is None for process in island.processes):
                plain.step()
            first = island.said()
        assert sorted(path.name for path in folder.glob("state/*/inner*.pt")) == ["inner-rank-1.pt", "inner.pt"]
        assert [one["momentum"] for one in first] == [0.0, 0.0]
        with rank_processes(folder, 2, "loop", steps=20, **order) as island:
            while any(process.poll() is None for process in island.processes):
                plain.step()
            second = island.said()
        assert [one["momentum"] for one in second] == [one["left"] for one in first]
        (next(folder.glob("state/*/inner-rank-1.pt"))).unlink()
        with rank_processes(folder, 2, "loop", steps=20, **order) as island:
            while any(process.poll() is None for process in island.processes):
                plain.step()
            third = island.said()
        assert [one["momentum"] for one in third] == [0.0, 0.0], "all ranks or none"
        assert "do not belong together" in (folder / "state" / "events.jsonl").read_text()


def test_torchrun_restarts_an_island_after_a_rank_was_killed(tmp_path: Path) -> None:
    """Where torchrun shares its store, restarted gloo ranks may read the addresses of those that ended."""
    with plain_loop(tmp_path) as plain:
        folder = tmp_path / "island"
        folder.mkdir()
        order = {"invite": plain.invite(), "kind": "ddp", "folder": str(folder), "task": "loop", "steps": 200}
        order |= {"dies_at": 150, "dying": 1}
        (folder / "order.json").write_text(json.dumps(order))
        flags = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        done = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *flags, str(PROGRAM), str(folder / "order.json")],
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        until = time.monotonic() + 2 * PATIENCE_SECONDS
        while done.poll() is None and time.monotonic() < until:
            plain.step()
        _, errors = done.communicate(timeout=5.0)
        assert done.returncode == 0, errors
        said = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]
        assert [one["restarts"] for one in said] == ["1", "1"]
        assert said[0]["shared"] == said[1]["shared"]
        assert said[0]["counted"] > LEAST_STEPS
