"""Train a model of your own with others.

python train.py run.toml state-a        found the run (written by new_run.py) and print its invite
python train.py "p2pdiloco://…" state-b join it, from here or from anywhere
"""

import contextlib
import itertools
import sys

import torch
from model import make_model

import p2p_diloco

run, folder = sys.argv[1:3]
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
enter = p2p_diloco.join if run.startswith("p2pdiloco:") else p2p_diloco.found

with (
    contextlib.suppress(KeyboardInterrupt),
    enter(run, model, optimizer, settings={"state_directory": folder}) as swarm,
):
    draw = torch.Generator().manual_seed(swarm.seed)  # each peer draws its own data
    for number in itertools.count():
        numbers = torch.rand(64, 8, generator=draw)
        loss = torch.nn.functional.mse_loss(model(numbers), numbers.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not swarm.step(tokens=len(numbers), loss=loss.item()):
            break
        if number == 1000:
            print(f"others join with: {swarm.invite}")
        if number % 1000 == 0:
            print(f"round {swarm.status.round}, loss {loss.item():.4f}, ready peers: {swarm.status.num_ready}")
