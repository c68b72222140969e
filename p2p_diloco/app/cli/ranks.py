"""The ranks of an island on this machine: start a process for each, all again if one is lost, or be one of them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from p2p_diloco.app.cli.output import print_to_stderr
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import RANK_LOST_CODE, ConfigError

if TYPE_CHECKING:
    from p2p_diloco.island.island import Island


LOOK_SECONDS = 0.1
END_SECONDS = 15.0
"""Time for the other ranks to end after rank 0."""
LEAVE_SECONDS = 180.0
"""Time for rank 0 to notice that another has ended, to leave the run and to end."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
"""Pause before the ranks are started again; it doubles while they live shorter than `SHORT_LIFE_SECONDS`."""
SHORT_LIFE_SECONDS = 120.0
MEET_SECONDS = 120.0
"""Maximum time until all ranks are there, and for an exchange of gradients."""
_PR_SET_PDEATHSIG = 1
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


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this process among the ranks of an island.

    Attributes:
        rank, count: its rank, and the number of ranks.
        local_rank: its number on this machine, which is that of its GPU.
    """

    rank: int
    count: int
    local_rank: int


def place_among_ranks(environment: Mapping[str, str]) -> Place | None:
    """Return the place that `torchrun` has written into the environment; None for a process by itself.

    Raises:
        ConfigError: the variables are incomplete.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    try:
        rank, count, local_rank = (int(environment[name]) for name in names)
    except (KeyError, ValueError):
        raise ConfigError(
            f"WORLD_SIZE is set in the environment, but {' and '.join(names)} are not all numbers; start the ranks "
            "of an island with torchrun, or with join --ranks, or unset WORLD_SIZE"
        ) from None
    return Place(rank, count, local_rank)


def device_of_rank(device: str, local_rank: int, *, num_gpus: int) -> str:
    """Return the device of a rank: a GPU of its own, if the setting allows one.

    Raises:
        ConfigError: there are more ranks than GPUs, or the setting names one GPU for all ranks.
    """
    if device == "cpu" or (device == "auto" and not num_gpus):
        return "cpu"
    if device == "mps":
        raise ConfigError("an Apple GPU cannot be shared by several ranks; leave --ranks out")
    if device.startswith("cuda:"):
        raise ConfigError(f"--device {device} names one GPU, but each rank needs its own; leave --device out")
    if local_rank >= num_gpus:
        raise ConfigError(
            f"rank {local_rank} of this machine has no GPU of its own, there are {num_gpus}; start {num_gpus} ranks, "
            "or train on the processor with --device cpu"
        )
    return f"cuda:{local_rank}"


@contextmanager
def island_of_ranks(place: Place, settings: PeerSettings) -> Iterator[tuple[Island, PeerSettings]]:
    """Meet the other ranks; yield the island, and the settings of this rank with its own device.

    Raises:
        RankLost: the others are not there in time.
    """
    import torch
    import torch.distributed as dist

    from p2p_diloco.island.island import Island
    from p2p_diloco.island.ranks import RankLost, Ranks, first_sentence

    device = device_of_rank(settings.device, place.local_rank, num_gpus=torch.cuda.device_count())
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=MEET_SECONDS))
    except (RuntimeError, ValueError) as error:
        raise RankLost(
            f"the {place.count} ranks of this island did not meet ({first_sentence(error)}); start all of them again"
        ) from None
    island = Island(Ranks())
    try:
        threads = None if settings.threads is None else max(1, settings.threads // place.count)
        if threads is not None:
            torch.set_num_threads(threads)
        yield island, settings.model_copy(update={"device": device, "threads": threads})
    finally:
        if island.leads:
            island.close()
        if island.lost is None:  # otherwise it would wait for the missing rank
            dist.destroy_process_group()


def follow(island: Island, settings: PeerSettings) -> int:
    """Be a rank other than 0 until rank 0 has left; return the exit code.

    Ctrl-C and SIGTERM are for rank 0, which leaves the run and then tells this rank to end.
    """
    from p2p_diloco.app.training.built_in import KnownError, follow_rank_0
    from p2p_diloco.island.ranks import RankLost

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if settings.nice:
        os.nice(settings.nice)
    try:
        follow_rank_0(island, settings)
    except KnownError:
        return RANK_LOST_CODE  # rank 0 says why
    except RankLost as error:  # it may be rank 0 that is gone
        print_to_stderr(f"rank {island.ranks.rank}: {error}")
        return RANK_LOST_CODE
    return 0


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
