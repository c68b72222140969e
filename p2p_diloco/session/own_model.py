"""Train a user's own model in the user's own loop: check the model and optimisers, and count steps."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.config.manifest import ModelSection, RunManifest
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import sha256
from p2p_diloco.island.batch_size import BatchAdvice
from p2p_diloco.island.inner_state import InnerState, Stateful
from p2p_diloco.island.island import Island, RankInner, RankModels, described, plan_text
from p2p_diloco.island.local_spans import describe_device, spans_for
from p2p_diloco.island.parameters import (
    Buffers,
    LocalParameters,
    first_not_finite,
    is_embedding,
    is_head,
    plain_name,
    trained,
)
from p2p_diloco.island.rank_parameters import RankParameters, gather_tensor
from p2p_diloco.island.ranks import Ranks
from p2p_diloco.island.shards import is_sharded, local_part, reshard, why_unsupported
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.session.training import Training, TrainingHost

OWN_COPIES = ("schedulefree", "zero_redundancy_optimizer", "deepspeed", "apex")
"""Modules of optimisers that keep a copy of θ and write it back to the model, which would undo a merge."""

SAMPLED, PROBED_MERGES, LOST_SHARE = 4096, 4, 0.25
"""Sampled elements of the first tensor; number of merges to check; a merge counts as undone if less than this share
of it remains."""
CLEAR_STEPS = 4.0
"""A merge is checked only if it is this many times as long as a step: a longer step could reverse it by itself."""

LONGEST_STEP_SECONDS = 30.0
"""Without a step for this long, the peer counts as not stepping: it follows and serves, but contributes nothing."""

_META = "is on the meta device and has no values; materialise the model before it joins"

_taking_part: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def describe_model(model: nn.Module, ignore: Sequence[str] = (), ranks: Ranks | None = None) -> dict[str, Any]:
    """Return the manifest's description of a model: its trained tensors, and a digest of the rest of its state.

    Embeddings, tensors tied to them and the output head use the plain mean, all others the radial mean: a given row is
    rare, and most islands have no update for it.

    Args:
        ignore: names of frozen tensors or buffers that may differ between peers.
        ranks: the ranks of this island, which all call this; the description on rank 0 is that of the whole model.
    Raises:
        ConfigError: a tensor cannot be trained in a run.
    """
    rows = [(name, tuple(tensor.shape), _mean_of(model, tensor)) for name, tensor in checked(model).items()]
    return {
        "tensors": [[name, list(shape), mean] for name, shape, mean in rows],
        "rest": _digest(_parts_of_rest(model, ignore, ranks)),
        "ignored": list(ignore),
    }


def checked(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained tensors by name.

    Raises:
        ConfigError: there is none, or one cannot be trained in a run; the text names it and the remedy.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "the model is sharded by FSDP version 1 (FullyShardedDataParallel), which is not supported; shard it with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    tensors = trained(model)
    if not tensors:
        raise ConfigError("the model has no parameter that requires a gradient, so there is nothing to train")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise ConfigError(f"{plain_name(name)} {_META}")
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        raise ConfigError(f"parameters are on {' and '.join(devices)}; put all trained parameters on one device")
    for name, tensor in tensors.items():
        wrong = why_unsupported(tensor, num_ranks()) or _what_is_wrong(local_part(tensor))
        if wrong:
            raise ConfigError(f"parameter {name} {wrong}")
    return tensors


def check_model(model: nn.Module, said: ModelSection) -> None:
    """Check that a model matches the run's.

    Raises:
        ConfigError: it differs; the text names the first tensor that does.
    """
    _check_shapes(_shapes_of(checked(model)), said)
    _check_rest(_parts_of_rest(model, said.ignored), said)


def check_description(described: Mapping[str, Any], said: ModelSection) -> None:
    """Check that what `describe_model` returned matches a run that is to be continued.

    Frozen tensors and buffers may differ if other ones are ignored than in that run, which nobody does by mistake.

    Raises:
        ConfigError: it differs; the text names the first trained tensor that does.
    """
    _check_shapes({name: tuple(shape) for name, shape, _ in described["tensors"]}, said)
    if described["rest"] != said.rest and tuple(described["ignored"]) == said.ignored:
        raise ConfigError(
            "frozen parameters or buffers of this model differ from those of the run that it continues; load the same "
            "ones, or list those that may differ from now on in ignore"
        )


def _shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_shapes(own: Mapping[str, tuple[int, ...]], said: ModelSection) -> None:
    agreed = {name: tuple(shape) for name, shape, _ in said.tensors}
    for name, shape in agreed.items():
        if name not in own:
            raise ConfigError(f"the run trains a tensor {name} of shape {shape}, which this model lacks; {_SAME_MODEL}")
        if own[name] != shape:
            raise ConfigError(f"tensor {name} has shape {own[name]} here and {shape} in the run; {_SAME_MODEL}")
    extra = next((name for name in own if name not in agreed), None)
    if extra is not None:
        raise ConfigError(f"this model trains {extra} of shape {own[extra]}, which the run does not; {_SAME_MODEL}")


def _check_rest(parts: Mapping[str, bytes], said: ModelSection) -> None:
    if _digest({name: part for name, part in parts.items() if name not in said.ignored}) != said.rest:
        raise ConfigError(
            "frozen parameters or buffers of this model differ from those of the run; load the same base model, or "
            "list those that may differ as ignored when you create the run"
        )


_SAME_MODEL = "build the same model as the organiser"


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Check that no optimiser overwrites merges, and that they train the model.

    Raises:
        ConfigError: an optimiser keeps a copy of θ, or none has one of its tensors.
    """
    for optimizer in optimizers:
        kind = type(optimizer)
        if any(word in kind.__module__.lower() for word in OWN_COPIES):
            raise ConfigError(
                f"{kind.__name__} keeps a copy of the parameters and would undo every merge; use an optimiser that "
                "works on the model's own tensors, such as torch.optim.AdamW"
            )
    held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in held]
    if optimizers and missing:
        raise ConfigError(
            f"no optimiser has parameter {missing[0]} ({len(missing)} of {len(tensors)} are missing), so it would "
            "never change; make the optimiser from the parameters of this model, or freeze others with "
            "requires_grad_(False) before new_run"
        )


