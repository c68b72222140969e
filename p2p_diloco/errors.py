"""Errors, named by who must act. Each text gives what happened with numbers, what was expected and what to do."""

from __future__ import annotations

import enum

RANK_LOST_CODE = 75
"""Exit code of a rank whose island has ended because another rank is missing: started again, they continue."""


class P2PDilocoError(Exception):
    """Base class of all errors that this project raises deliberately."""

    exit_code = 1


class ConfigError(P2PDilocoError):
    """You must act: a flag, a file, an invite or the environment is wrong."""

    exit_code = 2


class NetworkError(P2PDilocoError):
    """You must act: there is a problem with the network, the bootstrap peers or the local port."""

    exit_code = 3


class DaemonEnded(NetworkError):
    """The libp2p daemon of this peer ended; it can be started again."""


class StateError(P2PDilocoError):
    """This peer must catch up, or its disk needs attention; no agreed state is lost."""

    exit_code = 4


class PeerError(P2PDilocoError):
    """Another peer misbehaved or is gone; its contribution is dropped and the round continues."""

    exit_code = 5


class RoundError(P2PDilocoError):
    """Nobody must act: this round has no result for a span; the next round follows."""

    exit_code = 6


class DialFailure(enum.Enum):
    """Why an address cannot be dialled."""

    REFUSED = "refused"
    TIMED_OUT = "timed out"
    SILENT = "silent"
    OTHER_PEER = "another peer"
    OTHER_PROTOCOL = "another protocol"
    NO_NAME = "no such name"
    NO_ROUTE = "no route"


class NotReached(PeerError):
    """A peer cannot be dialled at one address; `failure` is the reason."""

    def __init__(self, text: str, failure: DialFailure = DialFailure.TIMED_OUT) -> None:
        super().__init__(text)
        self.failure = failure


class NobodyAnswered(NetworkError):
    """No known peer could be asked; `failures` holds why, for each address that was tried."""

    def __init__(self, text: str, failures: tuple[NotReached, ...] = ()) -> None:
        super().__init__(text)
        self.failures = failures


class FrameError(PeerError):
    """Bytes from a peer are too long, too short, malformed or contain non-finite numbers."""


class NotInRun(PeerError):
    """A peer answered, but is not in the requested run."""


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
"""Control characters, line breaks, bidirectional and zero-width marks, and surrogates."""


def has_unseen(text: str) -> bool:
    """Return whether `text` holds control characters, line breaks or bidirectional overrides."""
    return not _UNSEEN.isdisjoint(text)


def clean_text(text: str, most: int = MOST_TEXT) -> str:
    """Make text from a peer safe to display: one line, without control characters, at most `most` characters."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join("?" if character in _UNSEEN else character for character in cut) if has_unseen(cut) else cut
