"""The inner loop: Muon or AdamW steps on θ, independent of the network.

It is called from the island's training thread. PyTorch releases the GIL inside its kernels, so the event loop of the
same process keeps running. Momentum is kept across merges: a merge moves θ a little, but does not change its direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from p2p_diloco.errors import ConfigError
from p2p_diloco.training.data import BatchStream
from p2p_diloco.training.model import DecoderModel
from p2p_diloco.training.muon import Muon
from p2p_diloco.training.text_model import TextModel, decoder_text_model

OptimizerName = Literal["adamw", "muon"]
Schedule = Literal["constant", "cosine"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerRule:
    """The rule by which an island trains; set by the manifest.

    Attributes:
        optimizer: "muon" for the matrices of the blocks with AdamW for the rest, or "adamw" for everything.
        learning_rate: learning rate of the matrices after warm-up.
        embedding_rate: factor on it for the input embedding, whose rows get a gradient only when their byte occurs.
        weight_decay: decoupled, for matrices only.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        batch: windows per step.
        warmup_steps: steps over which the rate rises linearly, counted from the start of this island's optimiser.
        schedule: "constant", or "cosine" down to `final_share` as the run's progress goes from 0 to 1.
        final_share: share of the rate left at progress 1.
        gradient_clip: maximum norm of the gradient over all tensors.
        precision: precision of the matrix products; parameters are always float32.
    Raises:
        ConfigError: a value is out of range.
    """

    optimizer: OptimizerName = "muon"
    learning_rate: float = 1e-3
    embedding_rate: float = 8.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    batch: int = 4
    warmup_steps: int = 40
    schedule: Schedule = "constant"
    final_share: float = 0.1
    gradient_clip: float = 1.0
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        checks = {
            "optimizer": self.optimizer in ("adamw", "muon"),
            "learning_rate": self.learning_rate > 0.0,
            "embedding_rate": self.embedding_rate > 0.0,
            "weight_decay": self.weight_decay >= 0.0,
            "beta1": 0.0 <= self.beta1 < 1.0,
            "beta2": 0.0 <= self.beta2 < 1.0,
            "batch": self.batch >= 1,
            "warmup_steps": self.warmup_steps >= 0,
            "schedule": self.schedule in ("constant", "cosine"),
            "final_share": 0.0 <= self.final_share <= 1.0,
            "gradient_clip": self.gradient_clip > 0.0,
            "precision": self.precision in ("float32", "bfloat16"),
        }
        for name, is_valid in checks.items():
            if not is_valid:
                raise ConfigError(
                    f"inner {name} is {getattr(self, name)!r}, which is out of range; see the manifest's comments"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStep:
    """The result of one step.

    Attributes:
        loss: loss of the batch before the step, nats per token.
        tokens: number of predicted tokens.
        gradient_norm: norm over all tensors, before clipping.
        learning_rate: learning rate of the matrices.
        applied: False if loss or gradient was not finite; θ and the optimiser are then unchanged.
    """

    loss: float
    tokens: int
    gradient_norm: float
    learning_rate: float
    applied: bool


class InnerLoop:
    """Trains `model` on `stream`. Always call it from the same thread.

    Attributes:
        model: the module with θ, on `device`.
        steps: number of applied steps.
        tokens: number of tokens predicted in them.
    """

    def __init__(
        self,
        model: TextModel | DecoderModel,
        stream: BatchStream,
        rule: InnerRule,
        device: torch.device | str = "cpu",
    ) -> None:
        model = decoder_text_model(model) if isinstance(model, DecoderModel) else model
        if stream.context > model.context:
            raise ConfigError(f"windows have {stream.context} positions; the model takes at most {model.context}")
        self.device = torch.device(device)
        self.model: Any = model.module.to(self.device)
        self._text_model = model
        self.stream = stream
        self.rule = rule
        self.steps = 0
        self.tokens = 0
        self._progress = 0.0
        self._optimizers = _optimizers(self._text_model, rule)
        self._optimizer_steps = 0

    def step(self) -> InnerStep:
        """Train on the next batch."""
        rule = self.rule
        batch = self.stream.next_batch().to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=rule.precision == "bfloat16"):
            loss = self._text_model.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), rule.gradient_clip))
        step = InnerStep(
            loss=float(loss.detach()),
            tokens=batch.shape[0] * (batch.shape[1] - 1),
            gradient_norm=norm,
            learning_rate=self.learning_rate,
            # The norm is finite only if all gradients are; one NaN would destroy θ.
            applied=math.isfinite(norm) and math.isfinite(float(loss.detach())),
        )
        if step.applied:
            self._apply(step)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return step

    def _apply(self, step: InnerStep) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = step.learning_rate * group["rate"]
            optimizer.step()
        self._optimizer_steps += 1
        self.steps += 1
        self.tokens += step.tokens

    @property
    def learning_rate(self) -> float:
        """Learning rate of the matrices in the next step."""
        rule = self.rule
        warmup = min(1.0, (self._optimizer_steps + 1) / max(1, rule.warmup_steps))
        if rule.schedule == "constant":
            return rule.learning_rate * warmup
        cosine = 0.5 * (1.0 + math.cos(math.pi * self._progress))
        return rule.learning_rate * warmup * (rule.final_share + (1.0 - rule.final_share) * cosine)

    def set_progress(self, fraction: float) -> None:
        """Set the progress of the run, clamped to 0 to 1: entries applied over entries planned, not wall time."""
        self._progress = min(1.0, max(0.0, fraction))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restart would lose: the optimisers and the position in the warm-up."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        return {"optimizer_steps": self._optimizer_steps, "optimizers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self._optimizer_steps = state["optimizer_steps"]

    def restart_optimizer(self) -> None:
        """Reset momentum and warm-up; use it after θ was replaced, not merged."""
        self._optimizers = _optimizers(self._text_model, self.rule)
        self._optimizer_steps = 0


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
    """Return what to do about a missing device."""
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
