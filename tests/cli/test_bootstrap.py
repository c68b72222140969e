"""What `bootstrap` asks of a peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.cli import bootstrap
from p2p_diloco.cli.bootstrap import request_bootstrap, run_bootstrap
from p2p_diloco.cli.flags import PeerFlags, SettingsFlags, Surroundings
from p2p_diloco.cli.peer_process import PeerRequest
from p2p_diloco.config.run_file import read_run_toml
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError

PEER = "12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp"
INVITE = f"p2pdiloco://{'ab' * 32}?b=/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


def requested(run: str, **overrides: object) -> PeerRequest:
    around = Surroundings(overrides=overrides, environment={})
    return request_bootstrap(run, key_path=None, settings=SettingsFlags(port="7"), flags=PeerFlags(), around=around)


def test_a_run_file_makes_a_founder_that_does_not_train(run_file: Path) -> None:
    request = requested(str(run_file))
    assert request.signed_manifest is not None
    assert request.signed_manifest.manifest == read_run_toml(run_file)
    request.signed_manifest.verify(request.signed_manifest.manifest.digest())
    assert (request.trains, request.invite, request.settings.port) == (False, None, 7)
    assert request.organiser_key is not None


def test_overrides_change_the_run(run_file: Path) -> None:
    request = requested(str(run_file), **{"outer.momentum": 0.25})
    assert request.signed_manifest is not None
    assert request.signed_manifest.manifest.outer.momentum == 0.25


def test_an_invite_makes_a_second_bootstrap(run_file: Path) -> None:
    request = requested(INVITE)
    assert request.invite is not None
    assert (request.trains, request.organiser_key) == (False, None)


def test_a_start_belongs_to_a_run_that_is_founded() -> None:
    around = Surroundings(overrides={}, environment={})
    with pytest.raises(ConfigError, match="--start is what a run is founded from, and an invite"):
        request_bootstrap(
            INVITE, key_path=None, start=Path("a"), settings=SettingsFlags(), flags=PeerFlags(), around=around
        )


def test_the_command_runs_what_it_asked_for(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[PeerRequest] = []
    monkeypatch.setattr(bootstrap, "run_requested_peer", lambda request: ran.append(request) or 7)
    around = Surroundings(overrides={}, environment={})
    code = run_bootstrap(
        str(run_file), key_path=None, settings=SettingsFlags(), flags=PeerFlags(until_round=3), around=around
    )
    assert (code, ran[0].flags.until_round) == (7, 3)


def test_a_bootstrap_peer_has_a_folder_of_its_own_beside_a_trainer_of_the_same_machine(tmp_path: Path) -> None:
    named = PeerSettings(state_directory=tmp_path)
    assert bootstrap._with_own_folder(named) == named
    assert bootstrap._with_own_folder(PeerSettings()).state_directory == PeerSettings().state_directory / "bootstrap"
