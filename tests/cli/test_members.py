"""`id` says who this machine's peer is, `members` who is and was in its run and what the log credits them with."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.ids import PeerId, SpanId, format_peer_id, parse_peer_id, sha256, short_peer_id
from p2p_diloco.protocol.round.credit import BLOCK_CYCLES, Block, SavedCredit, Tip
from p2p_diloco.status.status_file import PeerStatus, write_status
from p2p_diloco.storage.identity import read_name
from p2p_diloco.storage.member_files import (
    CREDIT_FILE,
    MEMBERS_FILE,
    MemberRecord,
    Members,
    encode_credit,
    encode_members,
)
from p2p_diloco.storage.run_folder import run_folder

Captured = pytest.CaptureFixture[str]


def printed(capsys: Captured, *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_the_first_call_makes_the_identity_and_later_ones_show_the_same(capsys: Captured, tmp_path: Path) -> None:
    first = printed(capsys, "id")
    assert first["short"] == short_peer_id(parse_peer_id(str(first["peer"])))
    assert first["name"] == ""
    assert printed(capsys, "id") == first
    assert main(["id"]) == 0
    assert capsys.readouterr().out == f"id     {first['peer']}\nshort  {first['short']}\nname   none\n"
    assert printed(capsys, "id", "--state-directory", str(tmp_path / "other"))["peer"] != first["peer"]


def test_a_name_is_set_shown_and_removed(capsys: Captured, tmp_path: Path) -> None:
    assert printed(capsys, "id", "--name", "ada [x]")["name"] == "ada [x]"
    assert read_name(tmp_path / "state") == "ada [x]"
    assert main(["id"]) == 0
    assert capsys.readouterr().out.endswith("name   ada [x]\n")
    assert printed(capsys, "id", "--name", "")["name"] == ""


def test_a_bad_name_is_refused_in_one_line_and_changes_nothing(capsys: Captured) -> None:
    printed(capsys, "id", "--name", "ada")
    assert main(["id", "--name", "a\x1b[2J\nb"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(r"p2p-diloco: error: 'a\x1b[2J\nb' is not a name: it holds a line break")
    assert error.count("\n") == 1
    assert printed(capsys, "id")["name"] == "ada"


def test_a_peer_that_runs_takes_a_new_name_at_its_next_start(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    write_status(tmp_path / "state", PeerStatus(pid=os.getpid(), updated=time.time(), name="old"))
    assert main(["id", "--name", "new"]) == 0
    assert "takes this name at its next start" in capsys.readouterr().out


RUN = sha256(b"a run")
ADA, BEN = (PeerId(sha256(name)) for name in (b"ada", b"ben"))
MEMBERS = (
    MemberRecord(
        peer=ADA, since=1.7e9, name="ada [red]", state="member", last_seen=1.7e9, hours=12.25, tokens=5, tokens_before=7
    ),
    MemberRecord(peer=BEN, since=1e300, state="gone"),
)
TIPS = {SpanId(0, index): Tip(digest=sha256(b"tip"), height=3, round=9) for index in range(4)}
CREDIT = SavedCredit(
    blocks={0: Block({ADA: 400}), 1: Block({ADA: 9}, 0b110), 2: Block({ADA: 8, BEN: 203})},
    tips=TIPS,
    followed=2 * BLOCK_CYCLES + 5,
)


@pytest.fixture
def run_place(tmp_path: Path) -> Path:
    """Return the folder of the run in which the peer of the state directory took part."""
    place = run_folder(tmp_path / "state", RUN)
    place.mkdir(parents=True)
    write_status(tmp_path / "state", PeerStatus(run=RUN.hex()))
    return place


def test_members_are_listed_with_what_is_known_of_them(capsys: Captured, run_place: Path) -> None:
    (run_place / MEMBERS_FILE).write_bytes(encode_members(Members(updated=time.time(), records=MEMBERS)))
    ada, ben = printed(capsys, "members")["members"]  # type: ignore[misc]
    assert (ada["peer"], ada["name"], ada["state"]) == (format_peer_id(ADA), "ada [red]", "member")
    assert (ada["claimed_tokens"], ada["hours"], ben["last_seen"]) == (12, 12.25, None)
    assert main(["members"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["ada", "[red]", f"..{format_peer_id(ADA)[-8:]}", "member"]
    assert lines[1].split()[-2:] == ["12", "12.2"]
    assert lines[2].split()[:4] == ["–", f"..{format_peer_id(BEN)[-8:]}", "gone", "–"]
    assert "nobody checks names and claimed tokens" in lines[-1]


def test_credit_is_of_the_complete_blocks_and_the_newest(capsys: Captured, run_place: Path) -> None:
    (run_place / MEMBERS_FILE).write_bytes(encode_members(Members(records=MEMBERS)))
    (run_place / CREDIT_FILE).write_bytes(encode_credit(CREDIT))
    found = printed(capsys, "members", "--credit")
    assert found["members"] == [
        {"peer": format_peer_id(ADA), "name": "ada [red]", "tokens": 102, "token_spans": 408},
        {"peer": format_peer_id(BEN), "name": "", "tokens": 50, "token_spans": 203},
    ]
    assert (found["spans"], found["covers"], found["in_progress"]) == (4, [[0, 255], [512, 516]], 517)
    blocks = found["blocks"]
    assert [block["complete"] for block in blocks] == [True, False, False]  # type: ignore[attr-defined]
    assert blocks[1] == {  # type: ignore[index]
        "cycles": [[256, 511]], "complete": False, "missing": [[257, 258]], "token_spans": {format_peer_id(ADA): 9}
    }  # fmt: skip
    assert main(["members", "--credit"]) == 0
    out = capsys.readouterr().out
    for part in ("102  66.8 %", "50  33.2 %", "cycles 0 to 255, 512 to 516, and of cycle 517 so far"):
        assert part in out
    assert "the block of cycles 256 to 511 is left out: this peer lacks entries of cycles 257 to 258" in out


@pytest.mark.parametrize("words", [(), ("--credit",)])
def test_a_peer_that_has_seen_nothing_says_so(
    capsys: Captured, run_place: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    assert main(["members", *words]) == 2
    assert "yet; try again later" in capsys.readouterr().err
    assert main(["members", *words, "--state-directory", str(tmp_path / "none")]) == 2
    assert "no peer has run with the state directory" in capsys.readouterr().err
    (run_place / (CREDIT_FILE if words else MEMBERS_FILE)).write_text("{")
    assert main(["members", *words]) == 4
    assert "is broken" in capsys.readouterr().err
