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
    """A decoded update holds a NaN or an infinity; the span is void this round."""
