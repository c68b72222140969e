"""Measure what `Swarm.step` costs an island of several ranks while nothing is pending.

`torchrun --nproc-per-node 4 -m benchmarks.ranks` prints the median of a call on rank 0, and its spread.
"""

from __future__ import annotations

import time
from statistics import quantiles

import torch
import torch.distributed as dist
from torch import nn

from p2p_diloco.testing import local_swarm

STEPS = 5000
ROUND_SECONDS = 600.0
"""Nothing is exchanged meanwhile."""


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with local_swarm(rounds={"round_seconds": ROUND_SECONDS}) as local, local.found(model) as swarm:
        seconds = []
        for _ in range(STEPS):
            began = time.perf_counter()
            swarm.step(tokens=1, loss=0.0)
            seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        tenths = [1e6 * value for value in quantiles(seconds[STEPS // 10 :], n=10)]
        spread = f"a tenth of the calls within {tenths[0]:.0f}, nine tenths within {tenths[-1]:.0f}"
        print(f"{dist.get_world_size()} ranks: {tenths[4]:.0f} µs a step ({spread})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
