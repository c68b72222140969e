"""The plan that `archive` makes for a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.app.cli import peer_process
from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.join import request_archive
from p2p_diloco.app.cli.options import CommandContext, StartOptions
from p2p_diloco.session.peer_plan import PeerPlan
from p2p_diloco.storage.export_folder import ExportPlan

PEER = "12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp"
INVITE = f"p2pdiloco://{'ab' * 32}?b=/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


def requested(run: str, into: Path | None = None, **settings: Any) -> tuple[PeerPlan, ExportPlan]:
    return request_archive(run, StartOptions(settings=settings), CommandContext(), into=into, every=7, keep=2)


def test_an_archivist_needs_only_an_invite(tmp_path: Path) -> None:
    plan, exports = requested(INVITE, state_directory=str(tmp_path / "mine"))
    assert plan.invite is not None
    assert not plan.trains
    assert exports == ExportPlan(folder=tmp_path / "mine" / "exports", every=7, keep=2)


def test_it_has_a_state_directory_of_its_own_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, exports = requested(INVITE)
    assert plan.settings.state_directory.name == "archive"
    assert exports.folder == plan.settings.state_directory.absolute() / "exports"


def test_exports_go_to_a_named_folder(tmp_path: Path) -> None:
    assert requested(INVITE, Path("~/models"))[1].folder == Path.home() / "models"
    assert requested(INVITE, Path("models"))[1].folder == Path.cwd() / "models"


def test_an_archivist_may_found_a_run(run_file: Path) -> None:
    plan, _ = requested(str(run_file))
    assert plan.founding is not None


def test_the_command_runs_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[ExportPlan] = []

    def run(plan: PeerPlan, exports: ExportPlan, flags: StartOptions) -> int | None:
        ran.append(exports)
        return flags.until_round

    monkeypatch.setattr(peer_process, "run_archivist", run)
    assert main(["archive", "--every", "5", "--keep", "4", INVITE, "--into", "out", "--until-round", "9"]) == 9
    assert ran[0] == ExportPlan(folder=Path.cwd() / "out", every=5, keep=4)


@pytest.mark.parametrize("flag", ["--every", "--keep"])
def test_a_count_below_one_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", INVITE, flag, "0"]) == 2
    assert f"{flag} is 0; expected at least 1" in capsys.readouterr().err
