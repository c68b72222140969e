"""A peer that somebody else started, such as the demo: it ends when its parent does, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End this process at once when the parent's end of our standard input closes.

    A pipe works on every system and cannot be missed, even when the parent ended before this call; on Linux the kernel
    kills us besides, should Python hang.
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
    # No good-bye: whoever watched this peer is gone. libp2p's daemon and its files end with us.
    os._exit(1)
