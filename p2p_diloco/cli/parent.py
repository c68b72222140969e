"""Exit with the parent process: for a peer started by another program, such as a benchmark."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Exit at once when the parent's end of our standard input closes.

    A pipe works on every system, even if the parent exited before this call. On Linux the kernel also kills this
    process, in case Python hangs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_end, args=(sys.stdin.fileno(),), name="parent", daemon=True).start()


def _wait_for_end(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1024):
            pass
    except OSError:
        pass
    # No clean shutdown: nobody watches this peer any more. The libp2p daemon and its files end with this process.
    os._exit(1)
