"""One peer of one system as a process: `python -m p2p_diloco.bench.averaging.worker`, one JSON object a line.

The first line says what to be; each further one what to do, answered by one line. It ends, with all that it started,
when the parent's end of its standard input closes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, TextIO

from p2p_diloco.bench.averaging.systems import GLOO, HIVEMIND_FLOAT16, HIVEMIND_FLOAT32, OURS, STATE

_CLASSES = {
    OURS: ("averaging.our_peer", "OurPeer"),
    HIVEMIND_FLOAT32: ("averaging.hivemind_peer", "HivemindPeer"),
    HIVEMIND_FLOAT16: ("averaging.hivemind_peer", "HivemindPeer"),
    GLOO: ("averaging.gloo_peer", "GlooPeer"),
    STATE: ("state.state_peer", "StatePeer"),
}


class Contestant(Protocol):
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
            `is_settled`: whether that is done.
        """
        ...

    def digest(self) -> str:
        """Return a hash of the resulting vectors."""
        ...

    def close(self) -> None:
        """Tidy up."""
        ...


def make_contestant(order: Mapping[str, Any]) -> Contestant:
    """Return what an order asks for; only its own libraries are imported."""
    module, name = _CLASSES[order["system"]]
    made: Contestant = getattr(import_module(f"p2p_diloco.bench.{module}"), name)(order)
    return made


def wait_for_moment(at: float) -> None:
    """Sleep until the monotonic clock, which all processes of a machine share, shows `at`."""
    while (left := at - time.monotonic()) > 0:
        time.sleep(left)


def obey(words: TextIO, answers: TextIO) -> None:
    """Do what is said until the word to end."""
    contestant = make_contestant(json.loads(words.readline()))
    for line in iter(words.readline, ""):
        word = json.loads(line)
        if word["do"] == "end":
            break
        try:
            answer = _do(contestant, word)
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            raise
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    contestant.close()


def _do(contestant: Contestant, word: Mapping[str, Any]) -> dict[str, Any]:
    match word["do"]:
        case "start":
            return contestant.start()
        case "meet":
            contestant.meet(word["words"])
        case "prepare":
            contestant.prepare(word["turn"])
        case "play":
            return contestant.play(word["turn"], word["at"], word["is_trial"])
        case "settle":
            return contestant.settle(word["turn"], word["at"])
        case "digest":
            return {"digest": contestant.digest()}
    return {}


def end_with_parent(descriptor: int) -> None:
    """End the whole process group once the other end of this pipe is closed; reads nothing from it."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # a hang-up is told without being asked for
        poll.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def main() -> None:
    """Be a worker: what libraries print goes to the log, answers to the pipe."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end_with_parent(sys.stdin.fileno())
    obey(sys.stdin, answers)


if __name__ == "__main__":
    main()
