"""One peer of one system as a process: `python -m benchmarks.averaging.worker`, one JSON object a line.

What is said and answered, see `benchmarks.worker`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, TextIO

from benchmarks import worker
from benchmarks.averaging.systems import GLOO, HIVEMIND_FLOAT16, HIVEMIND_FLOAT32, OURS, STATE

_CLASSES = {
    OURS: ("averaging.our_peer", "OurPeer"),
    HIVEMIND_FLOAT32: ("averaging.hivemind_peer", "HivemindPeer"),
    HIVEMIND_FLOAT16: ("averaging.hivemind_peer", "HivemindPeer"),
    GLOO: ("averaging.gloo_peer", "GlooPeer"),
    STATE: ("state.state_peer", "StatePeer"),
}


class ComparedPeer(Protocol):
    """One peer of one system. Between two calls it must take next to nothing of the machine."""

    def start(self) -> dict[str, Any]:
        """Start what is needed; return what the others must know."""
        ...

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Get to know the others, from what each returned when it started, in order of places."""
        ...

    def prepare(self, turn: int) -> None:
        """Have a pseudo-gradient ready in memory, and all that must come before an exchange."""
        ...

    def play(self, turn: int, at: float, is_trial: bool) -> dict[str, Any]:
        """Exchange from the moment `at` of the monotonic clock on.

        Returns:
            `applied_at`: when the outer step was done here; `trouble`: why the exchange was not whole, or nothing.
        """
        ...

    def settle(self, turn: int, at: float) -> dict[str, Any]:
        """Sit through a turn without an exchange, for what is done once after a start.

        Returns:
            `is_settled`: whether that is done; `roster`: a digest of the members of the next turn, equal at all peers
            before turns count. Empty in systems that have none.
        """
        ...

    def digest(self) -> str:
        """Return a hash of the resulting vectors."""
        ...

    def close(self) -> None:
        """Tidy up."""
        ...


def make_peer(order: Mapping[str, Any]) -> ComparedPeer:
    """Return what an order asks for; only its own libraries are imported."""
    module, name = _CLASSES[order["system"]]
    made: ComparedPeer = getattr(import_module(f"benchmarks.{module}"), name)(order)
    return made


def wait_for_moment(at: float) -> None:
    """Sleep until the monotonic clock, which all processes of a machine share, shows `at`."""
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)


def obey(words: TextIO, answers: TextIO) -> None:
    """Do what is said until the word to end."""
    worker.obey(words, answers, lambda order: _Player(make_peer(order)))


class _Player:
    """A compared peer as a worker."""

    def __init__(self, peer: ComparedPeer) -> None:
        self._peer = peer

    def do(self, word: Mapping[str, Any]) -> dict[str, Any]:
        """Do one thing."""
        return _do(self._peer, word)

    def close(self) -> None:
        """Tidy up."""
        self._peer.close()


def _do(peer: ComparedPeer, word: Mapping[str, Any]) -> dict[str, Any]:
    match word["do"]:
        case "start":
            return peer.start()
        case "meet":
            peer.meet(word["words"])
        case "prepare":
            peer.prepare(word["turn"])
        case "play":
            return peer.play(word["turn"], word["at"], word["is_trial"])
        case "settle":
            return peer.settle(word["turn"], word["at"])
        case "digest":
            return {"digest": peer.digest()}
    return {}


if __name__ == "__main__":
    worker.run(obey)
