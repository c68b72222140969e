"""Output and files of a running peer."""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_diloco.app.cli.peer_output import PeerOutput
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.status_file import PeerStatus, read_status
from tests.status.kept_events import read_events

INVITE = "p2pdiloco://" + "ab" * 32 + "?b=/ip4/192.0.2.10/tcp/31337/p2p/12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def event(topic: str, text: str = "text") -> PeerEvent:
    return PeerEvent(time=1.0, topic=topic, text=text)


def output(folder: Path, stream: io.StringIO, *, announces: bool = False) -> PeerOutput:
    return PeerOutput(folder, announces_invite=announces, stream=stream, now_seconds=lambda: 0.0)


def said(stream: io.StringIO) -> list[str]:
    """Return the lines without their time of day."""
    return [line.partition(" ")[2] for line in stream.getvalue().splitlines()]


def test_the_first_line_is_the_whole_join_command(tmp_path: Path) -> None:
    stream = io.StringIO()
    with output(tmp_path, stream, announces=True) as shown:
        shown.event(event("founded", "a run [bold]x[/bold]"))
        shown.status(PeerStatus(round=1))
        shown.listening(INVITE, own_model=False)
        shown.event(event("ready"))
        shown.event(event("finished", "finished with state ab"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == f'p2p-diloco join "{INVITE}"'
    assert said(stream)[1] == "founded: a run [bold]x[/bold]"
    assert said(stream)[-2:] == ["ready: text", "finished with state ab"]


def test_lines_held_back_for_the_invite_are_printed_if_none_comes(tmp_path: Path) -> None:
    stream = io.StringIO()
    with output(tmp_path, stream, announces=True) as shown:
        shown.event(event("link"))
    assert said(stream) == ["link: text"]


def test_the_topic_skipped_is_printed_and_saved_alike(tmp_path: Path) -> None:
    stream = io.StringIO()
    with output(tmp_path, stream) as shown:
        shown.event(event("skipped"))
    assert said(stream) == ["skipped: text"]
    assert [kept.topic for kept in read_events(tmp_path)] == ["skipped"]


def test_plain_status_lines_are_printed_once_a_round_or_when_the_phase_changes(tmp_path: Path) -> None:
    stream = io.StringIO()
    with output(tmp_path, stream) as shown:
        for status in (
            PeerStatus(round=1),
            PeerStatus(round=1),
            PeerStatus(round=1, phase="training"),
            PeerStatus(round=2, phase="training"),
        ):
            shown.status(status)
    assert [line.split(", ")[:2] for line in said(stream)] == [
        ["round 1", "connecting"],
        ["round 1", "training"],
        ["round 2", "training"],
    ]


def test_a_bootstrap_prints_a_status_line_only_when_something_changes(tmp_path: Path) -> None:
    stream = io.StringIO()
    with output(tmp_path, stream) as shown:
        for round_index, members in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 1)):
            shown.status(PeerStatus(role="bootstrap", phase="serving", round=round_index, num_members=members))
    assert [line.split(", ")[0] for line in said(stream)] == ["round 1", "round 3"]


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with output(tmp_path, stream) as shown:
        shown.status(PeerStatus(round=5, phase="training"))
    assert "\x1b" not in stream.getvalue()
    assert said(stream)[0].startswith("round 5, training, ")


def test_printed_lines_use_plain_words_and_the_event_log_keeps_the_protocols(tmp_path: Path) -> None:
    stream = io.StringIO()
    with output(tmp_path, stream) as shown:
        shown.event(event("roster", 'roster 3: 2 members of "roster" in /entries/span'))
        shown.event(event("trouble", "in no entry for 3 cycles: this peer is not on roster 9 of 4 members"))
    assert said(stream) == [
        'member list 3: 2 members of "roster" in /entries/span',
        "trouble: in no update of the shared model for 3 cycles: this peer is not among the 4 members",
    ]
    assert [kept.topic for kept in read_events(tmp_path)] == ["roster", "trouble"]


def test_everything_is_saved_for_other_programs(tmp_path: Path) -> None:
    with output(tmp_path, io.StringIO()) as shown:
        shown.status(PeerStatus(round=5))
        shown.event(event("round"))
        shown.event(event("evaluation"))
    assert read_status(tmp_path) == PeerStatus(round=5)
    assert [found.topic for found in read_events(tmp_path)] == ["round", "evaluation"]


def test_files_are_written_by_the_writer_thread(tmp_path: Path) -> None:
    writes: list[Callable[[], None]] = []
    with PeerOutput(tmp_path, announces_invite=False, stream=io.StringIO(), soon=writes.append) as peer:
        peer.status(PeerStatus(round=5))
        peer.event(event("ready"))
        assert read_status(tmp_path) is None
        for write in writes:
            write()
    assert read_status(tmp_path) == PeerStatus(round=5)
    assert [event.topic for event in read_events(tmp_path)] == ["ready"]


