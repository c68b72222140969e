"""`report` bundles what helps to understand a trial, and none of what identifies somebody."""

from __future__ import annotations

import json
import os
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from p2p_diloco.app.cli import report
from p2p_diloco.app.cli.app import main
from p2p_diloco.config.key_file import create_key_file
from p2p_diloco.config.manifest import ModelSection, RoundsSection, RunManifest, TrustSection
from p2p_diloco.ids import PeerId, format_peer_id, short_peer_id
from p2p_diloco.status.event_log import EVENTS_FILE, OLD_EVENTS_FILE, PeerEvent, append_event, format_event
from p2p_diloco.status.status_file import STATUS_FILE, PeerLine, PeerStatus, write_status
from p2p_diloco.storage.member_files import MEMBERS_FILE, MemberRecord, Members, encode_members

Captured = pytest.CaptureFixture[str]
OWN, OTHER, THIRD = (PeerId(bytes([number]) * 32) for number in (7, 8, 9))
IDS = [format_peer_id(peer) for peer in (OWN, OTHER, THIRD)]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_report_holds_the_trial_and_no_secret(
    state: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "annabel")
    monkeypatch.setenv("P2P_DILOCO_PUBLIC_NAME", "annabels-tower.example.org")
    key = create_key_file(state / "identity.key")
    manifest = RunManifest(
        name="Moonlit Tales",
        organiser=format_peer_id(key.peer),
        created=1,
        model=ModelSection(source="hf:annabel/private-model", weights="loaded", start="ab" * 32),
        rounds=RoundsSection(clock_start=1.0),
        trust=TrustSection(mode="listed", peers=(IDS[0], IDS[1])),
    )
    signed = manifest.sign(key)
    run = manifest.digest().hex()
    (state / run[:16]).mkdir()
    (state / run[:16] / "manifest.json").write_bytes(signed.encode())
    gone = MemberRecord(peer=THIRD, since=1.0, name="Xaver the 3rd")
    (state / run[:16] / MEMBERS_FILE).write_bytes(encode_members(Members(records=(gone,))))
    invite = f"p2pdiloco://{run}?v=10&b=/ip4/203.0.113.77/tcp/31337/p2p/{IDS[1]}"
    write_status(
        state,
        PeerStatus(
            run=run,
            run_name="Moonlit Tales",
            peer=IDS[0],
            pid=os.getpid(),
            updated=time.time(),
            round=7,
            name="Zoe's attic",
            peers=(PeerLine(peer=IDS[1], name="Quentin", loss=1.5),),
            addresses=(f"/ip6/2001:db8::77/tcp/20407/p2p/{IDS[0]}",),
            reachable_at=("198.51.100.77:20407",),
            invite=invite,
        ),
    )
    texts = [
        f"fetching the manifest from {short_peer_id(OTHER)} at /dns4/relay.example.net/tcp/1/p2p/{IDS[1]}",
        f"roster 3: 2 members (..{IDS[2][-8:]}, {short_peer_id(OWN)}) of Moonlit Tales",
        f'new join command: p2p-diloco join "{invite}"',
        f"cannot write {state}/events.jsonl; see '/home/annabel/My Texts/a.txt' and ~/texts",
        f"good-bye: Xaver the 3rd ({short_peer_id(THIRD)}) left; Quentin and Zoe's attic stay",
        "annabel's machine [2001:db8::77]:20407 asked 203.0.113.77",
    ]
    for number, text in enumerate(texts):
        append_event(state, PeerEvent(time=number, topic="asking", text=text, figures={"peer": IDS[2]}))
    into = tmp_path / "report.zip"

    assert main(["report", "--into", str(into)]) == 0

    out = capsys.readouterr().out
    files = contents(into)
    assert str(into) in out.splitlines()[0]
    assert all(name in out for name in files)
    assert "look at it before you send it" in out
    assert next(iter(files)) == "README.txt"
    raw = "\n".join(files.values()).lower()
    secret = [*IDS, *(peer[-8:] for peer in IDS), run, run[:16], "Moonlit", "annabel", "203.0.113.77", "198.51.100.77"]
    secret += ["2001:db8", "relay.example", "p2pdiloco://", str(tmp_path), "My Texts", "private-model", "tower"]
    secret += ["Zoe", "attic", "Quentin", "Xaver"]
    secret += [format_peer_id(key.peer), (state / "identity.key").read_bytes().hex(), "ab" * 32]
    assert [text for text in secret if text.lower() in raw] == []
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    assert events[0]["text"] == "fetching the manifest from peer-2 at /dns4/address-1/tcp/1/p2p/peer-2"
    assert events[1]["text"] == "roster 3: 2 members (peer-4, peer-1) of run-1"
    assert [event["figures"]["peer"] for event in events] == ["peer-4"] * 6
    status = json.loads(files["status.json"])
    assert (status["running"], status["round"], status["peers"][0]["peer"]) == (True, 7, "peer-2")
    assert json.loads(files["runs.json"])[0]["trust"]["peers"] == ["peer-1", "peer-2"]
    assert json.loads(files["machine.json"])["versions"]["torch"]


