"""Every wrong command line gives one sentence and a documented exit code."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from p2p_diloco.app.cli import owner
from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.peer_output import PeerOutput
from p2p_diloco.errors import NetworkError, PeerError, StateError
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.status_file import PeerStatus, write_status

Captured = pytest.CaptureFixture[str]
PLAN = ["plan", "--parameters", "100M", "--islands", "4", "--uplink", "20mbit"]
RUN = "ab" * 32
PEER = "12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp"
INVITE = f"p2pdiloco://{RUN}?b=/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


def failed(arguments: list[str], capsys: Captured) -> tuple[int, str]:
    """Return the exit code and the error sentence."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("p2p-diloco: error: ")
    return code, lines[0].removeprefix("p2p-diloco: error: ")


@pytest.mark.parametrize("command", [[], ["new"], ["bootstrap"], ["join"], ["status"], ["sample"], ["export"]])
def test_every_command_has_a_help_page(command: list[str], capsys: Captured) -> None:
    assert main([*command, "--help"]) == 0
    assert "Usage: p2p-diloco" in capsys.readouterr().out


def test_status_takes_only_the_folder_of_the_machines_settings(capsys: Captured) -> None:
    assert main(["status", "--help"]) == 0
    page = capsys.readouterr().out
    assert "--state-directory" in page
    assert "--max-upload" not in page
    code, text = failed(["status", "--port", "31338"], capsys)
    assert code == 2
    assert "--port" in text


def test_the_version_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.2.3 of {name}")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "1.2.3 of p2p-diloco\n"


def test_a_source_folder_without_an_install_has_no_version(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("not installed")


@pytest.mark.parametrize("words", [["version"], ["-v"]])
def test_the_version_can_be_requested_in_other_ways(words: list[str], capsys: Captured) -> None:
    assert main(["--version"]) == 0
    version = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == version


def test_help_is_a_command_too(capsys: Captured) -> None:
    for asked, word in ((["--help"], ["help"]), (["join", "--help"], ["help", "join"])):
        assert main(asked) == 0
        page = capsys.readouterr().out
        assert main(word) == 0
        assert capsys.readouterr().out == page


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["staus"], "unknown command staus; did you mean status?"),
        (["--lr", "1"], "unknown option --lr; options follow a command; see p2p-diloco --help"),
        (["--vers"], "unknown option --vers; did you mean --version?"),
        (["new", "--lr", "1"], "set inner.learning_rate or outer.learning_rate"),
        (["jion"], "unknown command jion; did you mean join?"),
        (
            ["zzz"],
            "unknown command zzz; known are: new, tokenize, bootstrap, join, archive, doctor, status, report, page, ",
        ),
        (["join"], "join needs an invite"),
        (["join", "hello"], "'hello' is not an invite; expected p2pdiloco://"),
        (["join", "run.toml"], "run.toml is not an invite; to found a run from a file, use --found run.toml"),
        (["join", "p2pdiloco://abc"], "the run id has 3 characters, expected 64 digits; was the line cut off?"),
        (["join", f"p2pdiloco://{RUN}"], "the invite names no bootstrap address"),
        (["join", f"p2pdiloco://{RUN}?b=/ip4/1.2.3.4/tcp/5"], "has no peer id"),
        (["join", INVITE, "--prot", "3"], "unknown option --prot; did you mean --port?"),
        (["join", INVITE, "--zzz", "3"], "unknown option --zzz; see p2p-diloco join --help"),
        (["join", INVITE, "--port", "99999"], "port = 99999 in the command line"),
        (["join", INVITE, "--device", "tpu"], "unknown device 'tpu'"),
        (["join", INVITE, "--until-round", "soon"], 'unable to convert "soon" into int'),
        (["join", INVITE, "--outer.momentum", "0.7"], "outer.momentum in the command line belongs to the run"),
        (["join", INVITE, "--outer.momentum"], "--outer.momentum needs a value"),
        (["join", INVITE, "--outer_lr", "1"], "outer_lr in the command line belongs to the run"),
        (["join", INVITE, "@nowhere.toml"], "there is no file nowhere.toml"),
        (["join", INVITE, "--found", "run.toml"], "use only one of them"),
        (
            ["bootstrap"],
            "bootstrap needs RUN: run.toml, or the invite of a run that exists; see p2p-",
        ),
        (
            ["sample"],
            'sample needs PROMPT: text to continue, such as "def main"; see p2p-diloco sample --',
        ),
        (["export"], "export needs FOLDER: new folder for the files; see p2p-diloco export --help"),
        (["status", "now"], "status does not take 'now'; leave it out, or see p2p-diloco status --help"),
        (["new", "a.toml", "b.toml"], "new does not take 'b.toml'; leave it out, or see p2p-diloco new --help"),
        (["new", "--name"], "--name needs a value; see p2p-diloco new --help"),
        (["bootstrap", "nowhere.toml"], "there is no file nowhere.toml"),
        ([*PLAN, "--json", "nowhere/figures.json"], "there is no folder nowhere for --json"),
        (["status"], "no peer has run with the state directory"),
    ],
)
def test_user_errors_have_exit_code_2(arguments: list[str], text: str, capsys: Captured) -> None:
    code, sentence = failed(arguments, capsys)
    assert code == 2
    assert text in sentence


