"""Rates are parsed as people write them, and formatted for people to read."""

from __future__ import annotations

import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.rate import (
    count_named,
    counted,
    format_part,
    format_rate,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize("text", ["fast", "0mbit", "-1gbit", "nan", "infgbit", "", "mbit", "20mb", "20"])
def test_an_invalid_rate_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rate(text, "--uplink")
    assert str(caught.value) == (
        f"--uplink is {text!r}; expected a rate with its unit, kbit, mbit or gbit per second, such as 20mbit"
    )


def test_rates_are_parsed_in_bits() -> None:
    assert parse_rate("20mbit", "it") == parse_rate(" 20Mbit/s", "it") == 20e6
    assert parse_rate("500kbit", "it") == 500e3
    assert parse_rate("1000bit", "it") == parse_rate("1kbit", "it") == 1000.0


@pytest.mark.parametrize(
    ("bits", "text"), [(500e3, "500 kbit/s"), (4.123e6, "4.12 Mbit/s"), (2e9, "2 Gbit/s"), (1e6, "1 Mbit/s")]
)
def test_rates_have_three_digits_and_a_unit(bits: float, text: str) -> None:
    assert format_rate(bits) == text


def test_counts_are_parsed() -> None:
    assert [count_named(text) for text in ("100M", "1.5b", "2000000")] == [100_000_000, 1_500_000_000, 2_000_000]


@pytest.mark.parametrize("text", ["", "M", "many", "5k", "-1M", "nan", "1e999M"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected at least 1M"):
        count_named(text)


def test_one_item_has_no_plural() -> None:
    assert [counted(count, "peer") for count in (0, 1, 2)] == ["no peers", "1 peer", "2 peers"]


def test_a_part_is_never_more_than_the_whole() -> None:
    assert [format_part(part, 1, "member") for part in (0, 1, 2)] == ["0 of 1 member", "1 of 1 member", "1 of 1 member"]
    assert (format_part(3, 4, "member"), format_part(3, 4)) == ("3 of 4 members", "3 of 4")


def test_amounts_and_times_are_parsed() -> None:
    assert [parse_bytes(text, "it") for text in ("500GB", "1.5 tb", "200mb", "10kb")] == [500e9, 1.5e12, 200e6, 10e3]
    assert [parse_seconds(text, "it") for text in ("90s", "30m", "2h", "1.5d")] == [90.0, 1800.0, 7200.0, 129_600.0]


@pytest.mark.parametrize("text", ["", "much", "500", "-1GB", "0GB", "nanGB", "infh", "GB", "h", "5 mbit"])
def test_other_amounts_and_times_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^it is .*; expected an amount with its unit, MB, GB or TB, such as 500GB$"):
        parse_bytes(text, "it")
    with pytest.raises(ConfigError, match=r"^it is .*; expected a time with its unit, s, m, h or d, such as 2h$"):
        parse_seconds(text, "it")
