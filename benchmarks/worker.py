"""A worker process of a bench: words come by standard input, answers go by standard output, one JSON object a line.

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
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

Order = Mapping[str, Any]


class Worker(Protocol):
    """The functions that answer orders."""

    def do(self, word: Mapping[str, Any]) -> dict[str, Any]:
        """Do what `word["do"]` names; return the answer."""
        ...

    def close(self) -> None:
        """Tidy up."""
        ...


def obey(words: TextIO, answers: TextIO, make: Callable[[Order], Worker]) -> None:
    """Make a worker of the first line, and have it do what the others say until the word to end."""
    worker = make(json.loads(words.readline()))
    for line in iter(words.readline, ""):
        word = json.loads(line)
        if word["do"] == "end":
            break
        try:
            answer = worker.do(word)
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            raise
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    worker.close()


def end_with_parent(descriptor: int) -> None:
    """End the whole process group once the other end of this pipe is closed; reads nothing from it."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # a hang-up is told without being asked for
        poll.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def run(obey_words: Callable[[TextIO, TextIO], None]) -> None:
    """Be a worker process: what libraries print goes to the log, answers to the pipe."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end_with_parent(sys.stdin.fileno())
    obey_words(sys.stdin, answers)
