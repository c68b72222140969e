"""Exit a process while a thread is still busy in compiled code, such as a long training step."""

from __future__ import annotations

import os
import sys
import threading
import time

from p2p_diloco.cli.lost_stream import flush_or_discard

LONG_AT_WORK = frozenset({"training", "vectors"})
"""Threads of `peer.training_thread` and `node.vector_worker`, by name: importing these would import torch."""
PATIENCE_SECONDS = 5.0


def end_despite_last_step(exit_code: int) -> int:
    """Return the exit code, or exit the process with it at once if one of those threads is still busy.

    A peer waits a few seconds for its last step, and a step may take minutes. The interpreter ends remaining threads
    when they return to it, which inside torch's C++ aborts the process with another exit code.
    """
    if any(thread.name in LONG_AT_WORK for thread in threading.enumerate()):
        _wait_for_writers()
        for stream in (sys.stdout, sys.stderr):
            flush_or_discard(stream)
        os._exit(exit_code)
    return exit_code


def _wait_for_writers() -> None:
    """Give the non-daemon threads a while to finish their writes."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
