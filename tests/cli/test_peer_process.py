"""A peer as a process: its folder and its signals. Whole processes are tested in tests/swarm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from p2p_diloco.app.cli.options import PeerOptions
from p2p_diloco.app.cli.peer_process import STOPPED, Interrupts, check_folder, run_trainer
from p2p_diloco.config.invite import Invite
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import StateError
from p2p_diloco.ids import ZERO_DIGEST
from p2p_diloco.session.peer_plan import PeerPlan


class Told:
    """A peer's stop request that records its calls."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def leave(self) -> None:
        self.words.append("leave")

    def stop_now(self) -> None:
        self.words.append("stop now")


def interrupted(times: int) -> tuple[Interrupts, Told, list[str], list[float]]:
    told, said, exits = Told(), list[str](), list[float]()
    interrupts = Interrupts(told, show=said.append, exit_within=exits.append)
    for _ in range(times):
        interrupts.interrupt()
    return interrupts, told, said, exits


def test_the_first_interrupt_leaves_gracefully_with_exit_code_0() -> None:
    interrupts, told, said, exits = interrupted(1)
    assert (told.words, exits, interrupts.exit_code) == (["leave"], [], 0)
    assert said == ["leaving after this round; Ctrl-C again stops at once"]


def test_the_second_interrupt_stops_now_with_a_time_limit() -> None:
    interrupts, told, _, exits = interrupted(2)
    assert (told.words, exits, interrupts.exit_code) == (["leave", "stop now"], [10.0], STOPPED)


def test_the_third_interrupt_does_not_wait() -> None:
    assert interrupted(3)[3] == [10.0, 0.0]


def test_an_interrupt_that_torchrun_passes_on_again_counts_once() -> None:
    told, times = Told(), iter([10.0, 10.9, 12.0])
    interrupts = Interrupts(told, show=lambda text: None, exit_within=lambda seconds: None, now=lambda: next(times))
    for _ in range(2):
        interrupts.interrupt()
    assert told.words == ["leave"]
    interrupts.interrupt()
    assert told.words == ["leave", "stop now"]


def test_the_check_of_a_state_directory_leaves_no_files(tmp_path: Path) -> None:
    for folder in (tmp_path / "a" / "b", tmp_path):
        check_folder(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"the state directory .*file is a file; choose another place"):
        check_folder(tmp_path / "file")
    with pytest.raises(StateError, match=r"cannot write to the state directory .*file/peer: Not a directory; free"):
        check_folder(tmp_path / "file" / "peer")


@pytest.mark.parametrize(("is_terminal", "said"), [(True, "starting …\n"), (False, "")])
def test_at_a_terminal_a_line_is_shown_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool, said: str
) -> None:
    source = Invite(run=ZERO_DIGEST, bootstraps=())
    plan = PeerPlan(settings=PeerSettings(state_directory=tmp_path), source=source)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setitem(sys.modules, "p2p_diloco.memory.heap", None)
    with pytest.raises(ImportError):
        run_trainer(plan, PeerOptions())
    assert tuple(capsys.readouterr()) == ("", said)
