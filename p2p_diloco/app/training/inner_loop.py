"""The inner loop: Muon or AdamW steps on θ, independent of the network.

It is called from the island's training thread. PyTorch releases the GIL inside its kernels, so the event loop of the
same process keeps running. Momentum is kept across merges: a merge moves θ a little, but does not change its direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.app.models.model import DecoderModel
from p2p_diloco.app.models.text_model import TextModel, decoder_text_model
from p2p_diloco.app.text.data import Batches
from p2p_diloco.app.training.micro_batch import Recompute, free_unused, is_out_of_memory, recompute_blocks
from p2p_diloco.app.training.muon import Muon
from p2p_diloco.app.training.precision import Precision, choose_precision
from p2p_diloco.app.training.rank_steps import RankSteps
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.island.parameters import Buffers, first_not_finite, trained
from p2p_diloco.island.shards import local_part, whole_tensor
from p2p_diloco.rate import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: loss of the batch before the step, nats per token.
        tokens: number of predicted tokens, by all ranks.
        gradient_norm: norm over all tensors, before clipping.
        learning_rate: learning rate of the matrices.
        applied: False if loss or gradient was not finite; θ and the optimiser are then unchanged.
        broken: name of the first tensor of θ that is not finite after the step; empty if all are.
    """

    loss: float
    tokens: int
    gradient_norm: float
    learning_rate: float
    applied: bool
    broken: str = ""


