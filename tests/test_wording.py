"""Numbers formatted for people."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

import p2p_diloco
from p2p_diloco.wording import (
    NOTHING,
    format_bytes,
    format_count,
    format_how_far,
    format_loss,
    format_seconds,
    format_share,
    install_line,
    short_peer,
)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12, "12"), (12.34, "12.3"), (999, "999"), (3_400, "3.4k"), (1_200_000, "1.2M")]
)
def test_counts_have_a_unit(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(("value", "text"), [(512, "512 B"), (3_400, "3.4 kB"), (5e16, "50000.0 TB")])
def test_bytes_have_a_unit(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(4.21, "4.2 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_seconds_become_minutes_and_hours(value: float, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("share", "seconds", "text"),
    [
        (None, None, "no end set"),
        (0.38, 3 * 86_400.0, "38 % · about 3 days left"),
        (0.9, 7_200.0, "90 % · about 2 hours left"),
        (0.99, 7_199.0, "99 % · about 120 minutes left"),
        (0.999, 100.0, "99 % · less than 2 minutes left"),
        (1.0, 0.0, "planned end reached"),
    ],
)
def test_how_far_a_run_is_has_a_share_and_a_rough_time(share: float | None, seconds: float | None, text: str) -> None:
    assert format_how_far(share, seconds) == text


def test_losses_and_shares_have_fixed_decimals() -> None:
    assert (format_loss(2.40398), format_share(0.9712), format_share(1.02)) == ("2.404", "97.1 %", "100.0 %")


@pytest.mark.parametrize("form", [format_count, format_bytes, format_loss, format_share, format_seconds])
def test_missing_values_are_shown_as_a_dash(form: object) -> None:
    assert callable(form)
    assert [form(value) for value in (None, float("nan"), float("inf"))] == [NOTHING] * 3


def test_short_ids_keep_the_last_characters() -> None:
    assert short_peer("12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp") == "..89SF58mp"
    assert short_peer("") == ""


def test_an_extra_is_installed_into_this_python_and_without_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/my python/bin/python")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: name)
    assert install_line("hf") == "'/opt/my python/bin/python' -m pip install 'p2p-diloco[hf]'"

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    checkout = Path(p2p_diloco.__file__).parent.parent
    assert install_line("hf") == f"'/opt/my python/bin/python' -m pip install -e '{checkout}[hf]'"
