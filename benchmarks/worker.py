"""Worker process of a benchmark, `python -m benchmarks.worker MODULE:CLASS`: executes commands of its parent.

Each message and each answer is one JSON object on one line. The first line configures the worker. Each further line is
a command, and gets one line as its answer: `do` names a method of the worker, the rest are its arguments. The worker
and its children end when the parent closes its standard input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TextIO

Order = Mapping[str, Any]


def make_worker(name: str, order: Order) -> Any:
    """Return a new worker.

    Args:
        name: module below `benchmarks` and class. Only the libraries that it needs are imported.
        order: the first message.
    """
    module, made = name.split(":")
    return getattr(import_module(f"benchmarks.{module}"), made)(order)


def obey(words: TextIO, answers: TextIO, make: Callable[[Order], Any]) -> None:
    """Make a worker from the first line, execute the commands in the other lines until `end`, and close it."""
    worker = make(json.loads(words.readline()))
    for line in iter(words.readline, ""):
        word = json.loads(line)
        command = word.pop("do")
        if command == "end":
            break
        try:
            answer = getattr(worker, command)(**word)
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            raise
        answers.write(json.dumps(answer or {}) + "\n")
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


def run(name: str) -> None:
    """Run as a worker process: send the output of libraries to the log, and answers to the pipe."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end_with_parent(sys.stdin.fileno())
    obey(sys.stdin, answers, lambda order: make_worker(name, order))


if __name__ == "__main__":
    run(sys.argv[1])
