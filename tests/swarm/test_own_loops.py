"""Custom loops in one process, each with a swarm in its own thread: over libp2p, and without a network."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import p2p_diloco
from p2p_diloco import api
from p2p_diloco.guest.owner_files import new_number, read_control, write_control
from p2p_diloco.testing import local_swarm

HOME = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "no_port_mapping": True}
UNTIL_ROUND = 16
PATIENCE_SECONDS = 90.0
NOBODY = f"p2pdiloco://{'0' * 64}?b=/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


class Loop:
    """One model and its swarm; the test makes its steps."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.draw = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []

    def loss(self) -> torch.Tensor:
        numbers = torch.rand(64, 8, generator=self.draw)
        return nn.functional.mse_loss(self.model(numbers), numbers.sum(dim=1, keepdim=True))

    def learn(self) -> float:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return loss.item()

    def step(self, swarm: p2p_diloco.Swarm) -> bool:
        return swarm.step(tokens=64, loss=self.learn())


@pytest.mark.slow
def test_two_swarms_in_one_process_train_together_and_end_with_the_same_bytes(tmp_path: Path) -> None:
    ada, ben = Loop(0), Loop(1)
    run = tmp_path / "run.toml"
    p2p_diloco.new_run(run, ada.model, rounds={"round_seconds": 0.5, "fragments": 2, "spans_per_fragment": 2})
    events: list[p2p_diloco.Event] = []

    async def in_a_loop_that_runs() -> p2p_diloco.Swarm:
        """Found as in a notebook, where a call may come while a loop runs in this thread."""
        where = {"state_directory": tmp_path / "ada", **HOME}
        return p2p_diloco.found(run, ada.model, ada.optimizer, settings=where, until_round=UNTIL_ROUND)

    give_up = time.monotonic() + PATIENCE_SECONDS
    with asyncio.run(in_a_loop_that_runs()) as first:
        while not first.invite and time.monotonic() < give_up:
            ada.step(first)
        with p2p_diloco.join(
            first.invite,
            ben.model,
            ben.optimizer,
            settings={"state_directory": tmp_path / "ben", **HOME},
            wait=False,
            until_round=UNTIL_ROUND,
            on_event=events.append,
        ) as second:
            going = [(ada, first), (ben, second)]
            while going and time.monotonic() < give_up:
                going = [(loop, swarm) for loop, swarm in going if loop.step(swarm)]
                time.sleep(0.005)
            assert not second.ready, "it is over"
    assert first.status.state_digest == second.status.state_digest != ""
    assert second.status.entries_absorbed > 0
    assert second.status.participation is not None
    assert ben.losses[-1] < 0.2 * ada.losses[0]
    assert "ready" in {event.topic for event in events}
    traffic = next(event.text for event in events if event.topic == "traffic")
    assert traffic.endswith("limit this with max_upload and max_download"), "names as this caller writes them"


def test_the_anchor_is_in_the_model_only_inside_the_block_and_the_model_is_free_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "LEAVE_SECONDS", 1.0)  # instead of ten, which pass completely if a round takes longer
    loop = Loop(0)
    start = [parameter.detach().clone() for parameter in loop.model.parameters()]
    with local_swarm(rounds={"round_seconds": 60.0}) as local, local.found(loop.model) as swarm:
        loop.learn()  # the swarm gets no step, so there is nothing to contribute and the anchor stays
        own = [parameter.detach().clone() for parameter in loop.model.parameters()]
        with swarm.anchor():
            assert all(torch.equal(one, two) for one, two in zip(start, loop.model.parameters(), strict=True))
        assert all(torch.equal(one, two) for one, two in zip(own, loop.model.parameters(), strict=True))
        assert not any(torch.equal(one, two) for one, two in zip(own, start, strict=True))
        with pytest.raises(p2p_diloco.ConfigError, match="this model is already in a run"):
            p2p_diloco.join(swarm.invite, loop.model)
        began = time.monotonic()
        swarm.leave()
    assert time.monotonic() - began < 16.0, "leaving does not wait for a round of a minute"
    assert not loop.step(swarm), "the loop is asked to stop"


