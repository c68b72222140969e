"""What a peer holds beyond training is split into bytes for each parameter and what is always there."""

from __future__ import annotations

import json

import pytest

from benchmarks.footprint.figures import MIB, Footprint, PeerFootprint, SizeFigures, document_of, line_through


def size_of(parameters: int, *peaks: int) -> SizeFigures:
    return SizeFigures(
        parameters=parameters,
        alone=Footprint(peak=16 * parameters, steady=14 * parameters),
        peers=tuple(
            PeerFootprint(peer=Footprint(peak=peak, steady=peak // 2), daemon=Footprint(peak=MIB, steady=MIB // 2))
            for peak in peaks
        ),
        num_rounds=6,
        num_entries=192,
        results_equal=True,
    )


def test_the_largest_peer_counts_with_its_daemon() -> None:
    size = size_of(1_000_000, 30_000_000, 40_000_000, 35_000_000)
    assert size.largest is size.peers[1]
    assert size.beyond == 40_000_000 + MIB - 16_000_000
    assert size.beyond_steady == 20_000_000 + MIB // 2 - 14_000_000
    assert size.goal == 210_000_000


def test_a_line_gives_back_what_it_was_made_of() -> None:
    line = line_through([10, 50, 125], [10 * 9 + 7, 50 * 9 + 7, 125 * 9 + 7])
    assert line is not None
    assert (line.slope, line.constant) == (pytest.approx(9.0), pytest.approx(7.0))


def test_one_size_gives_no_line() -> None:
    assert line_through([10, 10], [97, 98]) is None
    document = document_of([size_of(1_000_000, 30_000_000)], 1)
    assert document["slope_bytes_per_parameter"] is None
    assert document["constant_mib"] is None


def test_the_document_holds_each_size_and_the_line() -> None:
    sizes = [size_of(n, 16 * n + 9 * n + 100 * MIB) for n in (10_000_000, 50_000_000)]
    document = json.loads(json.dumps(document_of(sizes, 1)))
    assert document["slope_bytes_per_parameter"] == pytest.approx(9.0)
    assert document["constant_mib"] == pytest.approx(101.0)
    row = document["rows"][1]
    assert row["bytes_per_parameter_beyond"] == pytest.approx((450_000_000 + 101 * MIB) / 50_000_000)
    assert (row["daemon_mib"], row["entries"], row["results_equal"]) == (1.0, 192, True)
