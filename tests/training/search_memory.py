"""A process with little memory: find how many windows of a model fit, by the search and by trying every number.

`recompute` instead: let one window of a deep model not fit, and make a step.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from pathlib import Path

import torch

from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.data import BatchStream, Corpus
from p2p_diloco.app.text.mapped_files import MappedFiles
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.micro_batch import most_windows
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.ids import Digest, PeerId

SHAPES = {
    "wide": ModelShape(layers=1, width=128, heads=2, feed_forward=512, context=32),
    "deep": ModelShape(layers=6, width=64, heads=2, feed_forward=128, context=32),
    "long": ModelShape(layers=1, width=64, heads=2, feed_forward=128, context=128),
    "recompute": ModelShape(layers=16, width=64, heads=2, feed_forward=128, context=1024),
}
WANTED = 96
ROOM = 48 * 1024 * 1024
"""Bytes beyond those of a loop that has made its first step."""


def main(name: str) -> None:
    """Print what the search found and what fits."""
    torch.set_num_threads(1)
    corpus = Corpus(MappedFiles((Path(__file__), Path(torch.__file__))))
    shape = SHAPES[name]
    wanted = 2 if name == "recompute" else WANTED
    stream = BatchStream(corpus, Digest(bytes(32)), PeerId(bytes(32)), batch=wanted, context=shape.context)
    said: list[str] = []
    rule = InnerRule(batch=wanted, optimizer="adamw")
    loop = InnerLoop(build_model(shape, 0), stream, rule, report=said.append)
    loop.windows_at_once = 1
    loop.step()
    gc.collect()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))
    if name == "recompute":
        fits = [loop.try_windows(1)]
        applied = loop.step().applied
        fits.append(loop.try_windows(1))
        print(json.dumps({"fits": fits, "applied": applied, "said": said}))
        return
    search = most_windows(loop.try_windows, WANTED)
    exhaustive = next((number - 1 for number in range(1, WANTED + 1) if not loop.try_windows(number)), WANTED)
    print(json.dumps({"search": search, "exhaustive": exhaustive, "wanted": WANTED}))


if __name__ == "__main__":
    main(sys.argv[1])
