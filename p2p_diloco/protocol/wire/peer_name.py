"""A peer's name: what its owner calls it. Nobody checks it, and several peers may have one name; the id identifies."""

from __future__ import annotations

from p2p_diloco.errors import ConfigError

MOST_NAME_BYTES = 24


def encode_name(text: str) -> bytes:
    """Return a name that an owner has chosen, as it is sent; an empty text is no name.

    Raises:
        ConfigError: it is too long, or would not look the same everywhere.
    """
    if wrong := _what_is_wrong(text):
        raise ConfigError(f"{text!a} is not a name: {wrong}")
    return text.encode("utf-8")


def decode_name(sent: bytes) -> str:
    """Return the name that another peer has sent; empty if `encode_name` makes no such bytes."""
    try:
        text = sent.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if _what_is_wrong(text) else text


def named(short: str, name: str) -> str:
    """Return how a peer is shown: the short form of its id, after its name if it has one."""
    return f"{name} ({short})" if name else short


def _what_is_wrong(text: str) -> str:
    if not text.isprintable():
        return "it holds a line break, a control character, or a mark that is not seen"
    if text != text.strip():
        return "it begins or ends with a blank"
    num_bytes = len(text.encode("utf-8"))
    return f"it takes {num_bytes} bytes in UTF-8; at most {MOST_NAME_BYTES} fit" if num_bytes > MOST_NAME_BYTES else ""
