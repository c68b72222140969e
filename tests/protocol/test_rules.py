"""What all peers agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import run_rules
from made import ids


@pytest.mark.parametrize(("heartbeat", "expected"), [(1.0, 8.0), (2.0, 8.0), (4.0, 12.0)])
def test_silence_is_three_heartbeats_and_at_least_a_round(heartbeat: float, expected: float) -> None:
    assert replace(run_rules(), heartbeat_seconds=heartbeat).silence_seconds == expected


def test_everybody_may_be_a_member_unless_the_run_lists_who() -> None:
    one, other = ids(2)
    assert run_rules().may_be_member(one)
    listed = replace(run_rules(), listed=frozenset({one}))
    assert (listed.may_be_member(one), listed.may_be_member(other)) == (True, False)
