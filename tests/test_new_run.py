"""`new_run` writes the run of a custom model."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import p2p_diloco
from p2p_diloco.config.run_file import read_run_toml
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import sha256
from p2p_diloco.testing import local_swarm


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


def test_without_step_seconds_rounds_keep_their_defaults(tmp_path: Path) -> None:
    p2p_diloco.new_run(tmp_path / "run.toml", model())
    rounds = read_run_toml(tmp_path / "run.toml").rounds
    assert (rounds.round_seconds, rounds.fragments, rounds.planned_steps) == (5.0, 4, None)


def test_with_step_seconds_the_cycle_fits_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "p2p_diloco")
    p2p_diloco.new_run(tmp_path / "run.toml", model(), step_seconds=0.5, islands=2, uplink="20mbit")
    rounds = read_run_toml(tmp_path / "run.toml").rounds
    assert (rounds.round_seconds, rounds.fragments, rounds.planned_steps) == (4.0, 1, 8)
    assert caplog.messages == [
        "a cycle is 8 steps of 500 ms, 1 round of 4 s; 0.475 kbit/s up and 0.356 kbit/s down",
        "at full rate this run sends up to 7.3 MB and receives up to 7.3 MB a day, 439.3 MB in 30 days",
    ]


def test_given_values_are_kept(tmp_path: Path) -> None:
    given = {"round_seconds": 4.0, "fragments": 1}
    p2p_diloco.new_run(tmp_path / "run.toml", model(), step_seconds=0.5, rounds=given)
    rounds = read_run_toml(tmp_path / "run.toml").rounds
    assert (rounds.round_seconds, rounds.fragments, rounds.planned_steps) == (4.0, 1, 8)


def test_a_model_of_few_tensors_gets_no_more_fragments_than_tensors(tmp_path: Path) -> None:
    p2p_diloco.new_run(tmp_path / "run.toml", nn.Linear(4, 4))
    assert read_run_toml(tmp_path / "run.toml").rounds.fragments == 2


def test_a_run_that_no_peer_could_train_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot split 2 tensors into 3 fragments; choose at most 2 fragments"):
        p2p_diloco.new_run(tmp_path / "run.toml", nn.Linear(4, 4), rounds={"fragments": 3})
    with pytest.raises(ConfigError, match=r"there is no folder .*/nowhere for run\.toml; create it"):
        p2p_diloco.new_run(tmp_path / "nowhere" / "run.toml", model())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_key_is_used_and_an_unusable_one_is_refused(tmp_path: Path) -> None:
    one = p2p_diloco.new_run(tmp_path / "one.toml", model())
    assert p2p_diloco.new_run(tmp_path / "two.toml", model()).organiser == one.organiser
    (tmp_path / "organiser.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"organiser\.key is open to other users \(mode 0644\)"):
        p2p_diloco.new_run(tmp_path / "three.toml", model())


def test_an_uplink_without_step_seconds_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="islands, uplink, lan and traffic have no effect without step_seconds"):
        p2p_diloco.new_run(tmp_path / "run.toml", model(), uplink="20mbit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("conditions", "answer"),
    [
        ({"step_seconds": 0.0}, r"^step_seconds is 0; expected more than 0, such as 0\.045$"),
        ({"step_seconds": 0.3, "islands": 0}, r"^islands is 0; expected at least 1$"),
        ({"step_seconds": 0.3, "uplink": "20"}, r"^uplink is '20'; expected a rate with its unit, .* such as 20mbit$"),
        ({"step_seconds": 0.3, "uplink": ""}, r"^uplink is ''; expected a rate with its unit, .* such as 20mbit$"),
        ({"step_seconds": 1e9}, r"^a round would take .* give a faster uplink with its unit, such as 20mbit, fewer"),
    ],
)
def test_an_invalid_condition_is_refused_by_name(tmp_path: Path, conditions: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        p2p_diloco.new_run(tmp_path / "run.toml", model(), **conditions)
    assert list(tmp_path.iterdir()) == []


def own_state(tmp_path: Path, net: nn.Module, **values: Any) -> Path:
    """Train a run of `net` for some rounds in this process, export it, and return the export."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with local_swarm(**values) as local:
        swarm = local.found(net, optimizer, until_round=8)
        while True:
            optimizer.zero_grad()
            net(torch.rand(4, 8)).square().mean().backward()
            optimizer.step()
            if not swarm.step(tokens=4):
                break
        swarm.export(tmp_path / "export")
    return tmp_path / "export"


def test_an_own_loop_continues_an_export(tmp_path: Path) -> None:
    export = own_state(tmp_path, model(), outer={"momentum": 0.5})
    other = model()
    with local_swarm(continue_from=export, outer={"learning_rate": 0.3}) as local:
        local.found(other)
        learnt = load_file(export / "model.safetensors")
        assert all(torch.equal(tensor, learnt[name]) for name, tensor in other.state_dict().items())
    manifest = p2p_diloco.new_run(tmp_path / "run2.toml", model(), continue_from=export, rounds={"fragments": 2})
    assert (manifest.outer.momentum, manifest.rounds.fragments, manifest.rounds.round_seconds) == (0.5, 2, 0.5)
    assert sha256((tmp_path / "run2.start.safetensors").read_bytes()).hex() == manifest.model.start
    faster = p2p_diloco.new_run(tmp_path / "run3.toml", model(), continue_from=export, step_seconds=0.5, islands=2)
    assert (faster.outer.momentum, faster.rounds.round_seconds, faster.rounds.planned_steps) == (0.5, 4.0, 8)


def test_a_model_that_is_not_the_one_to_continue_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    export = own_state(tmp_path, net)
    refused = partial(p2p_diloco.new_run, tmp_path / "run2.toml", continue_from=export)
    with pytest.raises(ConfigError, match=r"tensor 0.weight has shape \(5, 8\) here and \(4, 8\) in the run"):
        refused(nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5)))
    net.load_state_dict(load_file(export / "model.safetensors"))
    with pytest.raises(
        ConfigError, match="frozen parameters or buffers of this model differ from those of the run that"
    ):
        refused(net)
    with pytest.raises(
        ConfigError, match=r"no peer has run with the state directory .*; name another with continue_from"
    ):
        refused(net, continue_from=tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    ignored = [f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert refused(net, ignore=ignored).model.ignored == tuple(ignored)
