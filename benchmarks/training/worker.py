"""Worker process with one island: `python -m benchmarks.training.worker`; see `benchmarks.worker`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TextIO

from benchmarks import worker
from benchmarks.training.figures import BLOCKING, OURS, OWN_LOOP, TORCHFT

_CLASSES = {
    OURS: ("our_islands", "OurIsland"),
    OWN_LOOP: ("our_islands", "OurIsland"),
    BLOCKING: ("our_islands", "OurIsland"),
    TORCHFT: ("torchft_island", "TorchftIsland"),
}


def make_island(order: Mapping[str, Any]) -> worker.Worker:
    """Return the island that an order asks for. Only the libraries of its system are imported."""
    module, name = _CLASSES[order["system"]]
    made: worker.Worker = getattr(import_module(f"benchmarks.training.{module}"), name)(order)
    return made


def obey(words: TextIO, answers: TextIO) -> None:
    """Execute commands until `end`."""
    worker.obey(words, answers, make_island)


if __name__ == "__main__":
    worker.run(obey)
