"""`status.json` is whole or missing, and readable by other versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.status.status_file import (
    MAX_STATUS_BYTES,
    STATUS_FILE,
    ByteCounts,
    PeerLine,
    PeerStatus,
    read_status,
    status_document,
    status_of,
    write_status,
)

STATUS = PeerStatus(
    run="ab" * 32,
    peer="12D3KooWxyz",
    round=7,
    loss=2.5,
    bytes_sent=ByteCounts(vectors=10, control=20, transfer=30),
    peers=(PeerLine(peer="12D3KooWabc", ready=True, seconds_since_heard=0.5),),
    addresses=("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWxyz",),
)


def test_a_status_is_read_back_as_written(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS


def test_writing_leaves_no_draft(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    write_status(tmp_path, STATUS)
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_FILE]


def test_a_folder_that_cannot_be_written_is_reported_and_the_old_status_stays(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"cannot write .*status\.json: Not a directory; check the folder"):
        write_status(tmp_path / "file", STATUS)
    assert read_status(tmp_path) == STATUS


def test_numbers_that_are_not_finite_become_null() -> None:
    status = PeerStatus(loss=float("nan"), peers=(PeerLine(peer="p", loss=float("inf")),))
    document = status_document(status)
    assert document["loss"] is None
    assert document["peers"][0]["loss"] is None
    json.dumps(document, allow_nan=False)


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    document = {"round": 3, "weather": "fine", "bytes_sent": {"vectors": 1, "smoke": 2}, "peers": [{"peer": "p"}]}
    status = status_of(document)
    assert (status.round, status.bytes_sent.vectors, status.peers) == (3, 1, (PeerLine(peer="p"),))


@pytest.mark.parametrize("document", [{"bytes_sent": 3}, {"peers": 4}, {"peers": [{}]}, {"addresses": 1}])
def test_another_shape_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a status document"):
        status_of(document)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"peers": 4}', b"[" * 100_000])
def test_an_invalid_file_is_not_a_status(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STATUS_FILE).write_bytes(content)
    assert read_status(tmp_path) is None


def test_a_file_that_is_too_long_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / STATUS_FILE).write_bytes(b" " * MAX_STATUS_BYTES + b"{}")
    assert read_status(tmp_path) is None


def test_a_missing_file_is_not_a_status(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None


def test_the_limits_of_the_owner_are_read_back_as_texts(tmp_path: Path) -> None:
    status = PeerStatus(limits={"max_upload": "5000kbit"}, paused="paused (battery)", paused_until=None, control="7")
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status
    with pytest.raises(ValueError, match="not a status document"):
        status_of({"limits": 5})
