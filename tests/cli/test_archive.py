"""The plan that `archive` makes for a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.cli import peer_process
from p2p_diloco.cli.app import main
from p2p_diloco.cli.join import request_archive
from p2p_diloco.cli.options import EndFlags, Surroundings
from p2p_diloco.peer.peer_plan import ExportPlan, PeerPlan

PEER = "12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp"
INVITE = f"p2pdiloco://{'ab' * 32}?b=/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


def requested(run: str, into: Path | None = None, **settings: Any) -> PeerPlan:
    return request_archive(
        run,
        into=into,
        every=7,
        keep=2,
        key_path=None,
        settings=settings,
        flags=EndFlags(),
        around=Surroundings(),
    )


def test_an_archivist_needs_only_an_invite(tmp_path: Path) -> None:
    plan = requested(INVITE, state_directory=str(tmp_path / "mine"))
    assert plan.invite is not None
    assert (plan.trains, plan.keeps_state) == (False, True)
    assert plan.exports == ExportPlan(folder=tmp_path / "mine" / "exports", every=7, keep=2)


def test_it_has_a_state_directory_of_its_own_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = requested(INVITE)
    assert plan.settings.state_directory.name == "archive"
    assert plan.exports is not None
    assert plan.exports.folder == plan.settings.state_directory.absolute() / "exports"


def test_exports_go_to_a_named_folder(tmp_path: Path) -> None:
    plan = requested(INVITE, Path("~/models"))
    assert plan.exports is not None
    assert plan.exports.folder == Path.home() / "models"
    relative = requested(INVITE, Path("models"))
    assert relative.exports is not None
    assert relative.exports.folder == Path.cwd() / "models"


def test_an_archivist_may_found_a_run(run_file: Path) -> None:
    plan = requested(str(run_file))
    assert plan.founding is not None
    assert plan.exports is not None


def test_the_command_runs_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[PeerPlan] = []
    monkeypatch.setattr(peer_process, "run_bootstrap_peer", lambda plan, flags: ran.append(plan) or flags.until_round)
    assert main(["archive", "--every", "5", "--keep", "4", INVITE, "--into", "out", "--until-round", "9"]) == 9
    assert ran[0].exports == ExportPlan(folder=Path.cwd() / "out", every=5, keep=4)


@pytest.mark.parametrize("flag", ["--every", "--keep"])
def test_a_count_below_one_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", INVITE, flag, "0"]) == 2
    assert f"{flag} is 0; expected at least 1" in capsys.readouterr().err
