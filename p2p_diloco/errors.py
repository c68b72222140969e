"""Errors, named by who must act. Each text says what happened with numbers, what was expected and what to do."""

from __future__ import annotations


class P2PDilocoError(Exception):
    """Root of all errors that this project raises on purpose."""

    exit_code = 1


class ConfigError(P2PDilocoError):
    """You must act: a flag, a file, an invite or the surroundings are wrong."""

    exit_code = 2


class NetworkError(P2PDilocoError):
    """You must act: the network, the bootstrap peers or the local port do not do what is needed."""

    exit_code = 3


class StateError(P2PDilocoError):
    """This peer must catch up or its disk needs care; nothing agreed is lost."""

    exit_code = 4


class PeerError(P2PDilocoError):
    """That peer misbehaved or is gone; its contribution is dropped and the round goes on."""

    exit_code = 5


class RoundError(P2PDilocoError):
    """Nobody must act: this round has no result for a span; the next one comes."""

    exit_code = 6


class FrameError(PeerError):
    """Bytes from a peer are too long, too short, malformed or hold numbers that are not finite."""


class NotInRun(PeerError):
    """A peer answers, but does not take part in the run that it was asked about."""


class NonFiniteUpdate(RoundError):
    """A decoded update holds a NaN or an infinity; the span is skipped this round."""


MOST_TEXT = 16 * 1024
_UNSEEN = frozenset(
    map(
        chr,
        (
            *range(0x20),
            *range(0x7F, 0xA0),
            0x61C,
            *range(0x200B, 0x2010),
            *range(0x2028, 0x202F),
            *range(0x2060, 0x2070),
            0xFEFF,
            *range(0xD800, 0xE000),
        ),
    )
)
"""Controls, line breaks, marks that turn the direction of what follows or have no width, and halves of characters."""


def has_unseen(text: str) -> bool:
    """Return whether `text` holds control characters, line breaks or bidirectional overrides."""
    return not _UNSEEN.isdisjoint(text)


def clean_text(text: str, most: int = MOST_TEXT) -> str:
    """Return what a peer sent as people may see it: on one line, without control characters, at most so long."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join("?" if character in _UNSEEN else character for character in cut) if has_unseen(cut) else cut
