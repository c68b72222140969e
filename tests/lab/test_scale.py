"""What a round costs as a swarm grows: small sizes, exact claims."""

from __future__ import annotations

import pytest

from p2p_diloco.lab.scale import ScaleRow, measure, scale_swarm


def bits(row: ScaleRow) -> float:
    return 8.0 * row.bytes_sent_per_parameter_per_cycle


def test_a_row_of_eight_sends_what_the_formula_says() -> None:
    row = measure(8, parameters=1_000_000_000)
    assert (row.peers, row.rows, row.streams) == (8, 1, 7)
    assert row.included == 1.0
    assert row.replicas_equal
    # int4 with a 16-bit scale per 64: 4.25 bits, both ways, all but the own share; headers next to nothing.
    assert bits(row) == pytest.approx(8.5 * (1 - 1 / 8), rel=0.01)
    assert row.round_seconds is not None
    assert 0 < row.round_seconds < 8


def test_a_grid_sends_a_little_more_and_has_few_streams() -> None:
    row = measure(18, parameters=1_000_000_000, dial_out_only=0.3)
    assert row.rows == 2
    assert row.included == 1.0
    assert row.replicas_equal
    assert row.streams <= 17
    assert bits(row) < 1.2 * 8.5 * (1 - 1 / 8)
    assert row.control_bytes_per_cycle > 0
    assert row.messages > 0


def test_the_same_seed_is_the_same_swarm() -> None:
    assert measure(5) == measure(5)
    hidden = [machine.dialable for machine in scale_swarm(10, dial_out_only=0.3).machines.values()]
    assert hidden.count(False) == 3
