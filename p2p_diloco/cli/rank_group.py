"""Start the ranks of an island on this machine, one process for each GPU, and all of them again if one is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from p2p_diloco.cli.lost_stream import print_to_stderr
from p2p_diloco.cli.parent import end_with_parent
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import RANK_LOST_CODE

LOOK_SECONDS = 0.1
END_SECONDS = 15.0
"""Time for the other ranks to end after rank 0."""
LEAVE_SECONDS = 180.0
"""Time for rank 0 to notice that another has ended, to leave the run and to end."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
"""Pause before the ranks are started again; it doubles while they live shorter than `SHORT_LIFE_SECONDS`."""
SHORT_LIFE_SECONDS = 120.0
_GPUS = (Path("/proc/driver/nvidia/gpus"), Path("/dev/kfd"))
"""Present where a driver of NVIDIA's or AMD's GPUs is."""


def ranks_to_start(settings: PeerSettings) -> int:
    """Return how many ranks this machine's island has: as set, or one for each GPU."""
    if settings.ranks is not None:
        return settings.ranks
    if settings.device not in ("auto", "cuda") or not any(map(os.path.exists, _GPUS)):
        return 1
    import torch

    return max(1, torch.cuda.device_count())


class RankGroup:
    """The processes of an island's ranks.

    Args:
        command: command line of each.
        count: number of ranks.
        environment: variables of this process.
    """

    def __init__(self, command: Sequence[str], count: int, environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._count = count
        self._environment = environment
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_interrupted = False

    def run(self) -> int:
        """Run until rank 0 ends by itself; return its exit code."""
        handlers = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            pause = PAUSE_SECONDS / 2
            while True:
                began = time.monotonic()
                code = self._run_once()
                if self._is_interrupted or not (code == RANK_LOST_CODE or code < 0):
                    return code
                is_short = time.monotonic() - began < SHORT_LIFE_SECONDS
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS) if is_short else PAUSE_SECONDS
                text = f"a rank of this island was lost; starting all {self._count} again in {pause:.0f} s"
                print_to_stderr(text)
                time.sleep(pause)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run_once(self) -> int:
        port = _free_port()
        try:
            for rank in range(self._count):
                self._processes.append(self._start(rank, port))
            return self._watch()
        finally:
            self._end_all()

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        own = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self._count,
            "LOCAL_WORLD_SIZE": self._count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self._count))}
        return subprocess.Popen(
            self._command,
            env={**threads, **self._environment, **{name: str(value) for name, value in own.items()}},
            stdin=subprocess.PIPE,  # its end tells a rank that this process is gone
            start_new_session=True,  # Ctrl-C is for rank 0 alone, which tells the others
        )

    def _watch(self) -> int:
        """Wait for rank 0; return its exit code, or that of another rank that has failed with an error of its own."""
        first, others = self._processes[0], self._processes[1:]
        give_up_at = float("inf")
        while first.poll() is None and time.monotonic() < give_up_at:
            if give_up_at == float("inf") and any(process.poll() is not None for process in others):
                give_up_at = time.monotonic() + LEAVE_SECONDS
            time.sleep(LOOK_SECONDS)
        until = time.monotonic() + END_SECONDS
        while any(process.poll() is None for process in others) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        codes = [RANK_LOST_CODE if code is None else code for code in (process.poll() for process in self._processes)]
        if codes[0] != RANK_LOST_CODE:
            return codes[0]
        # It would fail again. A killed rank has a negative code.
        return next((code for code in codes if code > 0 and code != RANK_LOST_CODE), RANK_LOST_CODE)

    def _end_all(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()
        self._processes = []

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        if not self._processes:
            raise KeyboardInterrupt  # between two starts
        self._processes[0].send_signal(signal.SIGINT)


def run_ranks(
    arguments: Sequence[str], count: int, environment: Mapping[str, str], *, with_parent: bool = False
) -> int:
    """Run `p2p-diloco` with these arguments in `count` ranks; return the exit code.

    Args:
        with_parent: end, with all ranks, when the parent process ends.
    """
    if with_parent:
        end_with_parent()
    print_to_stderr(f"starting {count} ranks, which train together …")
    return RankGroup(
        [sys.executable, "-m", "p2p_diloco", *(word for word in arguments if word != "--with-parent"), "--with-parent"],
        count,
        environment,
    ).run()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
