"""Train in a run with transformers' `Trainer`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

from p2p_diloco.api import AnySettings, OnEvent, Swarm
from p2p_diloco.callbacks.training_swarm import Enter, TrainingSwarm
from p2p_diloco.errors import ConfigError

_REMEDY = "load the model with dtype=torch.float32, and for speed set bf16=True in TrainingArguments"


class SwarmCallback(TrainerCallback):
    """Make a Trainer train in a run: `Trainer(…, callbacks=[SwarmCallback("p2pdiloco://…")])`.

    The peer joins or founds when training begins, and `train` continues once the model holds the run's state. It
    contributes after each optimiser step, with the tokens of all its batches. When the run is over, the Trainer stops.
    When the Trainer stops, the peer leaves.

    After an exception a script leaves when the interpreter ends. In a notebook, use the callback as a context manager
    around `train`, or the peer stays until the next `train`.

    Args:
        run: an invite; the path of a run file, to found its run; or a function that enters a run, such as
            `local.found` of `p2p_diloco.testing.local_swarm`.
        shared: evaluate and save the shared model, and hold it after training. Otherwise this peer's own.
        settings, timeout, until_round, on_event: as for `p2p_diloco.join`.
    Raises:
        ConfigError: `run` is neither an invite nor an existing file.
    """

    def __init__(
        self,
        run: str | Path | Enter,
        *,
        shared: bool = True,
        settings: AnySettings = None,
        timeout: float | None = None,
        until_round: int | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._training = TrainingSwarm(
            run, settings=settings, timeout=timeout, until_round=until_round, on_event=on_event
        )
        self._shared = shared
        self._tokens = 0
        self._loss: float | None = None

    @property
    def swarm(self) -> Swarm:
        """The swarm, from the begin of the training on; afterwards it still has its status, `save` and `export`."""
        return self._training.swarm

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._training.abandon()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_dataloader: DataLoader[Any],
        processing_class: Any = None,
        **_: Any,
    ) -> None:
        """Enter the run, and let this peer draw data of its own: by default all Trainers have the same seed."""
        if args.include_num_input_tokens_seen == "no":
            # Where nothing shows what is padding, "non_padding" counts all tokens too, with a warning for each batch.
            pads = getattr(processing_class, "pad_token_id", None) is not None
            args.include_num_input_tokens_seen = "non_padding" if pads else "all"
        self._training.begin(model, [_without_wrappers(optimizer)], remedy=_REMEDY)
        self._tokens = state.num_input_tokens_seen  # not zero after resuming from a checkpoint
        self._loss = None
        seed = self.swarm.seed
        set_seed(seed % 2**32)
        sampler = get_sampler(train_dataloader)
        if isinstance(sampler, SeedableRandomSampler) and args.data_seed is None:
            sampler.initial_seed = seed

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Train on this peer's own parameters again."""
        self._training.hide_shared()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the step, and stop the Trainer if the run is over."""
        tokens = state.num_input_tokens_seen - self._tokens
        if not tokens:
            raise ConfigError(
                "the Trainer counted no tokens in this step, and a contribution weighs as much as its tokens; set the "
                "model's main_input_name to the name of the input in a batch that holds the tokens"
            )
        self._tokens = state.num_input_tokens_seen
        if not self.swarm.step(tokens, self._loss):
            control.should_training_stop = True
        self._loss = None
        self._show_shared_if_seen(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._show_shared_if_seen(control)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        """Publish the logged loss with the next step."""
        loss = (logs or {}).get("loss")
        self._loss = float(loss) if loss is not None else self._loss

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """Leave the run. If the Trainer has just loaded its best checkpoint, the model keeps that."""
        loaded_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        self._training.end(model, "as it is" if loaded_best else "shared" if self._shared else "own")

    def _show_shared_if_seen(self, control: TrainerControl) -> None:
        """Load the shared state if the Trainer is about to evaluate or save the model."""
        if self._shared and (control.should_evaluate or control.should_save):
            self._training.show_shared()


def _without_wrappers(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser whose steps count: accelerate's wrapper has no hooks of its own."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