def test_events_that_repeat_the_status_are_not_printed(tmp_path: Path) -> None:
    stream = io.StringIO()
    with output(tmp_path, stream) as shown:
        shown.event(event("round"))
        shown.event(event("skipped", "nobody came"))
    assert said(stream) == ["skipped: nobody came"]


def test_a_bootstrap_peer_prints_no_skipped_rounds_before_anybody_trains(tmp_path: Path) -> None:
    stream = io.StringIO()
    with output(tmp_path, stream) as shown:
        shown.status(PeerStatus(role="bootstrap", num_members=0))
        shown.event(event("skipped", "nobody came"))
        shown.status(PeerStatus(role="bootstrap", num_members=1))
        shown.event(event("skipped", "nobody came in time"))
    assert [line for line in said(stream) if line.startswith("skipped")] == ["skipped: nobody came in time"]
    assert [found.text for found in read_events(tmp_path)] == ["nobody came", "nobody came in time"]


def test_a_disk_error_is_reported_once_and_does_not_end_the_peer(tmp_path: Path) -> None:
    stream = io.StringIO()
    folder = tmp_path / "gone"
    with output(folder, stream) as shown:
        for _ in range(3):
            shown.event(event("round"))
        folder.mkdir()
        shown.event(event("round"))
    assert len(said(stream)) == 1
    assert said(stream)[0].startswith("cannot write")
    assert said(stream)[0].endswith("training continues")


class Refusing(io.StringIO):
    """A stream that fails after a number of writes, and counts failed writes."""

    def __init__(self, error: OSError, *, after: int, is_terminal: bool = False) -> None:
        super().__init__()
        self.error, self.room, self.num_refused, self.is_terminal = error, after, 0, is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.room -= 1
        if self.room < 0:
            self.num_refused += 1
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [False, True], ids=["lines", "table"])
@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.ENOSPC, "No space left on device")],
    ids=["reader gone", "disk full"],
)
def test_lost_output_is_reported_once_and_the_peer_continues(
    tmp_path: Path, error: OSError, is_terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Refusing(error, after=1, is_terminal=is_terminal)
    with output(tmp_path, stream, announces=True) as shown:
        shown.listening(INVITE, own_model=False)
        for round_index in range(3):
            shown.event(event("ready"))
            shown.status(PeerStatus(round=round_index))
    assert stream.num_refused == 1
    assert len(read_events(tmp_path)) == 3
    assert read_status(tmp_path) == PeerStatus(round=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"p2p-diloco: the output can no longer be written ({error.strerror}); the peer continues without it; "
        "use p2p-diloco status to watch it\n"
    )


def test_a_terminal_shows_a_table(tmp_path: Path, monkeypatch: object) -> None:
    stream = Terminal()
    with output(tmp_path, stream) as shown:
        shown.status(PeerStatus(round=5, run_name="night"))
        shown.event(event("ready"))
    assert "night" in stream.getvalue()
    assert "ready: text" in stream.getvalue()


def test_the_table_is_not_drawn_while_the_owner_is_asked(tmp_path: Path) -> None:
    stream = Terminal()
    with output(tmp_path, stream) as shown:
        drawn: list[str] = []

        def ask(sentence: str, month_bytes: float) -> str:
            shown.show(f"{sentence} {month_bytes:g}")
            drawn.append(stream.getvalue())
            shown.show("an amount?")
            drawn.append(stream.getvalue())
            return "500GB"

        assert shown.while_asking(ask)("this run sends", 7.0) == "500GB"
        before, after = drawn
        assert after.removeprefix(before).strip().endswith("an amount?")
        assert "\x1b" not in after.removeprefix(before), "only the line, no table around it"
        shown.status(PeerStatus(round=3, run_name="night"))
        assert "night" in stream.getvalue(), "the table is back"
    plain = io.StringIO()
    with output(tmp_path, plain) as shown:
        assert shown.while_asking(lambda sentence, month_bytes: sentence)("yes", 1.0) == "yes"


def test_the_summary_is_printed_last_and_not_after_an_error(tmp_path: Path) -> None:
    stream, failed = io.StringIO(), io.StringIO()
    with output(tmp_path, stream) as shown:
        shown.status(PeerStatus(inner_steps=5))
    assert stream.getvalue().splitlines()[-1].startswith("to come back: ")
    with contextlib.suppress(ValueError), output(tmp_path, failed) as shown:
        shown.status(PeerStatus(inner_steps=5))
        raise ValueError
    assert "to come back" not in failed.getvalue()
