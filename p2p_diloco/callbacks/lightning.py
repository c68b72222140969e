"""Train in a run with Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from p2p_diloco.api import AnySettings, OnEvent, Swarm
from p2p_diloco.callbacks.training_swarm import Enter, TrainingSwarm
from p2p_diloco.errors import ConfigError

_REMEDY = 'build the module in float32, and for speed set precision="bf16-mixed" in the Trainer'


class SwarmCallback(Callback):
    """Make Lightning train in a run: `Trainer(…, callbacks=[SwarmCallback("p2pdiloco://…")])`.

    The peer joins or founds when training begins, and `fit` continues once the module holds the run's state. It
    contributes after each optimiser step, with the tokens of all its batches. When the run is over, the Trainer stops.
    When the Trainer stops, or after an exception, the peer leaves.

    Args:
        run: an invite; the path of a run file, to found its run; or a function that enters a run, such as
            `local.found` of `p2p_diloco.testing.local_swarm`.
        tokens: counts the tokens of a batch; by default the elements of `input_ids`, or of the first tensor.
        shared: validate and save the shared model, and hold it after training. Otherwise this peer's own.
        settings, timeout, until_round, on_event: as for `p2p_diloco.join`.
    Raises:
        ConfigError: `run` is neither an invite nor an existing file.
    """

    def __init__(
        self,
        run: str | Path | Enter,
        *,
        tokens: Callable[[Any], int] | None = None,
        shared: bool = True,
        settings: AnySettings = None,
        timeout: float | None = None,
        until_round: int | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._training = TrainingSwarm(
            run, settings=settings, timeout=timeout, until_round=until_round, on_event=on_event
        )
        self._count = tokens if tokens is not None else count_tokens
        self._shared = shared
        self._tokens = 0
        self._step = 0
        self._trains = False

    @property
    def swarm(self) -> Swarm:
        """The swarm, from the begin of the training on; afterwards it still has its status, `save` and `export`."""
        return self._training.swarm

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the run, and let this peer draw data of its own, in case all use the same seed."""
        self._training.begin(pl_module, trainer.optimizers, remedy=_REMEDY)
        torch.manual_seed(self.swarm.seed)
        self._tokens, self._step, self._trains = 0, trainer.global_step, True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and after an optimiser step the step; stop the Trainer if the run is over."""
        self._tokens += self._count(batch)
        if trainer.global_step == self._step:
            return  # gradients are accumulated
        self._step = trainer.global_step
        if not self.swarm.step(self._tokens, _logged_loss(trainer, outputs)):
            trainer.should_stop = True
        self._tokens = 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._trains and self._shared:
            self._training.show_shared()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train on this peer's own parameters again."""
        self._training.hide_shared()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._trains and self._shared:
            with self.swarm.anchor():
                state = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {name: value.clone() for name, value in state.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trains = False
        self._training.end(pl_module, "shared" if self._shared else "own")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._trains = False
        self._training.abandon()


def count_tokens(batch: Any) -> int:
    """Return the number of elements of `input_ids`, or else of the first tensor in a batch.

    Raises:
        ConfigError: the batch holds no tensor.
    """
    found = _first_tensor(batch)
    if found is None:
        raise ConfigError(
            f"a batch of type {type(batch).__name__} holds no tensor whose elements are tokens; count them with "
            "SwarmCallback(…, tokens=lambda batch: …)"
        )
    return found.numel()


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        parts = [batch["input_ids"]] if "input_ids" in batch else list(batch.values())
    else:
        parts = list(batch) if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else []
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)


def _logged_loss(trainer: Trainer, outputs: Any) -> float | None:
    """Return the loss at steps that Lightning logs; reading it in each step would make a GPU wait."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor) or trainer.global_step % trainer.log_every_n_steps:
        return None
    batches: int = trainer.accumulate_grad_batches
    return float(loss) * batches  # Lightning has divided it
