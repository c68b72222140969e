"""Training without a swarm: the same model, text, steps and evaluation of the held-out loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from p2p_diloco.app.models.evaluation import held_out_loss
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.run_text import open_run_text, open_stream
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.ids import PeerId, sha256


class TrainingAlone:
    """One island without a swarm. This module imports what training needs, and nothing that a swarm needs."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        manifest = decode_signed_manifest(bytes.fromhex(order["manifest"])).manifest
        self._plan = plan_run(manifest)
        self._corpus = open_run_text(manifest.data, None)
        stream = open_stream(self._corpus, self._plan, PeerId(sha256(b"alone")), 1)
        self._loop = InnerLoop(build_model(self._plan.shape, manifest.model.seed), stream, self._plan.inner)

    def train(self, steps: int) -> dict[str, Any]:
        """Make some steps, and return how many have been made so far."""
        for _ in range(steps):
            self._loop.step()
        return {"steps": self._loop.steps}

    def evaluate(self) -> None:
        """Compute the held-out loss with the training model."""
        held_out_loss(self._loop.model, self._corpus)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
