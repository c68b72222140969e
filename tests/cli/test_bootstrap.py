"""The plan that `bootstrap` makes for a peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.app.cli import peer_process
from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.join import request_bootstrap
from p2p_diloco.app.cli.options import CommandContext, PeerOptions
from p2p_diloco.config.run_file import read_run_toml
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.session.peer_plan import PeerPlan

PEER = "12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp"
INVITE = f"p2pdiloco://{'ab' * 32}?b=/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


def requested(run: str, **overrides: object) -> PeerPlan:
    around = CommandContext(overrides=overrides)
    return request_bootstrap(run, PeerOptions(settings={"port": "7"}), around)


def test_a_run_file_makes_a_founder_that_does_not_train(run_file: Path) -> None:
    plan = requested(str(run_file))
    assert plan.founding is not None
    manifest = read_run_toml(run_file)
    assert plan.founding.signed.verify(manifest.digest()).manifest == manifest
    assert (plan.trains, plan.settings.port) == (False, 7)


def test_overrides_change_the_run(run_file: Path) -> None:
    plan = requested(str(run_file), **{"outer.momentum": 0.25})
    assert plan.founding is not None
    assert plan.founding.signed.manifest.outer.momentum == 0.25


def test_an_invite_makes_a_second_bootstrap_peer(run_file: Path) -> None:
    plan = requested(INVITE)
    assert plan.invite is not None
    assert not plan.trains


def test_start_applies_only_to_a_new_run() -> None:
    with pytest.raises(ConfigError, match="--start only applies to a new run, and an invite"):
        request_bootstrap(INVITE, PeerOptions(), CommandContext(), start=Path("a"))


def test_the_command_runs_its_plan(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[PeerPlan] = []
    monkeypatch.setattr(peer_process, "run_bootstrap_peer", lambda plan, flags: ran.append(plan) or 7)
    code = main(["bootstrap", str(run_file), "--until-round", "3"])
    assert (code, ran[0].until_round) == (7, 3)


def test_a_bootstrap_peer_has_its_own_folder_beside_a_trainer_on_the_same_machine(tmp_path: Path) -> None:
    named = {"state_directory": str(tmp_path)}
    plan = request_bootstrap(INVITE, PeerOptions(settings=named), CommandContext())
    assert plan.settings.state_directory == tmp_path
    assert requested(INVITE).settings.state_directory == PeerSettings().state_directory / "bootstrap"
