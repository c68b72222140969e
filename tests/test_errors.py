"""Errors name who must act, and each kind has its own exit code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from p2p_diloco import errors
from p2p_diloco.errors import (
    MOST_TEXT,
    ConfigError,
    FrameError,
    NetworkError,
    NonFiniteUpdate,
    P2PDilocoError,
    PeerError,
    RoundError,
    StateError,
    clean_text,
)

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, P2PDilocoError)]
EXIT_CODES = Path(__file__).resolve().parent.parent / "docs" / "reference" / "exit-codes.md"


@pytest.mark.parametrize(
    ("kind", "code"),
    [(P2PDilocoError, 1), (ConfigError, 2), (NetworkError, 3), (StateError, 4), (PeerError, 5), (RoundError, 6)],
)
def test_exit_codes_are_those_that_scripts_rely_on(kind: type[P2PDilocoError], code: int) -> None:
    assert kind.exit_code == code
    assert kind("text").exit_code == code


def test_a_bad_frame_is_blamed_on_its_sender() -> None:
    assert issubclass(FrameError, PeerError)
    assert FrameError.exit_code == PeerError.exit_code


def test_an_update_that_is_not_finite_costs_only_a_round() -> None:
    assert issubclass(NonFiniteUpdate, RoundError)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_is_caught_by_its_base_class_and_keeps_its_text(kind: type[P2PDilocoError]) -> None:
    assert issubclass(kind, P2PDilocoError)
    assert inspect.getdoc(kind)
    assert str(kind("3 of 8 spans came")) == "3 of 8 spans came"


@pytest.mark.parametrize("kind", [kind for kind in ALL if "exit_code" in vars(kind)], ids=lambda kind: kind.__name__)
def test_every_exit_code_is_documented(kind: type[P2PDilocoError]) -> None:
    rows = re.findall(r"^\| (\d+) \| `?(\w+)`? \|", EXIT_CODES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert (str(kind.exit_code), kind.__name__) in rows


def test_text_from_a_peer_is_one_short_line_without_control_characters() -> None:
    assert clean_text("12D3 said: naïve, 日本") == "12D3 said: naïve, 日本"
    assert clean_text("\x1b[2J a\nb\r\x07\x9b \u202eevil\u2066 \u2028 \ud800\x00") == "?[2J a?b??? ?evil? ? ??"
    assert clean_text("a" * 100, 10) == "a" * 9 + "…"
    assert len(clean_text("\x1b" * 10**6)) == MOST_TEXT
