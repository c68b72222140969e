"""Figures of transfers: medians, and whether all was equal; real processes play in tests/benchmarks/processes."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.averaging.figures import MIB
from benchmarks.state.transfer import Transfer, TransferPlan, document_of, figures_of

PLAN = TransferPlan(megabytes=800, donors=3, killed=1, repeats=3)
ONE = Transfer(
    seconds=4.0,
    installed_seconds=3.0,
    cpu_seconds=6.4,
    daemon_cpu_seconds=0.4,
    received_bytes=808_000_000,
    peak_joiner_bytes=1000 * MIB,
    peak_donor_bytes=1100 * MIB,
    late_seconds=(0.001, 0.02),
    is_equal=True,
)


def test_figures_are_medians_over_the_repeats() -> None:
    figures = figures_of(PLAN, [ONE, replace(ONE, seconds=2.0), replace(ONE, seconds=8.0)])
    assert figures["megabytes_per_second"].middle == 200.0
    assert (figures["megabytes_per_second"].low, figures["megabytes_per_second"].high) == (100.0, 400.0)
    assert figures["cpu_ns_per_byte"].middle == 8.0
    assert figures["received_share"].middle == 1.01
    assert figures["latest_milliseconds"].middle == 20.0


def test_the_document_says_what_was_measured_and_whether_all_was_equal() -> None:
    document = json.loads(json.dumps(document_of(PLAN, [ONE, ONE, ONE])))
    for name, value in {
        "megabytes": 800,
        "donors": 3,
        "killed": 1,
        "repeats": 3,
        "seconds": 4.0,
        "megabytes_per_second": 200.0,
        "cpu_ns_per_byte": 8.0,
        "peak_rss_mib": {"joiner": 1000.0, "donor": 1100.0},
        "equal": True,
    }.items():
        assert document[name] == value
    assert len(document["turns"]) == 3
    assert document_of(PLAN, [ONE, replace(ONE, is_equal=False)])["equal"] is False


def test_a_state_of_so_many_bytes_is_of_an_eighth_as_many_parameters() -> None:
    assert PLAN.parameters == 100_000_000
