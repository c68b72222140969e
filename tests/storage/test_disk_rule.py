"""The rule that decides what a peer writes, by the size of its state directory and the free space of the disk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.storage.archive import DiskRules, DiskUse, Saving, judge_disk

GB = 1e9


def use(used: float, free: float = 100.0) -> DiskUse:
    return DiskUse(used=used * GB, free=free * GB, checkpoint=GB, num_checkpoints=3)


@pytest.mark.parametrize("before", list(Saving))
def test_without_limits_everything_is_written(before: Saving) -> None:
    assert judge_disk(DiskRules(), use(1e6, free=1.5), before) is Saving.ALL


@pytest.mark.parametrize("rules", [DiskRules(cap=10 * GB), DiskRules(free=10 * GB)])
def test_at_a_limit_a_peer_first_keeps_less_and_then_writes_nothing(rules: DiskRules) -> None:
    full = use(9.5, free=10.5)
    first = judge_disk(rules, full, Saving.ALL)
    assert first is Saving.NEWEST
    assert judge_disk(rules, use(7.0, free=13.0), first) is Saving.NEWEST, "all would not fit"
    assert judge_disk(rules, full, first) is Saving.NOTHING
    assert judge_disk(rules, use(8.0, free=12.0), Saving.NOTHING) is Saving.NOTHING
    assert judge_disk(rules, use(5.9, free=14.2), Saving.NOTHING) is Saving.ALL


@given(used=st.floats(0, 20), free=st.floats(0, 20), before=st.sampled_from(list(Saving)))
def test_no_checkpoint_is_written_for_which_there_is_no_room(used: float, free: float, before: Saving) -> None:
    rules, seen = DiskRules(cap=10 * GB, free=5 * GB), use(used, free)
    decided = judge_disk(rules, seen, judge_disk(rules, seen, before))
    if seen.used + seen.checkpoint > 10 * GB or seen.free - seen.checkpoint < 5 * GB:
        assert decided is Saving.NOTHING
    else:
        assert decided is not Saving.NOTHING or before is Saving.NOTHING