class InnerLoop:
    """Trains `model` on `stream`. Always call it from the same thread.

    Attributes:
        model: the module with θ, on `device`.
        precision: precision of the matrix products.
        windows_at_once: windows that pass through the model at a time; a step adds the gradients of several parts.
        recomputes: whether activations are recomputed in the backward pass.
        steps: number of applied steps.
        tokens: number of tokens predicted in them.
    """

    def __init__(
        self,
        model: TextModel | DecoderModel,
        stream: Batches,
        rule: InnerRule,
        device: torch.device | str = "cpu",
        *,
        precision: Precision | None = None,
        recompute: Recompute = "auto",
        report: Callable[[str], None] = lambda text: None,
        ranks: RankSteps | None = None,
    ) -> None:
        """Put the model on the device and create its optimisers.

        Args:
            precision: precision of the matrix products; None: chosen by the rule and the device.
            recompute: when activations are recomputed; several ranks do so from the start or never.
            report: called with a sentence when memory has run out, with what changes.
            ranks: the ranks that make each step together, each with its part of the batch; None: only this process.
        Raises:
            ConfigError: the windows are longer than the model allows, the ranks cannot share the batch, or there are
                no blocks to recompute.
        """
        model = decoder_text_model(model) if isinstance(model, DecoderModel) else model
        if stream.context > model.context:
            raise ConfigError(f"windows have {stream.context} positions; the model takes at most {model.context}")
        self.device = torch.device(device)
        # A sharded model is moved block by block, because no device may have room for all of it.
        is_sharded = ranks is not None and ranks.has_shards
        self.model: Any = model.module if is_sharded else model.module.to(self.device)
        self._ranks = ranks
        self._recompute = recompute
        self.recomputes = recompute == "always" and recompute_blocks(self.model)
        if recompute == "always" and not self.recomputes:
            raise ConfigError(
                "the model has no blocks in an nn.ModuleList, whose activations could be recomputed; leave --recompute "
                "out"
            )
        self._loss: Callable[[Tensor], Tensor] = partial(model.loss, self.model)
        if ranks is not None:
            ranks.check_batch(stream.batch)
            self._loss = ranks.wrap(model, self.device)
        self._trained = trained(model.module)  # taken while no shard is gathered
        self._buffers = Buffers(model.module)
        self.stream = stream
        self.rule = rule
        self.windows_at_once = stream.batch
        self.steps = 0
        self.tokens = 0
        self.precision = precision or choose_precision(rule.precision, "auto", self.device)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision.scales)
        self._report = report
        self._progress = 0.0
        self.optimizers = _optimizers(model, rule)
        self._optimizer_steps = 0

    def call_before_update(self, call: Callable[[], None]) -> None:
        """Call this before each change of the parameters."""
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: call())

    def step(self) -> StepResult:
        """Train on the next batch.

        Raises:
            StateError: there is not enough memory for a single window.
        """
        batch = self.stream.next_batch()
        loss = self._gradients(batch)
        for optimizer in self.optimizers:
            self._scaler.unscale_(optimizer)
        norm = float(whole_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), self.rule.gradient_clip)))
        if self._ranks is not None:
            loss = self._ranks.mean(loss)
        step = StepResult(
            loss=loss,
            tokens=self.stream.batch * (batch.shape[1] - 1),
            gradient_norm=norm,
            learning_rate=self.learning_rate,
            # The norm is finite only if all gradients are; one NaN would destroy θ.
            applied=math.isfinite(norm) and math.isfinite(loss),
        )
        if step.applied:
            self._apply(step)
        step = replace(step, broken=self._first_not_finite())
        self._adjust_scale(step)
        self._drop_gradients()
        return step

    def _first_not_finite(self) -> str:
        """Return the name of the first tensor of θ that is not finite, of all ranks; empty if there is none."""
        local = {name: local_part(tensor) for name, tensor in self._trained.items()}
        broken = first_not_finite(local | self._buffers.floats())
        if self._ranks is not None and self._ranks.has_shards and not self._ranks.least(int(not broken)):
            return broken or "a shard of another rank"
        return broken

    def _adjust_scale(self, step: StepResult) -> None:
        scaler = self._scaler
        if self._ranks is None or step.applied:
            scaler.update()
        elif self.precision.scales:  # of shards, some ranks may have found nothing infinite; all need the same scale
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        if self.precision.scales and scaler.get_scale() < 1.0:
            scaler.update(1.0)  # it would halve until it is zero, and stay there

    def use_windows(self, windows: int) -> None:
        """Let so many windows pass through the model at a time."""
        self.windows_at_once = windows

    def try_windows(self, windows: int) -> bool:
        """Return whether that many windows fit into memory, with gradients; parameters are not changed.

        Call it after the first step, which allocates the optimisers' moments.
        """
        context = self.stream.context
        try:
            self._backward(torch.zeros((windows, context + 1), dtype=torch.int64), 1.0, is_last=False)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self._drop_gradients()
            free_unused(self.device)
        return True

    def _gradients(self, batch: Tensor) -> float:
        """Compute the gradients of a batch and return its loss; after running out of memory, in smaller parts."""
        count = self._ranks.count if self._ranks is not None else 1
        while True:
            loss = 0.0
            parts = torch.split(batch, self.windows_at_once)
            try:
                for number, part in enumerate(parts, 1):
                    # The mean over the ranks is then that over the island's batch.
                    share = len(part) * count / self.stream.batch
                    loss += self._backward(part, share, is_last=number == len(parts))
                return loss
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self._ranks is not None:  # the others wait for gradients that this rank cannot compute any more
                    raise StateError(self._remedy_of_ranks(len(parts[0]))) from None
                self._drop_gradients()
            # Outside the handler, whose traceback keeps the tensors of the failed step alive.
            free_unused(self.device)
            self._halve()

    def _backward(self, part: Tensor, share: float, *, is_last: bool) -> float:
        """Add the gradients of a part of a batch, and after the last part those of other ranks; return its loss."""
        dtype, windows = self.precision.dtype, part.to(self.device, non_blocking=True)
        with self._collecting(is_last):
            with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                loss = self._loss(windows)
            if share != 1.0:
                loss = loss * share
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _collecting(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None or is_last else self._ranks.without_exchange()

    def _halve(self) -> None:
        before = min(self.windows_at_once, self.stream.batch)
        if before == 1 and self.start_recomputing():
            return
        if before == 1:
            raise StateError(
                f"not enough memory on {self.device} for one window of {self.stream.context} tokens; free memory "
                "there, train on another --device, or join a run with a smaller model or context"
            )
        self.windows_at_once = before // 2
        self._report(
            f"out of memory on {self.device} with {before} windows at a time; using {self.windows_at_once}, "
            "with the same gradients"
        )

    def start_recomputing(self) -> bool:
        """Recompute activations from now on, and report it; return False if that is not possible or already so."""
        if self._recompute != "auto" or self.recomputes or not recompute_blocks(self.model):
            return False
        self.recomputes = True
        self._report(
            f"out of memory on {self.device} with one window at a time; recomputing activations in the backward pass, "
            "with the same gradients and about a third more work"
        )
        return True

    def _remedy_of_ranks(self, windows: int) -> str:
        trouble = f"out of memory on {self.device} with {counted(windows, 'window')} at a time"
        if windows > 1:
            return f"{trouble}; start all ranks again with --windows-at-once {windows // 2}"
        if not self.recomputes:
            return f"{trouble}; start all ranks again with --recompute always"
        return f"{trouble}; start more ranks with --shards always, or join a run with a smaller model or context"

    def _drop_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _apply(self, step: StepResult) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = step.learning_rate * group["rate"]
            self._scaler.step(optimizer)
        self._optimizer_steps += 1
        self.steps += 1
        self.tokens += step.tokens

    @property
    def learning_rate(self) -> float:
        """Learning rate of the matrices in the next step."""
        rule = self.rule
        warmup = min(1.0, (self._optimizer_steps + 1) / max(1, rule.warmup_steps))
        rate = rule.learning_rate * (math.sqrt(self.stream.batch / rule.batch) if rule.batch_rate == "root" else 1.0)
        if rule.schedule == "constant":
            return rate * warmup
        cosine = 0.5 * (1.0 + math.cos(math.pi * self._progress))
        return rate * warmup * (rule.final_share + (1.0 - rule.final_share) * cosine)

    def set_progress(self, fraction: float) -> None:
        """Set the progress of the run, clamped to 0 to 1: entries applied over entries planned, not wall time."""
        self._progress = min(1.0, max(0.0, fraction))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimisers, so that their state is saved and checked like that of one."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def clear_state(self) -> None:
        """Begin anew, with the warm-up too: the moments may hold what made θ not finite."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self._optimizer_steps = 0
        self._buffers.clear_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restart would lose: optimisers, position in the warm-up, and buffers."""
        states, groups, first = {}, [], 0
        for optimizer in self.optimizers:
            kept = optimizer.state_dict()
            states.update({first + at: state for at, state in kept["state"].items()})
            groups.append(kept["param_groups"])
            first += sum(len(group["params"]) for group in optimizer.param_groups)
        steps, buffers = self._optimizer_steps, self._buffers.state_dict()
        return {"optimizer_steps": steps, "groups": groups, "state": states, "buffers": buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        first = 0
        for optimizer, groups in zip(self.optimizers, state["groups"], strict=True):
            stop = first + sum(len(group["params"]) for group in optimizer.param_groups)
            own = {at - first: kept for at, kept in state["state"].items() if first <= at < stop}
            optimizer.load_state_dict({"state": own, "param_groups": groups})
            first = stop
        self._optimizer_steps = state["optimizer_steps"]
        if "buffers" in state:  # versions before did not save them
            self._buffers.load_state_dict(state["buffers"])


def choose_device(name: str = "auto") -> torch.device:
    """Return the device called `name`: cpu, cuda, cuda:N, mps, or auto for the fastest available.

    Raises:
        ConfigError: the device is not available.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, is_present in present.items() if is_present))
    kind, _, index = name.partition(":")
    if kind not in present or (index and not index.isdecimal()):
        raise ConfigError(f"unknown device {name!r}; expected auto, cpu, cuda, cuda:N or mps")
    if not present[kind] or (kind == "cuda" and index and int(index) >= torch.cuda.device_count()):
        found = ", ".join(other for other, is_present in present.items() if is_present)
        raise ConfigError(
            f"device {name!r} is not available; PyTorch {torch.__version__} found: {found}; "
            f"{_remedy(kind, present[kind])}"
        )
    return torch.device(name)


def _remedy(kind: str, is_present: bool) -> str:
    if kind == "mps":
        return "mps needs a Mac with Apple silicon and a PyTorch build for it; leave --device out"
    if is_present:
        return f"the last one is cuda:{torch.cuda.device_count() - 1}"
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            "this build is CPU-only; install one for your GPU (pytorch.org/get-started/locally), or leave --device out"
        )
    return "this build supports GPUs but finds none; is the driver installed (check with nvidia-smi or rocminfo)?"


def _optimizers(model: TextModel, rule: InnerRule) -> list[torch.optim.Optimizer]:
    """Return new optimisers. Gains have no weight decay, nor has the embedding, whose rare rows would only shrink.

    Muon trains the matrices between embedding and head.
    """
    roles = model.roles()
    is_muon = rule.optimizer == "muon"
    groups = [
        {
            "params": roles.others if is_muon else [*roles.matrices, *roles.others],
            "weight_decay": rule.weight_decay,
            "rate": 1.0,
        },
        {"params": roles.embedding, "weight_decay": 0.0, "rate": rule.embedding_rate},
        {"params": roles.vectors, "weight_decay": 0.0, "rate": 1.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if groups := [group for group in groups if group["params"]]:
        betas = (rule.beta1, rule.beta2)
        optimizers.append(torch.optim.AdamW(groups, lr=rule.learning_rate, betas=betas, fused=True))
    if is_muon and roles.matrices:
        matrices = [{"params": roles.matrices, "rate": 1.0}]
        optimizers.append(Muon(matrices, learning_rate=rule.learning_rate, weight_decay=rule.weight_decay))
    return optimizers
