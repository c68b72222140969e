"""The plan that `join` makes for a peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.app.cli import join
from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.join import request_join, run_join
from p2p_diloco.app.cli.options import CommandContext, PeerOptions
from p2p_diloco.app.cli.ranks import Place
from p2p_diloco.errors import DialFailure, NobodyAnswered, NotReached
from p2p_diloco.session.peer_plan import PeerPlan

PEER = "12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp"
INVITE = f"p2pdiloco://{'ab' * 32}?b=/ip4/127.0.0.1/tcp/9/p2p/{PEER}"
AROUND = CommandContext()


def test_a_joiner_needs_only_an_invite() -> None:
    plan = request_join(INVITE, PeerOptions(), AROUND)
    assert plan.invite is not None
    assert plan.invite.run.hex() == "ab" * 32


def test_a_trainer_may_found_a_run(run_file: Path) -> None:
    around = CommandContext(overrides={"name": "dawn"})
    plan = request_join(None, PeerOptions(), around, found=run_file)
    assert plan.founding is not None
    assert plan.founding.signed.manifest.name == "dawn"


SHARED = {"data.path": "/texts/words.txt", "data.share": True, "data.files": "0" * 64}


@pytest.mark.parametrize(
    ("values", "given", "opened"),
    [
        (SHARED, None, "/texts/words.txt"),
        (SHARED, "/copy", "/copy"),
        ({"data.path": "words.txt"}, None, "words.txt"),
        ({"data.path": "word*"}, None, "word*"),
        ({"data.path": "~/words.txt"}, None, "HOME/words.txt"),
        ({"data.path": "~nobody-of-that-name/words.txt"}, None, None),
        ({"data.path": "words.txt"}, "/copy", "/copy"),
        ({"data.path": "/texts/words.txt"}, None, None),
        ({"data.path": "stdlib"}, None, None),
    ],
)
def test_the_founder_opens_the_path_of_its_own_file(
    values: dict[str, object],
    given: str | None,
    opened: str | None,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    opened = opened.replace("HOME", str(tmp_path)) if opened is not None else None
    run_file.with_name("words.txt").touch()
    run_file.with_name("stdlib").mkdir()
    around, settings = CommandContext(overrides=values, environment={}), {"data": given}
    plan = request_join(None, PeerOptions(settings=settings), around, found=run_file)
    assert plan.settings.data == opened


def test_the_command_runs_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[PeerPlan] = []
    monkeypatch.setattr(join, "run_trainer", lambda plan, flags, place: ran.append(plan) or 7)
    code = run_join(request_join(INVITE, PeerOptions(), AROUND), PeerOptions(), AROUND)
    assert (code, len(ran)) == (7, 1)


def test_the_command_starts_ranks_unless_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    monkeypatch.setattr(join, "run_trainer", lambda plan, flags, place: ran.append(place) or 7)
    monkeypatch.setattr(join, "run_ranks", lambda arguments, count, *_, **__: ran.append((arguments, count)) or 8)
    options = PeerOptions(settings={"ranks": "2"})
    for environment, code in (({}, 8), ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}, 7)):
        around = CommandContext(environment=environment, arguments=("join", INVITE, "--ranks", "2"))
        ended = run_join(request_join(INVITE, options, around), options, around)
        assert ended == code
    assert ran == [(("join", INVITE, "--ranks", "2"), 2), Place(rank=1, count=2, local_rank=1)]


def test_a_failed_join_shows_each_address_and_names_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_trainer(*_: object) -> int:
        dead = NotReached("127.0.0.1:9 refused", DialFailure.REFUSED)
        raise NobodyAnswered("the one peer asked did not answer", (dead,))

    monkeypatch.setattr(join, "run_trainer", run_trainer)
    assert main(["join", INVITE]) == 3
    line, error = capsys.readouterr().err.splitlines()
    assert line.startswith("failure  address    127.0.0.1:9 refused; no bootstrap is running there; start it")
    assert error.startswith("p2p-diloco: error: the one peer asked did not answer; `")
    assert error.endswith("doctor INVITE` checks this machine and the way there")