def test_an_unknown_key_of_a_file_is_named_with_the_nearest_known_key(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "peer.toml").write_text("prot = 3\n")
    assert failed(["join", INVITE, "@peer.toml"], capsys) == (2, "unknown key prot in peer.toml; did you mean port?")


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("P2P_DILOCO_PROT", "3")
    code, sentence = failed(["join", INVITE], capsys)
    assert code == 2
    assert "unknown variable P2P_DILOCO_PROT in the environment; did you mean P2P_DILOCO_PORT?" in sentence


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf"])
def test_an_invalid_pause_is_refused_and_zero_is_explained(seconds: str, capsys: Captured) -> None:
    code, sentence = failed(["join", INVITE, "--evaluate-seconds", seconds], capsys)
    assert code == 2
    assert sentence == (
        f"--evaluate-seconds: {seconds} is not a valid number of seconds; expected 0 (never) or more, such as 30"
    )


def test_a_missing_key_is_reported_with_its_expected_place(run_file: Path, capsys: Captured) -> None:
    (run_file.parent / "organiser.key").unlink()
    code, sentence = failed(["bootstrap", str(run_file)], capsys)
    assert code == 2
    assert "there is no key file" in sentence


def test_the_key_of_another_organiser_is_refused(run_file: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "other").mkdir()
    assert main(["new", "other/run.toml"]) == 0
    capsys.readouterr()
    arguments = ["bootstrap", str(run_file), "--organiser-key", str(tmp_path / "other" / "organiser.key")]
    code, sentence = failed(arguments, capsys)
    assert code == 2
    assert "but the run names" in sentence


@pytest.mark.parametrize("words", [["bootstrap"], ["join", "--found"]])
def test_a_key_in_place_of_its_run_is_named(words: list[str], run_file: Path, capsys: Captured) -> None:
    assert failed([*words, "organiser.key"], capsys) == (
        2,
        "organiser.key is a key; name the run that it signs, such as run.toml",
    )


