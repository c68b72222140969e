"""Lines are read as people write them, each once."""

from __future__ import annotations

import pytest

from benchmarks.training.uplinks import Uplink, parse_uplinks
from p2p_diloco.errors import ConfigError


def test_rates_and_no_rate() -> None:
    assert parse_uplinks("20mbit, 500kbit,Unlimited,1.5gbit") == (
        Uplink(name="20mbit", bits_per_second=20e6),
        Uplink(name="500kbit", bits_per_second=500e3),
        Uplink(name="unlimited"),
        Uplink(name="1.5gbit", bits_per_second=1.5e9),
    )


def test_each_line_is_played_once() -> None:
    assert [uplink.name for uplink in parse_uplinks("5mbit,20mbit,5mbit")] == ["5mbit", "20mbit"]


@pytest.mark.parametrize("word", ["20", "mbit", "fastmbit", "0mbit", "-5mbit", "nanmbit", "infmbit", "1kbit", "20mb"])
def test_what_is_no_rate_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--uplink is '{word}'; expected a rate from 100kbit to 100gbit"):
        parse_uplinks(word)


def test_no_line_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="--uplink is empty"):
        parse_uplinks(" , ")
