"""An own loop whose steps have a fixed length and learn real text: the next byte of Python's standard library.

`new FOLDER` writes the run file and the tensors that it starts from; `join INVITE FOLDER` trains until it is
interrupted. Every few seconds a line of JSON tells the held-out loss of the shared copy. A step computes for a few
milliseconds and then waits, so that four loops leave two cores idle.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import p2p_diloco
from p2p_diloco.storage.corpus_files import list_corpus_files

CONTEXT, WIDTH, HIDDEN, BATCH = 12, 64, 1024, 48
"""A network of 2.1 million parameters that sees twelve bytes."""
TEXT_BYTES, HELD_OUT_BYTES, CHECKED = 8_000_000, 200_000, 4096
LEARNING_RATE = 1e-3
REPORT_SECONDS = 20.0
START_FILE = "start.safetensors"


def make_model() -> nn.Module:
    """Return the network, untrained."""
    return nn.Sequential(
        nn.Embedding(256, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.GELU(),
        nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 256),
    )  # fmt: skip


def read_text() -> Tensor:
    """Return the first bytes of the standard library's source."""
    text = b""
    for path in list_corpus_files(None):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)


def draw(text: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return contexts and the bytes that follow them."""
    windows = text[places[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :CONTEXT], windows[:, CONTEXT]


def train(invite: str, folder: str, step_seconds: float, port: int | None) -> None:
    """Train with others until this process is interrupted."""
    torch.set_num_threads(1)
    text = read_text()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    settings = {"state_directory": folder} | ({} if port is None else {"port": port})
    last_place = len(text) - CONTEXT - 1
    held_out = draw(text, torch.linspace(last_place - HELD_OUT_BYTES, last_place, CHECKED).long())
    with suppress(KeyboardInterrupt), p2p_diloco.join(invite, model, optimizer, settings=settings) as swarm:
        random = torch.Generator().manual_seed(swarm.seed)
        due = time.monotonic()
        report_at = due
        while True:
            contexts, targets = draw(text, torch.randint(last_place - HELD_OUT_BYTES, (BATCH,), generator=random))
            loss = nn.functional.cross_entropy(model(contexts), targets)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            due = max(due + step_seconds, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))
            if not swarm.step(tokens=BATCH, loss=loss.item()):
                break
            if time.monotonic() >= report_at:
                report_at += REPORT_SECONDS
                with swarm.anchor(), torch.no_grad():
                    value = nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item()
                print(json.dumps({"time": time.time(), "loss": value}), flush=True)


def main() -> None:
    """Write a run file, or train."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("new", "join"))
    parser.add_argument("where", nargs="+")
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--uplink", default="10mbit")
    parser.add_argument("--round-seconds", type=float)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.what == "join":
        invite, folder = options.where
        train(invite, folder, options.step_seconds, options.port)
        return
    path = Path(options.where[0]) / "run.toml"
    model = make_model()
    save_file(model.state_dict(), path.with_name(START_FILE))
    values: dict[str, Any] = {"step_seconds": options.step_seconds, "islands": options.islands}
    if options.round_seconds is not None:
        values["rounds"] = {"round_seconds": options.round_seconds, "fragments": 1}
    p2p_diloco.new_run(path, model, uplink=options.uplink, **values)


if __name__ == "__main__":
    main()
