"""The end of a process of which a thread is still at work in compiled code, such as a long training step."""

from __future__ import annotations

import os
import sys
import threading
import time

from p2p_diloco.cli.lost_stream import flush_or_discard

LONG_AT_WORK = frozenset({"training", "vectors"})
"""Threads of `peer.training_thread` and `node.vector_worker`, by name: importing them would bring torch along."""
PATIENCE_SECONDS = 5.0


def end_despite_last_step(exit_code: int) -> int:
    """Return the exit code, or end this process with it at once when one of those threads is still at work.

    A peer waits some seconds for its last step, and a step may take minutes. The interpreter ends the threads that are
    left when they come back to it, which inside of torch's C++ aborts the process with an exit code of its own.
    """
    if any(thread.name in LONG_AT_WORK for thread in threading.enumerate()):
        _wait_for_writers()
        for stream in (sys.stdout, sys.stderr):
            flush_or_discard(stream)
        os._exit(exit_code)
    return exit_code


def _wait_for_writers() -> None:
    """Let the threads that the interpreter would wait for write what they have, for a while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
