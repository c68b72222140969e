"""What a peer remembers of the members of a run is read as it was written, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.ids import PeerId, SpanId, sha256
from p2p_diloco.protocol.round.credit import Block, SavedCredit, Tip
from p2p_diloco.storage.member_files import (
    CREDIT_FILE,
    MEMBERS_FILE,
    MOST_REMEMBERED,
    MemberRecord,
    Members,
    encode_credit,
    encode_members,
    read_credit,
    read_members,
)


def peer(number: int) -> PeerId:
    return PeerId(sha256(b"peer", str(number).encode()))


RECORD = MemberRecord(
    peer=peer(0), since=5.0, name="Łódź", state="member", last_seen=9.5, hours=0.25, incarnation=3, tokens=1 << 62,
    tokens_before=7,
)  # fmt: skip
MEMBERS = Members(updated=11.0, records=(RECORD, MemberRecord(peer=peer(1), since=6.0, state="gone")))
CREDIT = SavedCredit(
    blocks={3: Block({peer(0): 1 << 70, peer(1): 2}, 0b101), 4: Block()},
    tips={SpanId(1, 2): Tip(digest=sha256(b"tip"), height=4, round=-1)},
    followed=1030,
    line=sha256(b"roster"),
)


def test_members_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_members(tmp_path) == Members()
    (tmp_path / MEMBERS_FILE).write_bytes(encode_members(MEMBERS))
    assert read_members(tmp_path) == MEMBERS


def test_credit_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_credit(tmp_path) == SavedCredit()
    for credit in (SavedCredit(), CREDIT):
        (tmp_path / CREDIT_FILE).write_bytes(encode_credit(credit))
        assert read_credit(tmp_path) == credit


def test_members_that_were_seen_longest_ago_are_dropped_first(tmp_path: Path) -> None:
    seen = [
        MemberRecord(peer=peer(number), since=1.0, last_seen=float(number)) for number in range(MOST_REMEMBERED + 2)
    ]
    listed = replace(seen[0], state="silent")
    (tmp_path / MEMBERS_FILE).write_bytes(encode_members(Members(records=(listed, *seen[1:]))))
    kept = {record.peer for record in read_members(tmp_path).records}
    assert kept == {listed.peer, *(record.peer for record in seen[3:])}


def test_a_name_that_would_not_be_shown_is_dropped_and_its_member_is_kept(tmp_path: Path) -> None:
    document = json.loads(encode_members(MEMBERS))
    document["members"][0]["name"] = "a\x1b[2J"
    (tmp_path / MEMBERS_FILE).write_text(json.dumps(document))
    assert read_members(tmp_path).records[0] == replace(RECORD, name="")


def changed(content: bytes, *path: Any, value: Any) -> str:
    document = json.loads(content)
    *parents, last = path
    place = document
    for key in parents:
        place = place[key]
    place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "null", "[" * 5000, "\xff", "{}", '{"updated": 1, "members": 7}',
        *(
            changed(encode_members(MEMBERS), "members", 0, key, value=value)
            for key, value in (
                ("peer", "x"), ("name", 7), ("state", "\x1b"), ("since", "1"), ("since", float("nan")), ("tokens", -1),
                ("tokens", 1.5), ("tokens", True), ("hours", None),
            )
        ),
    ],
)  # fmt: skip
def test_a_broken_file_of_members_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MEMBERS_FILE).write_text(content, encoding="latin-1")
    with pytest.raises(StateError, match=r"members\.json is broken"):
        read_members(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "", "{}",
        *(
            changed(encode_credit(CREDIT), *path, value=value)
            for path, value in (
                (("block_cycles",), 7), (("followed",), None), (("line",), "ab"), (("peers", 0), "x"),
                (("blocks", 0, 1), f"{1 << 300:x}"), (("blocks", 0, 1), "-1"), (("blocks", 0, 2, 0, 0), 5),
                (("blocks", 0, 2, 0, 1), -5), (("tips", 0, 2), "00"), (("tips", 0, 3), "4"),
            )
        ),
    ],
)  # fmt: skip
def test_a_broken_file_of_credit_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / CREDIT_FILE).write_text(content)
    with pytest.raises(StateError, match=r"credit\.json is broken"):
        read_credit(tmp_path)