def test_only_the_newest_events_are_taken(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_EVENT_BYTES", 1000)
    with (state / OLD_EVENTS_FILE).open("wb") as file:
        file.truncate(10 << 30)  # a sparse file of 10 GB
        file.seek(0, 2)
        file.write(b"".join(_line(number) for number in range(10)))
    (state / EVENTS_FILE).write_bytes(b"".join(_line(number) for number in range(10, 15)) + b'{"time": 1, "to')
    assert main(["report", "--into", str(tmp_path / "r.zip")]) == 0
    files = contents(tmp_path / "r.zip")
    times = [json.loads(line)["time"] for line in files["events.jsonl"].splitlines()]
    assert times == list(range(15 - len(times), 15))
    assert 5 < len(times) < 15
    assert "1 line left out as unreadable" in files["README.txt"]


def _line(number: int) -> bytes:
    return format_event(PeerEvent(time=number, topic="round", text="x" * 10)).encode() + b"\n"


def test_what_cannot_be_read_is_named_and_the_rest_is_reported(state: Path, tmp_path: Path) -> None:
    (state / STATUS_FILE).write_text('{"round": ')
    (state / "0123456789abcdef").mkdir()
    (state / "0123456789abcdef" / "manifest.json").write_bytes(b"half")
    old = {"time": 1.0, "topic": "gone", "text": "of another version", "figures": {"deep": {"a": 1}, "n": 2}}
    lines = [json.dumps(old), "[" * 2000, "null", "7", '{"time": "x"}']
    (state / EVENTS_FILE).write_text("\n".join(lines))
    assert main(["report", "--into", str(tmp_path / "r.zip")]) == 0
    files = contents(tmp_path / "r.zip")
    assert json.loads(files["events.jsonl"])["figures"] == {"n": 2}
    assert "4 lines left out as unreadable" in files["README.txt"]
    assert "status.json is missing or cannot be read" in files["README.txt"]
    assert "manifest.json is broken" in files["README.txt"]
    assert set(asdict(PeerStatus())) < set(json.loads(files["status.json"]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: None, "has no status, events or manifest of a peer"),
        (lambda folder: folder.rmdir(), "no peer has run with the state directory"),
        (lambda folder: (folder.rmdir(), folder.write_text("x")), "is a file"),
    ],
)
def test_a_folder_without_a_peer_is_refused(state: Path, capsys: Captured, make: object, text: str) -> None:
    make(state)  # type: ignore[operator]
    assert main(["report"]) == 2
    assert text in capsys.readouterr().err
    assert list(Path.cwd().glob("*.zip")) == []


def test_an_existing_file_is_not_replaced(state: Path, tmp_path: Path, capsys: Captured) -> None:
    write_status(state, PeerStatus(round=7))
    (tmp_path / "r.zip").write_text("mine")
    assert main(["report", "--into", str(tmp_path / "r.zip")]) == 2
    assert "exists; name a new file with --into" in capsys.readouterr().err
    assert main(["report", "--into", str(tmp_path / "none" / "r.zip")]) == 2
    assert "No such file or directory; name another file with --into" in capsys.readouterr().err
