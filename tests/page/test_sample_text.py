"""Samples: made while somebody looks, one at a time and not too often; their errors are for the owner alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from p2p_diloco.app.page.sample_text import EVERY_SECONDS, NO_SAMPLE, SampleText, write_sample


class Writer:
    """Returns numbered texts, when it may."""

    def __init__(self) -> None:
        self.may, self.count = threading.Semaphore(0), 0
        self.wrote = threading.Semaphore(0)

    def __call__(self, folder: Path) -> str:
        self.may.acquire()
        self.count += 1
        self.wrote.release()
        return f"text {self.count}"


def test_a_sample_is_made_when_somebody_looks_and_again_after_five_minutes(tmp_path: Path) -> None:
    now, writer = 0.0, Writer()
    sample = SampleText(tmp_path, write=writer, now=lambda: now)
    assert writer.count == 0
    sample.latest(shows_errors=False)
    now = 2 * EVERY_SECONDS
    sample.latest(shows_errors=False)  # the first is still being made
    writer.may.release()
    assert writer.wrote.acquire(timeout=10)
    sample.wait()
    assert sample.latest(shows_errors=False) == "text 1"  # begins the second
    writer.may.release()
    sample.wait()
    assert sample.latest(shows_errors=False) == "text 2"
    assert writer.count == 2


def test_why_there_is_no_sample_is_told_only_where_errors_are_shown(tmp_path: Path) -> None:
    sample = SampleText(tmp_path, write=lambda folder: f"{NO_SAMPLE}: nothing in {folder}", now=lambda: 0.0)
    sample.latest(shows_errors=True)
    sample.wait()
    assert sample.latest(shows_errors=True) == f"{NO_SAMPLE}: nothing in {tmp_path}"
    assert sample.latest(shows_errors=False) is None


@pytest.mark.slow
def test_a_folder_without_a_model_has_no_sample(tmp_path: Path) -> None:
    assert write_sample(tmp_path / "missing").startswith(f"{NO_SAMPLE}: ")
