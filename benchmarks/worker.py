"""Worker process of a benchmark: reads messages from standard input and writes answers to standard output.

Each message and each answer is one JSON object on one line. The first line configures the worker; each further line is
a command and gets one line as its answer. The worker and its children end when the parent closes its standard input.
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
    """The commands that a worker executes."""

    def do(self, word: Mapping[str, Any]) -> dict[str, Any]:
        """Execute the command `word["do"]` and return the answer."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


def obey(words: TextIO, answers: TextIO, make: Callable[[Order], Worker]) -> None:
    """Make a worker from the first line, and execute the commands in the other lines until `end`."""
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
    """Kill the whole process group once the other end of this pipe is closed. Nothing is read from the pipe."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # hang-ups are always reported
        poll.poll()
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def run(obey_words: Callable[[TextIO, TextIO], None]) -> None:
    """Run as a worker process: send the output of libraries to the log, and answers to the pipe."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end_with_parent(sys.stdin.fileno())
    obey_words(sys.stdin, answers)
