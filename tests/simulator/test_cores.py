"""Counting the cores that this process may use."""

from __future__ import annotations

import os

import pytest

from simulator.cores import usable_cores


def test_excluded_cores_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert usable_cores() == 3


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_all_cores_are_counted_if_the_system_does_not_report_affinity(
    monkeypatch: pytest.MonkeyPatch, counted: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert usable_cores() == expected
