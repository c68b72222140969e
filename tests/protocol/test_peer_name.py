"""A peer's name is a short line that looks the same everywhere, or it is none."""

from __future__ import annotations

import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.protocol.wire.peer_name import MOST_NAME_BYTES, decode_name, encode_name, named


@pytest.mark.parametrize("text", ["", "ada", "Bo's 4090 [red]", "Łódź", "机器一号", "x" * MOST_NAME_BYTES, "é" * 12])
def test_a_short_line_is_a_name_and_arrives_as_it_was_sent(text: str) -> None:
    assert decode_name(encode_name(text)) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a\nb", "line break"),
        ("a\x1b[2J", "control character"),
        ("a\x7f", "control character"),
        ("ab\u202egnp", "not seen"),
        ("a\u2066b", "not seen"),
        ("a\u200bb", "not seen"),
        ("a\u2028b", "line break"),
        ("a\u00a0b", "not seen"),
        ("a\U000e0041", "not seen"),
        ("a\udcff", "not seen"),
        (" a", "begins or ends with a blank"),
        ("a ", "begins or ends with a blank"),
        ("x" * 25, "takes 25 bytes in UTF-8; at most 24 fit"),
        ("é" * 13, "takes 26 bytes in UTF-8; at most 24 fit"),
    ],
)
def test_what_would_not_look_the_same_everywhere_is_refused_and_never_shown(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        encode_name(text)
    assert str(refused.value).isprintable()
    assert decode_name(text.encode("utf-8", "surrogatepass")) == ""


@pytest.mark.parametrize("sent", [b"\xff", b"a\xc3", b"\xed\xb3\xbf", bytes(24)])
def test_bytes_that_are_no_text_are_no_name(sent: bytes) -> None:
    assert decode_name(sent) == ""


def test_the_id_stands_last_whatever_the_name() -> None:
    assert named("..x7Yz9fQ4", "ada") == "ada (..x7Yz9fQ4)"
    assert named("..x7Yz9fQ4", "") == "..x7Yz9fQ4"
