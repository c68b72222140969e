"""A peer's saved state survives restarts, crashes and broken disks, or the loss is reported."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from small_run import ORGANISER, peer_key, small_plan

from p2p_diloco.errors import StateError
from p2p_diloco.ids import ZERO_DIGEST, format_peer_id, sha256
from p2p_diloco.protocol.engine import SavedState
from p2p_diloco.protocol.membership.histories import Activity
from p2p_diloco.protocol.wire.ballot import NO_BALLOTS, Ballots, Bond, Proposal
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.session.founding import found_roster
from p2p_diloco.storage.run_folder import (
    ACTIVITY_FILE,
    ADDRESSES_FILE,
    BALLOTS_FILE,
    CLOCK_FILE,
    CUT_ROSTERS_FILE,
    INCARNATION_FILE,
    LATEST_INCARNATION,
    MOST_ADDRESSES_KEPT,
    ROSTERS_FILE,
    RunFolder,
)

RUN = sha256(b"run")
PLAN = small_plan()
FULL = Path("/dev/full")


def folder_in(path: Path, least_incarnation: int = 1) -> RunFolder:
    return RunFolder(path, RUN, least_incarnation=least_incarnation)


def roster(number: int) -> CertifiedRoster:
    founder = Member(peer=peer_key("founder").peer, incarnation=number + 1)
    return found_roster(PLAN, founder, ORGANISER, ZERO_DIGEST, number)


def ballots(promised: int) -> Ballots:
    voted = Proposal(ballot=promised, roster=roster(1).roster, promises=(), origin=())
    return Ballots(parent=sha256(b"parent"), bonds=(Bond(degraded=False, promised=promised, voted=voted),))


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every write of a whole file fail halfway, as on a full disk."""

    def write_half(self: Path, content: bytes) -> NoReturn:
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    folder = folder_in(tmp_path / "new" / "deep")
    assert folder.recall_ballots() == NO_BALLOTS
    assert folder.recall_rosters() == ()
    assert folder.recall_addresses() == {}
    assert folder.read("anything") is None


def test_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    folder_in(tmp_path).next_incarnation()
    assert RunFolder(tmp_path, sha256(b"another run")).next_incarnation() == 1


def test_starts_are_counted(tmp_path: Path) -> None:
    assert [folder_in(tmp_path).next_incarnation() for _ in range(3)] == [1, 2, 3]


def test_counting_in_a_lost_folder_continues_beyond_any_earlier_start(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, least_incarnation=1_700_000_000)
    assert folder.next_incarnation() == 1_700_000_000
    assert folder_in(tmp_path).next_incarnation() == 1_700_000_001


