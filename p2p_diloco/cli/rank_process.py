"""This process as one rank of an island, as `torchrun` and `join --ranks` start it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import RANK_LOST_CODE, ConfigError

if TYPE_CHECKING:
    from p2p_diloco.peer.island import Island

MEET_SECONDS = 120.0
"""Maximum time until all ranks are there, and for an exchange of gradients."""


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

    from p2p_diloco.peer.island import Island
    from p2p_diloco.training.ranks import RankLost, Ranks, first_sentence

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
    from p2p_diloco.peer.rank_follower import KnownError, follow_rank_0
    from p2p_diloco.training.ranks import RankLost

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if settings.nice:
        os.nice(settings.nice)
    try:
        follow_rank_0(island, settings)
    except (RankLost, KnownError):
        return RANK_LOST_CODE  # rank 0 says why
    return 0
