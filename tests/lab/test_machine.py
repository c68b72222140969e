"""One lab machine: its disk and its clock."""

from __future__ import annotations

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.lab.machine import Disk, Machine
from p2p_diloco.protocol.ballot import NO_BALLOTS


def test_a_full_disk_refuses_and_keeps_what_it_holds() -> None:
    disk = Disk()
    assert disk.keep_incarnation() == 1
    disk.keep_checkpoint({})
    disk.is_full = True
    for keep in (disk.keep_incarnation, lambda: disk.keep_ballots(NO_BALLOTS)):
        with pytest.raises(StateError, match="full"):
            keep()
    disk.keep_checkpoint({})
    assert disk.incarnation == 1
    assert disk.recall({}).heads is None


def test_its_clock_is_wrong_by_an_offset_and_a_drift() -> None:
    machine = Machine(name="p0", dialable=True, trains=True, offset_seconds=2.0, drift=0.01, step_seconds=0.5)
    assert machine.local(100.0) == 103.0
    machine.awake_since, machine.slept_seconds = 10.0, 5.0
    assert machine.steps_made(20.0) == 10
    assert not machine.runs
    with pytest.raises(AssertionError, match="p0 is not running"):
        _ = machine.running