def test_an_anchor_block_inside_another_changes_nothing() -> None:
    """Loading the anchor again would first merge what has arrived, into a model that is not this peer's own."""
    loop = Loop(0)
    with local_swarm() as local, local.found(loop.model) as swarm, swarm.anchor():
        weight = loop.model[0].weight
        with torch.no_grad():
            weight.zero_()
        with swarm.anchor():
            assert not weight.any()


def test_the_first_loss_that_a_loop_gives_is_published_as_it_is() -> None:
    loop = Loop(0)
    with local_swarm() as local, local.found(loop.model) as swarm:
        swarm.step(tokens=64)
        swarm.step(tokens=64, loss=8.0)
        swarm.leave()
    assert swarm.status.loss == pytest.approx(8.0)


def test_one_bad_batch_costs_a_step_and_the_peer_contributes_again() -> None:
    loop, events, give_up = Loop(0), list[p2p_diloco.Event](), time.monotonic() + PATIENCE_SECONDS
    with local_swarm() as local, local.found(loop.model, loop.optimizer, on_event=events.append) as swarm:
        while swarm.status.entries_absorbed < 4 and time.monotonic() < give_up:
            loop.step(swarm)
        nn.functional.mse_loss(loop.model(torch.full((4, 8), float("nan"))), torch.zeros(4, 1)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        assert swarm.step(tokens=4, loss=float("nan"))
        assert all(parameter.isfinite().all() for parameter in loop.model.parameters())
        before = swarm.status.entries_absorbed
        while swarm.status.entries_absorbed < before + 8 and time.monotonic() < give_up:
            loop.step(swarm)
    assert swarm.status.entries_absorbed >= before + 8
    assert swarm.status.steps_undone == 1
    assert swarm.status.loss is not None
    (event,) = (event for event in events if event.topic == "not-finite")
    assert "left 0.weight not finite (loss nan); continuing from the shared model" in event.text


def test_the_machines_owner_pauses_slows_and_ends_a_custom_loop(tmp_path: Path) -> None:
    ada, run, folder = Loop(0), tmp_path / "run.toml", tmp_path / "ada"
    p2p_diloco.new_run(run, ada.model, rounds={"round_seconds": 0.5, "fragments": 2, "spans_per_fragment": 2})
    give_up = time.monotonic() + PATIENCE_SECONDS

    def ask(**asked: object) -> None:
        write_control(folder, replace(read_control(folder), number=new_number(), **asked))  # type: ignore[arg-type]

    with p2p_diloco.found(run, ada.model, ada.optimizer, settings={"state_directory": folder, **HOME}) as swarm:
        ada.step(swarm)
        ask(pauses=True, pauses_until=time.time() + 3.0)
        longest = 0.0
        while longest < 1.0 and time.monotonic() < give_up:
            ada.learn()
            began = time.monotonic()
            assert swarm.step(tokens=64)
            longest = max(longest, time.monotonic() - began)
        assert longest >= 1.0, "the step that began during the pause has waited for its end"
        assert swarm.step_seconds < 0.5 * longest, "the pause is no cost of the swarm"
        ask(pauses=False, limits={"gpu_duty": "0.1"})
        while swarm.status.limits != {"gpu_duty": "0.1"} and time.monotonic() < give_up:
            ada.step(swarm)
        began = time.monotonic()
        time.sleep(0.1)
        ada.step(swarm)
        assert time.monotonic() - began >= 0.9, "a step of a tenth of a second is followed by a rest of nine"
        ask(leaves=os.getpid())
        while ada.step(swarm) and time.monotonic() < give_up:
            pass
        assert not ada.step(swarm)
    assert swarm.status.phase == "finished"


class Reader(nn.Module):
    """An embedding tied to the head, a frozen layer and buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.hidden, self.frozen = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def loss(self, words: torch.Tensor) -> torch.Tensor:
        found = self.head(self.norm(self.frozen(self.hidden(self.embedding(words)))))
        return nn.functional.cross_entropy(found, words.roll(1))


def test_an_export_and_a_saved_file_hold_the_whole_shared_model(tmp_path: Path) -> None:
    model, words = Reader(0), torch.randint(20, (64,), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    give_up = time.monotonic() + PATIENCE_SECONDS
    with local_swarm() as local, local.found(model, optimizer) as swarm:
        while swarm.status.entries_absorbed < 4 and time.monotonic() < give_up:
            optimizer.zero_grad()
            loss = model.loss(words)
            loss.backward()
            optimizer.step()
            swarm.step(tokens=64, loss=loss.item())
        swarm.leave()
        model.eval()
        with swarm.anchor():
            shared = model.loss(words).item()
        own = model.loss(words).item()
        swarm.export(tmp_path / "model")
        swarm.save(tmp_path / "shared.safetensors")
        with pytest.raises(p2p_diloco.ConfigError, match="is not empty, and nothing in it is overwritten"):
            swarm.export(tmp_path / "model")
        assert model.loss(words).item() == own != shared, "the model holds its own parameters again"
    for path in (tmp_path / "model" / "model.safetensors", tmp_path / "shared.safetensors"):
        other = Reader(1).eval()
        other.load_state_dict(load_file(path))
        assert other.loss(words).item() == shared
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| run id | `{swarm.status.run}` |" in card
    assert re.search(r"\| rounds, cycles \| [1-9][0-9]*, [0-9.]+ \|", card)
    assert re.search(r"\| tokens \| [0-9,]+ by the peer", card)
    assert re.search(r"\| training loss \| [0-9.]+, of", card)


def test_an_invite_without_an_answer_is_an_error_and_leaves_no_files(tmp_path: Path) -> None:
    loop = Loop(0)
    nobody = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    invite = f"p2pdiloco://{'0' * 64}?b=/ip4/127.0.0.1/tcp/1/p2p/{nobody}"
    for _ in range(2):
        with pytest.raises(
            p2p_diloco.NetworkError, match=r"127.0.0.1:1 refused\); most likely no bootstrap is running"
        ):
            p2p_diloco.join(invite, loop.model, settings={"state_directory": tmp_path / "ada", **HOME}, timeout=60.0)


def test_the_timeout_of_join_ends_the_wait_for_a_peer_that_says_nothing(tmp_path: Path) -> None:
    nobody = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        invite = f"p2pdiloco://{'0' * 64}?b=/ip4/127.0.0.1/tcp/{port}/p2p/{nobody}"
        with pytest.raises(p2p_diloco.NetworkError, match="the run's state did not arrive within 2 s"):
            p2p_diloco.join(invite, Loop(0).model, settings={"state_directory": tmp_path / "ada", **HOME}, timeout=2.0)


def test_the_command_and_another_model_are_refused_and_leave_no_files(tmp_path: Path) -> None:
    ada, run = Loop(0), tmp_path / "run.toml"
    p2p_diloco.new_run(run, ada.model, rounds={"round_seconds": 0.5, "fragments": 2, "spans_per_fragment": 2})
    with p2p_diloco.found(run, ada.model, settings={"state_directory": tmp_path / "ada", **HOME}) as swarm:
        words = ["join", swarm.invite, "--state-directory", str(tmp_path / "ben"), "--dial-out-only"]
        command = [sys.executable, "-m", "p2p_diloco", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 2
        assert '"run" trains its own model, which this command cannot build' in done.stderr
        with pytest.raises(p2p_diloco.ConfigError, match="build the same model as the organiser"):
            p2p_diloco.join(swarm.invite, nn.Linear(3, 3), settings={"state_directory": tmp_path / "cleo", **HOME})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ada", "organiser.key", "run.toml"]


def test_invalid_settings_are_named(tmp_path: Path) -> None:
    invite = f"p2pdiloco://{'0' * 64}?b=/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    model = Loop(0).model
    for _ in range(2):
        with pytest.raises(p2p_diloco.ConfigError, match="unknown key prot in settings; did you mean port"):
            p2p_diloco.join(invite, model, settings={"prot": 1})


def test_errors_name_settings_as_the_caller_writes_them(tmp_path: Path) -> None:
    model, run = Loop(0).model, tmp_path / "run.toml"
    p2p_diloco.new_run(run, model, rounds={"fragments": 2})
    with pytest.raises(p2p_diloco.ConfigError, match=r"only dials out; remove dial_out_only$"):
        p2p_diloco.found(run, model, settings={"state_directory": tmp_path / "ada", "dial_out_only": True})
    with pytest.raises(p2p_diloco.StateError, match=r"choose another place with state_directory$"):
        p2p_diloco.found(run, model, settings={"state_directory": run})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tokens": -5}, r"step\(tokens=-5, loss=None\): tokens must be a whole number from 0 to 1,000,000,000,000"),
        ({"tokens": float("nan")}, r"step\(tokens=nan"),
        ({"tokens": 2.5}, r"step\(tokens=2.5"),
        ({"tokens": 2**70}, r"step\(tokens=1180591620717411303424"),
        ({"tokens": "5"}, r"step\(tokens='5'"),
        ({"tokens": 5, "loss": torch.ones(2)}, r"and loss a number or None"),
    ],
)
def test_figures_that_are_none_are_refused_and_tensors_of_one_element_taken(
    values: dict[str, object], expected: str
) -> None:
    loop = Loop(0)
    with local_swarm() as local, local.found(loop.model) as swarm:
        with pytest.raises(p2p_diloco.ConfigError, match=expected):
            swarm.step(**values)  # type: ignore[arg-type]
        assert swarm.step(torch.tensor(64), loop.loss())  # type: ignore[arg-type]
        with swarm.anchor(), pytest.raises(p2p_diloco.ConfigError, match="step was called inside anchor"):
            swarm.step(tokens=64)
        swarm.leave()
    assert swarm.status.tokens == 64
    assert swarm.status.loss is not None


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda model: p2p_diloco.found("", model),
            "the run is ''; expected the path of a run file, such as \"run.toml\"",
        ),
        (lambda model: p2p_diloco.found("nowhere/run.toml", model), "nowhere/run.toml"),
        (lambda model: p2p_diloco.found("p2pdiloco://x", model), "this is an invite .*; join its run"),
        (lambda model: p2p_diloco.new_run("", model), "the run is ''; expected the path"),
        (lambda model: p2p_diloco.join("", model), "'' is not an invite"),
        (lambda model: p2p_diloco.join(None, model), "the invite is of type NoneType; expected a text"),
        (lambda model: p2p_diloco.join("p2pdiloco://x", None), "the model is of type NoneType"),
        (lambda model: p2p_diloco.join(NOBODY, model, settings="x"), "settings are of type str; expected a dict"),
        (lambda model: p2p_diloco.join(NOBODY, model, "adam"), "an optimiser is of type str; expected torch.optim"),
        (lambda model: p2p_diloco.join(NOBODY, model, state={"a": 3}), "a is of type int, without state_dict"),
        (
            lambda model: p2p_diloco.join(NOBODY, model, torch.optim.SGD(Loop(0).model.parameters(), lr=0.1)),
            r"no optimiser has parameter 0.weight \(4 of 4 are missing\), so it would never change; make the optimiser",
        ),
        (
            lambda model: p2p_diloco.join(NOBODY, model, torch.optim.SGD(model[0].parameters(), lr=0.1)),
            r"no optimiser has parameter 2.weight \(2 of 4 are missing\)",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(call: Callable[[nn.Module], object], expected: str) -> None:
    with pytest.raises(p2p_diloco.ConfigError, match=expected):
        call(Loop(0).model)


FORGETFUL = """
import sys, torch, p2p_diloco
model = torch.nn.Linear(8, 1)
rounds = {"round_seconds": 2.0, "fragments": 1, "spans_per_fragment": 1}
p2p_diloco.new_run("run.toml", model, rounds=rounds)
home = {"state_directory": "ada", "host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "no_port_mapping": True}
swarm = p2p_diloco.found("run.toml", model, settings=home)
swarm.step(tokens=1)
"""


@pytest.mark.slow
def test_a_program_that_ends_without_leaving_leaves_and_saves(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert '"topic": "finished"' in (tmp_path / "ada" / "events.jsonl").read_text()
    assert list((tmp_path / "ada").glob("*/checkpoint-*.safetensors"))
