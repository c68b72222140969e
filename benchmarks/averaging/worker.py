"""Worker process with one peer of one system: `python -m benchmarks.averaging.worker`.

See `benchmarks.worker` for the messages.
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
    """One peer of one system. Between calls it must use almost no CPU."""

    def start(self) -> dict[str, Any]:
        """Start the peer, and return what other peers need to connect."""
        ...

    def meet(self, words: list[dict[str, Any]]) -> None:
        """Connect to the other peers, given what each returned from `start`, in order of places."""
        ...

    def prepare(self, turn: int) -> None:
        """Prepare a pseudo-gradient, and all else that an exchange needs."""
        ...

    def play(self, turn: int, at: float, is_trial: bool) -> dict[str, Any]:
        """Exchange, starting at `at` on the monotonic clock.

        Returns:
            `applied_at`: time at which the outer step was done; `trouble`: why the exchange was incomplete, or empty.
        """
        ...

    def settle(self, turn: int, at: float) -> dict[str, Any]:
        """Run a turn without an exchange, for work that a system does once after a start.

        Returns:
            `is_settled`: whether that work is done; `roster`: digest of the next turn's roster, which must be equal
            on all peers before turns are measured. Empty for systems without one.
        """
        ...

    def digest(self) -> str:
        """Return a hash of the resulting vectors."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


def make_peer(order: Mapping[str, Any]) -> ComparedPeer:
    """Return the peer that an order asks for. Only the libraries of its system are imported."""
    module, name = _CLASSES[order["system"]]
    made: ComparedPeer = getattr(import_module(f"benchmarks.{module}"), name)(order)
    return made


def wait_for_moment(at: float) -> None:
    """Sleep until `at` on the monotonic clock, which all processes of a machine share."""
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)


def obey(words: TextIO, answers: TextIO) -> None:
    """Execute commands until `end`."""
    worker.obey(words, answers, lambda order: _Player(make_peer(order)))


class _Player:
    """Worker that runs a compared peer."""

    def __init__(self, peer: ComparedPeer) -> None:
        self._peer = peer

    def do(self, word: Mapping[str, Any]) -> dict[str, Any]:
        """Execute one command."""
        return _do(self._peer, word)

    def close(self) -> None:
        """Release all resources."""
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
