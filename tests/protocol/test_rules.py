"""What all peers agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import run_rules


@pytest.mark.parametrize(("heartbeat", "expected"), [(1.0, 8.0), (2.0, 8.0), (4.0, 12.0)])
def test_silence_is_three_heartbeats_and_at_least_a_round(heartbeat: float, expected: float) -> None:
    assert replace(run_rules(), heartbeat_seconds=heartbeat).silence_seconds == expected