def _check_kept(kept: object) -> None:
    """Check that all objects have a state.

    Raises:
        ConfigError: one has not.
    """
    named = kept if isinstance(kept, Mapping) else {"state": kept}
    for name, each in named.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(
                f"{name} is of type {type(each).__name__}, without state_dict and load_state_dict; pass objects that "
                'have both, by name: state={"schedule": scheduler}'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Some elements of θ before and after a merge."""

    before: Tensor
    after: Tensor


class OwnModel(Training):
    """A model that the user's own loop trains.

    Args:
        optimizers: the optimisers whose steps are counted; if empty, every call of `stepped` is a step.
        kept: other objects whose state is restored after a restart, by name; optimisers always are.
        island: the ranks that train the model together; None: this process alone.
    Raises:
        ConfigError: the model or an optimiser is not supported, or is already in a run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        kept: Mapping[str, Stateful] | None = None,
        island: Island | None = None,
    ) -> None:
        super().__init__()
        if island is not None:
            reshard(model)
        self._tensors = checked(model)
        check_optimizers(optimizers, self._tensors)
        _check_kept(kept or {})
        if model in _taking_part:
            raise ConfigError("this model is already in a run; leave that run first, or join with another model")
        _taking_part.add(model)
        self.model: nn.Module = model
        self.island = island
        self._models = None if island is None else RankModels(island.ranks)
        self._counts = bool(optimizers)
        self._steps = 0
        self._kept = {f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)} | dict(
            kept or {}
        )
        self._buffers = Buffers(model)
        if self._buffers.tensors():
            self._kept["the buffers"] = self._buffers
        self._hooks = [optimizer.register_step_post_hook(self._count) for optimizer in optimizers]
        self._advice: BatchAdvice | None = None
        self._rested_at: float | None = None
        self._waiting_tokens = 0
        self._thread: int | None = None
        self._probe: _Probe | None = None
        self._probes_left = PROBED_MERGES
        self._last: Tensor | None = None
        self._step: Tensor | None = None

    def check(self, settings: PeerSettings, manifest: RunManifest | None) -> None:
        """Refuse a run that trains another model."""
        if manifest is None:
            return
        if manifest.model.tensors:
            if self._models is None:
                check_model(self.model, manifest.model)
            else:
                _check_shapes(_shapes_of(self._tensors), manifest.model)
                _check_rest(self._models.rest(manifest.model.ignored), manifest.model)
        elif sorted(self._tensors) != sorted(plan_run(manifest).shapes):
            raise ConfigError(f'"{manifest.name}" trains the built-in decoder; join it with: p2p-diloco join')

    def open(self, host: TrainingHost) -> TrainedState:
        plan = host.plan
        buffers, self._continued_buffers = self._continued_buffers, {}  # once: later, those in training count
        self._buffers.begin_with(buffers)
        parameters: LocalParameters
        inner: InnerState
        if self.island is None:
            parameters = LocalParameters(self.model, plan.fragments)
            inner = InnerState(host.folder, self._kept)
        else:
            ranks = self.island.ranks
            ranks.announce(plan_text(plan.fragments, host.folder.name))
            parameters = RankParameters(self.model, self._tensors, plan.fragments, ranks)
            inner = RankInner(ranks, host.folder, self._kept)
        device = next(iter(self._tensors.values())).device
        local = spans_for(plan, parameters, device)
        if device.type != "cpu":
            host.report_soon("device", describe_device(device, local))
        self.state = TrainedState(host, local, inner=inner)
        if (planned_steps := plan.manifest.rounds.planned_steps) is not None:
            self._advice = BatchAdvice(planned_steps=planned_steps, cycle_seconds=plan.rules.cycle_seconds)
        return self.state

    @property
    def batch_scale(self) -> float:
        """The multiple of the loop's first batch with which a cycle has about the planned steps."""
        return self._advice.scale if self._advice is not None else 1.0

    def seconds_to_rest(self) -> float:
        """Return the pause after the step that has just ended, to keep to the share of the time."""
        if self._rested_at is None:
            return 0.0
        return self.pace.rest_seconds(min(time.monotonic() - self._rested_at, LONGEST_STEP_SECONDS))

    def note_rest(self) -> None:
        self._rested_at = time.monotonic()

    def is_stepping(self) -> bool:
        """Return whether a step was made recently; a user's loop may stop at any time."""
        return self.state is None or self.state.meter.seconds_since_step() <= LONGEST_STEP_SECONDS

    def border(self) -> None:
        """Apply pending updates to the model, and contribute if a round asks for it.

        Raises:
            ConfigError: the optimiser has undone a merge.
        """
        assert self.state is not None, "open it first"
        if self.island is not None and self.state.has_work:
            self.island.check_replicas()
        if not self._probes_left:
            self.state.border()
            return
        before = self._sample()
        had_work = self.state.has_work
        self.state.border()
        self._last = self._sample() if had_work else before
        if had_work and not torch.equal(before, self._last):
            first = self._probe.before if self._probe is not None else before
            self._probe = _Probe(before=first, after=self._last)

    def _sample(self) -> Tensor:
        tensor = next(iter(self._tensors.values()))
        return local_part(tensor).flatten()[:SAMPLED].clone()

    def _check_probe(self) -> None:
        """Check that the step after a merge started from the merged parameters, not from the old ones."""
        probe, self._probe = self._probe, None
        if self._last is None or not self._probes_left:
            return
        now = self._sample()
        if probe is None:
            self._step = now - self._last
            return
        moved = _length(probe.after - probe.before)
        if self._step is None or moved < CLEAR_STEPS * _length(self._step):
            return
        self._probes_left -= 1
        if _length(now - probe.before) < LOST_SHARE * moved and _length(now - probe.after) > (1 - LOST_SHARE) * moved:
            raise ConfigError(
                "the optimiser overwrote a merge with its own copy of the parameters, so this model would learn "
                "nothing from others; use one that works on the model's own tensors, such as torch.optim.AdamW"
            )

    def meet_ranks(self, state_directory: Path) -> None:
        """Check that the ranks of this island have the same model, if there are ranks; all of them call this.

        Args:
            state_directory: where this rank saves the state of its optimisers.
        Raises:
            ConfigError: they have not; the text names the rank and the first tensor that differs.
        """
        if self.island is None or self._models is None:
            return
        self.island.attach(self.model, self._tensors, self._kept, state_directory)
        with self.island.together():
            self._models.compare_tables(self._tensors, _rest(self.model, ()))
        with self.island.together():
            self._models.compare_values(self._tensors, _parts_of_rest(self.model, (), self.island.ranks))

    def close(self, *, saves: bool = True) -> None:
        """Save the optimisers' state, and detach from the model and the optimisers.

        Nothing is saved if called from a thread other than the training thread: a step may be in progress.

        Args:
            saves: False if the other ranks of this island do not take part.
        """
        if saves and self.state is not None and self._thread == threading.get_ident():
            self._thread = None
            self.state.save_inner()
        _taking_part.discard(self.model)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors of the model's `state_dict`; none share memory."""
        if self.island is not None:
            return {plain_name(name): tensor for name, tensor in self.island.whole_tensors(self.model).items()}
        named = self.model.state_dict().items()
        return {
            plain_name(name): tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in named
            if isinstance(tensor, Tensor)
        }

    def first_not_finite(self) -> str:
        """Return the name of the first tensor of this rank that the last step left not finite; empty if all are."""
        if self._counts and not self._steps:
            return ""
        return first_not_finite({name: local_part(tensor) for name, tensor in self._floats().items()})

    def _floats(self) -> dict[str, Tensor]:
        return {**self._tensors, **self._buffers.floats()}

    def number_of(self, name: str) -> int:
        """Return the number of a tensor, which is the same on all ranks, from 1 on; 0 for an empty name."""
        return list(self._floats()).index(name) + 1 if name else 0

    def name_of(self, number: int) -> str:
        """Return the name of a tensor by its number; an empty name for 0."""
        return list(self._floats())[number - 1] if number else ""

    def stepped(self, tokens: int, loss: float | None, broken: str = "") -> None:
        """Count tokens, and a step if the optimiser has made one since the last call.

        Args:
            broken: name of the first tensor that the step left not finite, on any rank; the next border undoes it.
        """
        assert self.state is not None, "open it first"
        self._waiting_tokens += tokens
        if self._counts and not self._steps:
            return  # gradients are accumulated, or a GradScaler skipped the step
        self._thread = threading.get_ident()
        if broken:
            self.state.undo(broken, loss)
        else:
            self._check_probe()
            if self._advice is not None:
                self._advice.stepped(self._waiting_tokens, self.state.meter.seconds_since_step())
            self.state.meter.stepped(self._waiting_tokens, loss)
        self._waiting_tokens = self._steps = 0

    def _count(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # A GradScaler calls a fused optimiser even if gradients are infinite; its kernel then changes nothing.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            self._steps += 1


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


def num_ranks() -> int:
    """Return the number of ranks of the default process group; 1 without one."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_there else 1


def island_of(model: nn.Module, timeout_seconds: float) -> Island | None:
    """Return the ranks that train a model together; None for a single process. All ranks call this.

    Raises:
        RankLost: a rank does not take part.
    """
    is_alone = num_ranks() == 1 and not any(map(is_sharded, model.parameters()))
    return None if is_alone else Island(Ranks(timeout_seconds))


def _what_is_wrong(tensor: Tensor) -> str:
    if tensor.dtype != torch.float32:
        kind = str(tensor.dtype).removeprefix("torch.")
        return (
            f"is {kind}; trained parameters must be float32, because an update of 1e-5 does not change a {kind} of "
            "0.03; call model.float() and use torch.autocast for speed"
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        return "is not contiguous in memory; make it contiguous before the model joins"
    return ""


def _mean_of(model: nn.Module, tensor: Tensor) -> str:
    """Return how a tensor is averaged, as far as its use in the model can be seen."""
    return "plain" if is_embedding(model, tensor) or is_head(model, tensor) else "radial"


def _rest(model: nn.Module, ignore: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    own, left_out = trained(model), set(ignore)
    same = {id(tensor) for tensor in own.values()}
    pointers = {tensor.data_ptr() for tensor in own.values() if not is_sharded(tensor)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        plain = plain_name(name)
        if plain in own or plain in left_out or not isinstance(tensor, Tensor) or id(tensor) in same:
            continue
        if is_sharded(tensor) or tensor.data_ptr() not in pointers:
            yield plain, tensor.detach()


def _parts_of_rest(model: nn.Module, ignore: Sequence[str], ranks: Ranks | None = None) -> dict[str, bytes]:
    """Return a line and a digest of each frozen parameter and persistent buffer by name.

    Those of shards are gathered on rank 0, and empty on the other ranks.
    """
    parts = {}
    for name, tensor in sorted(_rest(model, ignore), key=lambda named: named[0]):
        value = gather_tensor(tensor, ranks) if ranks is not None and is_sharded(tensor) else tensor
        parts[name] = described(name, value) if value is not None else b""
    return parts


def _digest(parts: Mapping[str, bytes]) -> str | None:
    """Return one digest over frozen parameters and persistent buffers; None if there are none."""
    return sha256(b"p2p-diloco model rest 1\n", *parts.values()).hex() if parts else None
