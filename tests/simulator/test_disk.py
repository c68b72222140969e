"""Disks that fail, under the shipped code that writes files."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from p2p_diloco.storage.whole_file import append_to_file, replace_file
from simulator.disk import DiskRack, SimulatedDisk


@pytest.fixture
def rack() -> Iterator[DiskRack]:
    with DiskRack() as rack:
        yield rack


@pytest.fixture
def disk(rack: DiskRack) -> SimulatedDisk:
    return rack.disk("p0")


def cut_power_often(rack: DiskRack, disk: SimulatedDisk) -> None:
    with rack.aside():
        for seed in range(8):
            disk.cut_power(random.Random(seed))


def test_synced_data_survives_a_power_cut(rack: DiskRack, disk: SimulatedDisk) -> None:
    replaced, appended = disk.path / "replaced", disk.path / "appended"
    for content in (b"one", b"another"):
        replace_file(replaced, lambda draft, content=content: draft.write_bytes(content) and None)
        append_to_file(appended, content)
    cut_power_often(rack, disk)
    assert replaced.read_bytes() == b"another"
    assert appended.read_bytes() == b"oneanother"


def test_unsynced_data_is_lost_or_torn(rack: DiskRack, disk: SimulatedDisk) -> None:
    path = disk.path / "log"
    append_to_file(path, b"safe")
    outcomes = set()
    for seed in range(40):
        with rack.aside():
            path.write_bytes(b"safe")
            disk.synced[path.stat().st_ino] = 4
        with path.open("ab") as file:
            file.write(b"unsafe")
        with rack.aside():
            disk.cut_power(random.Random(seed))
        outcomes.add(path.read_bytes())
    assert b"safe" in outcomes
    assert any(len(outcome) > 4 for outcome in outcomes)
    assert all(outcome.startswith(b"safe") for outcome in outcomes)


def test_unsynced_name_may_revert(rack: DiskRack, disk: SimulatedDisk) -> None:
    path, outcomes = disk.path / "votes", set()
    replace_file(path, lambda draft: draft.write_bytes(b"old") and None)
    for seed in range(20):
        draft = disk.path / "draft"
        draft.write_bytes(b"new")
        draft.replace(path)
        with rack.aside():
            disk.cut_power(random.Random(seed))
            outcomes.add(path.read_bytes())
            path.write_bytes(b"old")
            disk.synced[path.stat().st_ino] = 3
    assert b"old" in outcomes


def test_full_disk_refuses_every_write_and_keeps_its_files(disk: SimulatedDisk) -> None:
    path = disk.path / "file"
    replace_file(path, lambda draft: draft.write_bytes(b"kept") and None)
    disk.is_full = True
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, lambda draft: draft.write_bytes(b"lost") and None)
    with pytest.raises(OSError, match="No space left"):
        append_to_file(path, b"lost")
    assert path.read_bytes() == b"kept"


def test_snapshot_is_restored_exactly(rack: DiskRack, disk: SimulatedDisk) -> None:
    path = disk.path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(b"then")
    with rack.aside():
        files = disk.snapshot()
    path.write_bytes(b"now")
    (disk.path / "later").write_bytes(b"later")
    with rack.aside():
        disk.restore(files)
    assert path.read_bytes() == b"then"
    assert not (disk.path / "later").exists()


def test_disk_rack_leaves_no_files_behind() -> None:
    with DiskRack() as rack:
        rack.disk("p0")
        root = rack.root
    assert not root.exists()