def test_a_state_directory_that_is_a_file_is_refused(tmp_path: Path, run_file: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    assert failed(["status", "--state-directory", "file"], capsys) == (
        2,
        "file is a file; name the folder of a peer's state with --state-directory",
    )
    assert failed(["join", INVITE, "--state-directory", "file"], capsys) == (
        4,
        "the state directory file is a file; choose another place with --state-directory",
    )


def test_a_state_directory_that_cannot_be_written_has_exit_code_4(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    code, sentence = failed(["join", INVITE, "--state-directory", str(tmp_path / "file" / "state")], capsys)
    assert code == 4
    assert "cannot write to the state directory" in sentence
    assert "choose another place with --state-directory" in sentence


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, *, as_json: bool) -> int:
        raise error

    monkeypatch.setattr(owner, "show_status", fail)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (NetworkError("port 31337 is taken"), 3, "port 31337 is taken"),
        (PeerError("said \x1b[2J\nall is well \u202e"), 5, "said ?[2J?all is well ?"),
        (ExceptionGroup("tasks", [ValueError("x"), StateError("cannot write a")]), 4, "cannot write a"),
        (OSError(errno.ENOSPC, "No space left on device", "a.bin"), 4, "cannot write a.bin: No space left on device"),
        (OSError(errno.EACCES, "Permission denied", "priv/run.toml"), 2, "permission denied: priv/run.toml; give this"),
        (OSError(errno.EPERM, "Operation not permitted", b"priv"), 2, "permission denied: priv; give this user read"),
        (OSError(errno.EROFS, "Read-only file system"), 4, "cannot write to the disk: Read-only file system"),
    ],
)
def test_the_exit_code_depends_on_who_must_act(
    error: Exception, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    raising(error, monkeypatch)
    found, sentence = failed(["status"], capsys)
    assert (found, text in sentence) == (code, True)


def test_internal_errors_show_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    raising(ZeroDivisionError("division by zero"), monkeypatch)
    assert main(["status"]) == 1
    errors = capsys.readouterr().err
    assert "Traceback" in errors
    assert errors.splitlines()[-1] == (
        "p2p-diloco: error: internal error (ZeroDivisionError: division by zero); please report it with the lines above"
    )


def test_a_permission_error_without_a_file_shows_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    raising(PermissionError(errno.EPERM, "Operation not permitted"), monkeypatch)
    assert main(["status"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_has_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(KeyboardInterrupt(), monkeypatch)
    assert main(["status"]) == 130


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Make standard output a pipe without a reader, as after `| head -1`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield stream


def test_a_reader_that_leaves_during_the_help_is_not_an_error(unread: TextIO) -> None:
    real = os.dup(1)
    try:
        assert main(["--help"]) == 0
    finally:
        os.dup2(real, 1)
        os.close(real)
    unread.close()


def printing(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(folder: Path, *, as_json: bool) -> int:
        print("a line that waits to be written")
        return code

    monkeypatch.setattr(owner, "show_status", show)


@pytest.mark.parametrize("code", [0, 1])
def test_a_reader_that_leaves_early_changes_no_exit_code(
    code: int, unread: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    printing(code, monkeypatch)
    assert main(["status"]) == code
    unread.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only some systems have a device that is full")
def test_output_that_does_not_fit_on_the_disk_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    printing(0, monkeypatch)
    with Path("/dev/full").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["status"]) == 4
    sentence = "cannot write the output: No space left on device; free some space or redirect it"
    assert capsys.readouterr().err == f"p2p-diloco: error: {sentence}\n"


def test_flags_may_have_underscores_and_an_invite_may_come_last(capsys: Captured) -> None:
    arguments = ["join", "--initial_peers", f"/ip4/127.0.0.1/tcp/9/p2p/{PEER}", INVITE.replace(RUN, "zz" * 32)]
    code, sentence = failed(arguments, capsys)
    assert (code, sentence) == (2, "the run id contains 'z'; expected only hexadecimal digits (0 to 9, a to f)")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_the_output_cannot_encode_ends_no_command(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, name = io.BytesIO(), "naïve…\udcff"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    write_status(tmp_path, PeerStatus(run=RUN, run_name=name, invite=INVITE))
    assert main(["status", "--state-directory", str(tmp_path)]) == 0
    with PeerOutput(tmp_path, announces_invite=False) as output:
        output.event(PeerEvent(time=0.0, topic="roster", text=name))
    assert raw.getvalue().count(b"?") >= 2


@pytest.mark.parametrize("words", [["--help"], PLAN, ["status", "--state-directory", "nowhere"]])
def test_streams_that_were_closed_before_the_start_are_not_an_error(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(words) == (2 if "nowhere" in words else 0)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
