"""The rule of inner steps that a manifest sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.errors import ConfigError

OptimizerName = Literal["adamw", "muon"]
Schedule = Literal["constant", "cosine"]
AgreedPrecision = Literal["float32", "bfloat16"]


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
        batch: planned windows per step; an island may choose others, see `island/batch_size.py`.
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
    precision: AgreedPrecision = "float32"

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


def windows_of_step(step_tokens: int, context: int) -> int:
    """Return how many windows of `context` tokens make up a step of that many predicted tokens.

    Raises:
        ConfigError: they are no whole number of windows, or less than one.
    """
    if step_tokens % context:
        nearest = max(1, round(step_tokens / context)) * context
        raise ConfigError(
            f"inner.step_tokens is {step_tokens}, which is no multiple of the context of {context} tokens; "
            f"the nearest one is {nearest}"
        )
    return step_tokens // context


def inner_rule(manifest: RunManifest) -> InnerRule:
    """Return the rule of inner steps. Own loops make steps of their own, so their windows do not matter.

    Raises:
        ConfigError: a step is no whole number of windows.
    """
    values = manifest.inner.model_dump()
    step_tokens, window_tokens = values.pop("step_tokens"), manifest.model.window_tokens
    if manifest.model.is_own_loop or window_tokens is None:
        return InnerRule(**values)
    return InnerRule(**values, batch=windows_of_step(step_tokens, window_tokens))
