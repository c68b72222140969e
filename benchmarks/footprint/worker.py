"""Worker process with a whole peer or training alone: `python -m benchmarks.footprint.worker`."""

from __future__ import annotations

from importlib import import_module

from benchmarks import worker

PEER, ALONE = "peer", "training"
_CLASSES = {PEER: ("peer", "SwarmPeer"), ALONE: ("training", "TrainingAlone")}


def make_worker(order: worker.Order) -> worker.Worker:
    """Return the worker that an order asks for. Only the libraries that it needs are imported."""
    module, name = _CLASSES[order["system"]]
    made: worker.Worker = getattr(import_module(f"benchmarks.footprint.{module}"), name)(order)
    return made


if __name__ == "__main__":
    worker.run(lambda words, answers: worker.obey(words, answers, make_worker))