def test_counting_in_a_folder_restored_from_a_backup_continues_beyond_any_earlier_start(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.next_incarnation()
    folder = folder_in(tmp_path, least_incarnation=1_700_000_000)
    assert folder.next_incarnation() == 1_700_000_000
    assert folder.next_incarnation() == 1_700_000_001, "two starts in one second"


def test_a_clock_in_the_year_2200_leaves_room_to_count(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, least_incarnation=7_258_118_400)
    assert folder.next_incarnation() == LATEST_INCARNATION
    assert folder.next_incarnation() == LATEST_INCARNATION + 1


def test_a_count_written_with_an_editor_is_read(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    (folder.path / INCARNATION_FILE).write_bytes(b"1700000000\n")
    assert folder.next_incarnation() == 1_700_000_001


@pytest.mark.parametrize("content", [b"", b"three", b"-1", b"3\n4\n", b"\xff\x00"])
def test_a_broken_count_is_not_restarted(tmp_path: Path, content: bytes) -> None:
    folder = folder_in(tmp_path)
    (folder.path / INCARNATION_FILE).write_bytes(content)
    with pytest.raises(StateError, match=r"incarnation is broken; .*: date \+%s > "):
        folder.next_incarnation()
    assert (folder.path / INCARNATION_FILE).read_bytes() == content


def test_a_start_that_cannot_be_counted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in(tmp_path)
    folder.next_incarnation()
    with monkeypatch.context() as patch:
        fill_the_disk(patch)
        with pytest.raises(StateError, match=r"cannot write .*incarnation: No space left"):
            folder.next_incarnation()
    assert folder_in(tmp_path).next_incarnation() == 2


def test_liveliness_survives_a_restart(tmp_path: Path) -> None:
    seen = Activity(roster=sha256(b"roster"), first=3, last=70)
    folder_in(tmp_path).keep_activity(seen)
    assert folder_in(tmp_path).recall().activity == seen


def test_liveliness_that_cannot_be_written_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = folder_in(tmp_path), Activity(roster=sha256(b"roster"), first=3, last=70)
    folder.keep_activity(seen)
    with monkeypatch.context() as patch:
        fill_the_disk(patch)
        with pytest.raises(StateError, match="No space left"):
            folder.keep_ballots(NO_BALLOTS)
        folder.keep_activity(replace(seen, last=71))
    assert folder_in(tmp_path).recall().activity == seen


@pytest.mark.parametrize("content", [None, b"", b"torn"])
def test_a_peer_starts_without_saved_liveliness(tmp_path: Path, content: bytes | None) -> None:
    folder = folder_in(tmp_path)
    if content is not None:
        (folder.path / ACTIVITY_FILE).write_bytes(content)
    assert folder.recall() == SavedState()


def test_ballots_survive_a_restart(tmp_path: Path) -> None:
    folder_in(tmp_path).keep_ballots(ballots(4))
    folder_in(tmp_path).keep_ballots(ballots(7))
    assert folder_in(tmp_path).recall_ballots() == ballots(7)


def test_ballots_that_cannot_be_saved_raise_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in(tmp_path)
    folder.keep_ballots(ballots(4))
    with monkeypatch.context() as patch:
        fill_the_disk(patch)
        with pytest.raises(StateError, match="free some space"):
            folder.keep_ballots(ballots(7))
    assert folder_in(tmp_path).recall_ballots() == ballots(4)
    assert sorted(path.name for path in folder.path.iterdir()) == [BALLOTS_FILE], "half a draft is left"


@pytest.mark.parametrize("damage", ["torn", "longer", "foreign", "empty"])
def test_broken_ballots_are_not_forgotten_silently(tmp_path: Path, damage: str) -> None:
    folder = folder_in(tmp_path)
    folder.keep_ballots(ballots(4))
    path = folder.path / BALLOTS_FILE
    whole = path.read_bytes()
    damaged = {"torn": whole[:-1], "longer": whole + b"\0", "foreign": b"\xff" * len(whole), "empty": b""}
    path.write_bytes(damaged[damage])
    with pytest.raises(StateError, match=f"{BALLOTS_FILE} is broken .*; move it away to start as a newcomer"):
        folder.recall_ballots()


def test_rosters_are_read_back_in_order(tmp_path: Path) -> None:
    for number in range(3):
        folder_in(tmp_path).keep_roster(roster(number))
    assert folder_in(tmp_path).recall_rosters() == tuple(roster(number) for number in range(3))


@pytest.mark.parametrize("cut", [1, 2, 5, 60])
def test_a_torn_last_roster_is_cut_off_so_that_later_ones_are_found(tmp_path: Path, cut: int) -> None:
    folder = folder_in(tmp_path)
    for number in range(2):
        folder.keep_roster(roster(number))
    path = folder.path / ROSTERS_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    assert folder_in(tmp_path).recall_rosters() == (roster(0),)
    folder_in(tmp_path).keep_roster(roster(5))
    assert folder_in(tmp_path).recall_rosters() == (roster(0), roster(5))


@pytest.mark.parametrize("rubbish", [b"\0" * 16, b"\xff" * 4, b"\x05\0\0\0abcde", b"abc"])
def test_garbage_after_rosters_is_cut_off(tmp_path: Path, rubbish: bytes) -> None:
    folder = folder_in(tmp_path)
    folder.keep_roster(roster(0))
    path = folder.path / ROSTERS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + rubbish)
    assert folder.read_rosters() == (roster(0),)
    assert path.read_bytes() == whole + rubbish
    assert folder.recall_rosters() == (roster(0),)
    assert path.read_bytes() == whole
    assert (folder.path / CUT_ROSTERS_FILE).read_bytes() == rubbish


def test_a_roster_with_trailing_bytes_in_its_record_is_cut_off(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    folder.keep_roster(roster(0))
    whole = (folder.path / ROSTERS_FILE).read_bytes()
    longer = (len(whole) - 4 + 1).to_bytes(4, "little") + whole[4:] + b"?"
    (folder.path / ROSTERS_FILE).write_bytes(whole + longer)
    assert folder.recall_rosters() == (roster(0),)
    assert (folder.path / CUT_ROSTERS_FILE).read_bytes() == longer
    (folder.path / ROSTERS_FILE).write_bytes(whole + b"torn")
    assert folder.recall_rosters() == (roster(0),)
    assert (folder.path / CUT_ROSTERS_FILE).read_bytes() == longer + b"torn"


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_roster_that_does_not_fit_on_the_disk_is_an_error(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    (folder.path / ROSTERS_FILE).symlink_to(FULL)
    with pytest.raises(StateError, match=r"cannot write .*rosters\.bin: No space left"):
        folder.keep_roster(roster(0))


@contextlib.contextmanager
def no_files_left() -> Iterator[None]:
    """Take every file descriptor that this process may open."""
    taken, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[0]), limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_votes_and_rosters_are_kept_even_if_this_process_has_no_file_left_to_open(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    with no_files_left():
        with pytest.raises(OSError, match="Too many open files"):
            (tmp_path / "another").open("wb")
        for _ in range(2):
            folder.keep_ballots(ballots(5))
        folder.keep_roster(roster(0))
    assert folder_in(tmp_path).recall_ballots() == ballots(5)
    assert folder_in(tmp_path).recall_rosters() == (roster(0),)


def address(name: str, port: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{format_peer_id(peer_key(name).peer)}"


def test_addresses_survive_a_restart(tmp_path: Path) -> None:
    known = {peer_key("ada").peer: (address("ada", 1), address("ada", 2)), peer_key("ben").peer: (address("ben", 3),)}
    folder_in(tmp_path).keep_addresses(known)
    assert folder_in(tmp_path).recall_addresses() == known


def test_the_first_addresses_are_kept_as_many_as_can_be_asked_in_a_minute(tmp_path: Path) -> None:
    known = {peer_key(f"peer-{number}").peer: (address(f"peer-{number}", 4),) for number in range(200)}
    folder_in(tmp_path).keep_addresses(known)
    assert list(folder_in(tmp_path).recall_addresses()) == list(known)[:MOST_ADDRESSES_KEPT]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b'{"nobody": []}', b'{"x": 3}', b'{"x": ["y", 3, null, {}]}', b"\xff", b"3", b"null"),
        *(b'{"version": 9, "peers": {"x": {"at": 1e300}}}', b"[" * 100_000),
    ],
)
def test_broken_addresses_are_forgotten(tmp_path: Path, content: bytes) -> None:
    folder = folder_in(tmp_path)
    (folder.path / ADDRESSES_FILE).write_bytes(content)
    assert folder.recall_addresses() == {}


def test_a_broken_address_does_not_hide_a_valid_one(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    listed = ["/ip4/127.0.0.1/tcp/0", "nonsense", address("ada", 4)]
    (folder.path / ADDRESSES_FILE).write_text(json.dumps({"whoever": listed}))
    assert folder.recall_addresses() == {peer_key("ada").peer: (address("ada", 4),)}


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match="choose another place with --state-directory"):
        folder_in(tmp_path / "file")


def test_a_read_only_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in(tmp_path)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    for keep in (lambda: folder.keep_ballots(NO_BALLOTS), lambda: folder.keep_roster(roster(0))):
        with pytest.raises(StateError, match="Read-only file system"):
            keep()


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    (folder.path / BALLOTS_FILE).mkdir()
    with pytest.raises(StateError, match="cannot read"):
        folder.recall_ballots()


def test_the_clock_offset_survives_a_restart(tmp_path: Path) -> None:
    assert folder_in(tmp_path).recall_clock_offset() == 0.0
    folder_in(tmp_path).keep_clock_offset(-600.25)
    assert folder_in(tmp_path).recall_clock_offset() == -600.25


@pytest.mark.parametrize("content", [b"", b"soon", b"nan", b"1e300", b"\xff"])
def test_an_invalid_offset_counts_as_none(tmp_path: Path, content: bytes) -> None:
    folder = folder_in(tmp_path)
    (folder.path / CLOCK_FILE).write_bytes(content)
    assert folder.recall_clock_offset() == 0.0


def test_an_offset_that_cannot_be_written_is_not_an_error(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    (folder.path / CLOCK_FILE).mkdir()
    folder.keep_clock_offset(1.0)
    assert folder.recall_clock_offset() == 0.0
