"""Train one model on several ranks, as one island of a run.

torchrun --nproc-per-node 2 train.py run.toml state-a        found the run; writes run.toml first if it is missing
torchrun --nproc-per-node 2 train.py "p2pdiloco://…" state-b join it, from here or from anywhere

Add --shard to spread the model over the ranks with fully_shard instead of giving each rank a copy.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import p2p_diloco

parser = argparse.ArgumentParser()
parser.add_argument("run")
parser.add_argument("folder")
parser.add_argument("--shard", action="store_true")
parser.add_argument("--rounds", type=int, help="end after this round")
arguments = parser.parse_args()

dist.init_process_group("gloo")  # on GPUs: "nccl", and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
is_first = dist.get_rank() == 0
torch.set_num_threads(1)
torch.manual_seed(0)  # the same values on all ranks
model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
if arguments.shard:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

joins = arguments.run.startswith("p2pdiloco:")
missing = torch.tensor(float(is_first and not joins and not Path(arguments.run).exists()))
dist.all_reduce(missing)  # what rank 0 sees counts
if missing:
    p2p_diloco.new_run(arguments.run, model, rounds={"round_seconds": 2.0, "fragments": 2, "spans_per_fragment": 4})
enter = p2p_diloco.join if joins else p2p_diloco.found

settings = {"state_directory": arguments.folder}
with enter(arguments.run, model, optimizer, settings=settings, until_round=arguments.rounds) as swarm:
    draw = torch.Generator().manual_seed(swarm.seed)  # each rank draws its own data
    for number in itertools.count():
        numbers = torch.rand(64, 8, generator=draw)
        loss = nn.functional.mse_loss(model(numbers), numbers.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not swarm.step(tokens=len(numbers), loss=loss.item()):  # the tokens of this rank
            break
        if is_first and number == 200:
            print(f"others join with: {swarm.invite}")
        if is_first and number % 1000 == 0:
            print(f"round {swarm.status.round}, loss {loss.item():.4f}, ready peers: {swarm.status.num_ready}")
if is_first:
    print(f"ended with state {swarm.status.state_digest[:16]}")
dist.destroy_process_group()
