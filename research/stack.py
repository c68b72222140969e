"""Learners of several trials in one stack of models, so that a GPU makes all of their inner steps at once.

A step is that of `InnerLoop`, for each learner with its own parameters, batch and learning rate.

Legend: S = learners in the stack, N = elements of a fragment, B = windows, T = positions, W = width, H = heads,
D = width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from p2p_diloco.app.models.model import build_model, rotary_tables, rotate
from p2p_diloco.app.models.text_model import decoder_text_model
from p2p_diloco.app.text.data import BatchStream
from p2p_diloco.app.training.muon import RMS, orthogonal
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.decoder import NORM_EPSILON, ModelShape
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.outer.fragments import Fragment
from research.learners import Tensor as Position
from research.learners import fragment_borders, plan_of, tensor_positions

MOMENTUM = 0.95
_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The learners of one trial.

    Attributes:
        rule: rule of their inner steps; in one stack, rules differ only in the learning rate.
        seed: seed of the initial parameters.
        streams: the batches of each.
    """

    rule: InnerRule
    seed: int
    streams: Sequence[BatchStream]


class Stack:
    """Parameters and optimiser state of all learners of several crews, on one device.

    Attributes:
        crews: the learners of each crew, in order.
    """

    def __init__(self, shape: ModelShape, num_fragments: int, crews: Sequence[Crew], device: str) -> None:
        rule, width = crews[0].rule, crews[0].streams[0].batch
        assert all(replace(crew.rule, learning_rate=rule.learning_rate) == rule for crew in crews), "one rule for all"
        assert all(stream.batch == width for crew in crews for stream in crew.streams), "one size of batch for all"
        self.plan = plan_of(shape, num_fragments)
        self._shape, self._rule, self._device = shape, rule, torch.device(device)
        self._streams = [stream for crew in crews for stream in crew.streams]
        self._model = _StackedModel(shape, self.plan, self._device)
        start = [self._model.start(crew.seed) for crew in crews for _ in crew.streams]
        self._fragments = [_Block(np.stack(vectors), self._device) for vectors in zip(*start, strict=True)]
        self._updates = [_Update(self._model, fragment, rule) for fragment in self.plan]
        rates = [crew.rule.learning_rate for crew in crews for _ in crew.streams]
        self._rate_S1 = torch.tensor(rates, device=self._device)[:, None]
        self._steps_S1 = torch.zeros_like(self._rate_S1)
        self._steps: list[int] | None = [0] * len(rates)
        self._due = [False] * len(rates)
        self.progress = 0.0
        self.crews: list[StackedLearners] = []
        for crew in crews:
            first = sum(map(len, self.crews))
            self.crews.append(StackedLearners(self, range(first, first + len(crew.streams))))

    def mark(self, learner: int) -> None:
        """Have a learner take part in the next step."""
        self._due[learner] = True

    def step(self) -> None:
        """Make one inner step of all marked learners."""
        if not any(self._due):
            return
        batches = [
            stream.next_batch() if is_due else torch.zeros((stream.batch, stream.context + 1), dtype=torch.int64)
            for stream, is_due in zip(self._streams, self._due, strict=True)
        ]
        windows_SBT = torch.stack(batches).to(self._device)
        due_S1 = torch.tensor(self._due, device=self._device)[:, None]
        thetas = [block.on_device() for block in self._fragments]
        losses_S, gradients = self._model.gradients(thetas, windows_SBT)
        norm_S1 = torch.stack([gradient.square().sum(dim=1) for gradient in gradients]).sum(dim=0).sqrt()[:, None]
        applied_S1 = due_S1 & norm_S1.isfinite() & losses_S.isfinite()[:, None]
        clip_S1 = (self._rule.gradient_clip / (norm_S1 + 1e-6)).clamp(max=1.0)
        rate_S1 = self._rate_S1 * self._share() * self._warmup()
        for theta_SN, gradient_SN, update in zip(thetas, gradients, self._updates, strict=True):
            update.apply(theta_SN, gradient_SN * clip_S1, rate_S1, self._steps_S1 + 1.0, applied_S1)
        self._steps_S1 += applied_S1
        self._steps = None
        self._due = [False] * len(self._due)

    def steps(self, learner: int) -> int:
        """Return the inner steps that a learner has made."""
        if self._steps is None:
            self._steps = [int(steps) for steps in self._steps_S1[:, 0].tolist()]
        return self._steps[learner]

    def tokens(self, learner: int) -> int:
        """Return the tokens that a learner has trained on."""
        stream = self._streams[learner]
        return self.steps(learner) * stream.batch * stream.context

    def read(self, learner: int, fragment: int) -> Vector:
        """Return a copy of a fragment of a learner's θ."""
        local_N: Vector = self._fragments[fragment].on_host()[learner].copy()
        return local_N

    def write(self, learner: int, fragment: int, local_N: Vector) -> None:
        """Set a fragment of a learner's θ."""
        self._fragments[fragment].to_change()[learner] = local_N

    def _warmup(self) -> Tensor:
        return ((self._steps_S1 + 1.0) / max(1, self._rule.warmup_steps)).clamp(max=1.0)

    def _share(self) -> float:
        rule = self._rule
        if rule.schedule == "constant":
            return 1.0
        return rule.final_share + (1.0 - rule.final_share) * 0.5 * (1.0 + math.cos(math.pi * self.progress))


class StackedLearners:
    """The learners of one trial in a stack; a step is made when the stack makes it."""

    def __init__(self, stack: Stack, places: range) -> None:
        self._stack = stack
        self._places = places
        self.fragments: Sequence[tuple[int, int]] = fragment_borders(stack.plan)
        self.tensors: Sequence[Position] = tensor_positions(stack.plan)

    def __len__(self) -> int:
        return len(self._places)

    def step(self, learner: int) -> None:
        """Mark a learner for the next step of the stack."""
        self._stack.mark(self._places[learner])

    def progress(self, share: float) -> None:
        """Set the progress of training, which is that of the whole stack."""
        self._stack.progress = share

    def steps(self, learner: int) -> int:
        """Return the inner steps made."""
        return self._stack.steps(self._places[learner])

    def tokens(self, learner: int) -> int:
        """Return the tokens trained on."""
        return self._stack.tokens(self._places[learner])

    def read(self, learner: int, fragment: int) -> Vector:
        """Return a copy of a fragment of θ."""
        return self._stack.read(self._places[learner], fragment)

    def write(self, learner: int, fragment: int, local_N: Vector) -> None:
        """Set a fragment of θ."""
        self._stack.write(self._places[learner], fragment, local_N)


class _Block:
    """A fragment of all learners, on the device and on the host; copied only when the other side has changed it."""

    def __init__(self, values_SN: Vector, device: torch.device) -> None:
        pinned = torch.from_numpy(values_SN).pin_memory() if device.type == "cuda" else torch.from_numpy(values_SN)
        self._host_SN: Vector = pinned.numpy()
        self._pinned = pinned
        self._device_SN = pinned.to(device)
        self._is_shared = self._device_SN is pinned
        self._is_on_host, self._is_changed = True, False

    def on_device(self) -> Tensor:
        """Return θ on the device, to be changed there."""
        if self._is_changed and not self._is_shared:
            self._device_SN.copy_(self._pinned, non_blocking=True)
        self._is_on_host, self._is_changed = False, False
        return self._device_SN

    def on_host(self) -> Vector:
        """Return θ on the host, for reading."""
        if not self._is_on_host and not self._is_shared:
            self._pinned.copy_(self._device_SN)
        self._is_on_host = True
        return self._host_SN

    def to_change(self) -> Vector:
        """Return θ on the host, to be changed there."""
        self.on_host()
        self._is_changed = True
        return self._host_SN


class _Slot(NamedTuple):
    name: str
    start: int
    stop: int
    shape: torch.Size


class _StackedModel:
    """The built-in model (`training/model.py`) with parameters of its own for each learner."""

    def __init__(self, shape: ModelShape, plan: Sequence[Fragment], device: torch.device) -> None:
        self._shape, self._plan = shape, plan
        model = build_model(shape, 0)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        roles = decoder_text_model(model).roles()
        self.matrices = frozenset(names[id(tensor)] for tensor in roles.matrices)
        self.others = frozenset(names[id(tensor)] for tensor in roles.others)
        self.slots = [
            [_Slot(slot.name, slot.start, slot.stop, shapes[slot.name]) for slot in fragment.tensors]
            for fragment in plan
        ]
        self._rotary = tuple(table.to(device) for table in rotary_tables(shape.context, shape.head_width))

    def start(self, seed: int) -> list[Vector]:
        """Return the initial parameters of a seed, by fragment."""
        named = dict(build_model(self._shape, seed).named_parameters())
        return [
            np.concatenate([named[slot.name].detach().numpy().reshape(-1) for slot in slots]) for slots in self.slots
        ]

    def gradients(self, thetas: Sequence[Tensor], windows_SBT: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return each learner's loss on its batch, and the gradients by fragment."""
        leaves = [theta_SN.detach().requires_grad_() for theta_SN in thetas]
        named = {
            slot.name: part.view(-1, *slot.shape)
            for leaf, slots in zip(leaves, self.slots, strict=True)
            for part, slot in zip(_split(leaf, slots), slots, strict=True)
        }
        losses_S = self._losses(named, windows_SBT)
        return losses_S.detach(), torch.autograd.grad(losses_S.sum(), leaves)

    def _losses(self, named: Mapping[str, Tensor], windows_SBT: Tensor) -> Tensor:
        stack, batch, length = windows_SBT.shape[0], windows_SBT.shape[1], windows_SBT.shape[2] - 1
        shape = self._shape
        rows = torch.arange(stack, device=windows_SBT.device)[:, None, None] * shape.vocabulary
        table = named["embedding"].flatten(0, 1)
        stream_SLW = functional.embedding(windows_SBT[..., :-1] + rows, table).flatten(1, 2)
        for index in range(shape.layers):
            own = {name.removeprefix(f"blocks.{index}."): tensor for name, tensor in named.items()}
            mixed = _linear(_norm(stream_SLW, own["attention_norm.gain"]), own["attention.query_key_value"])
            mixed_3BHTD = mixed.view(stack * batch, length, 3, shape.heads, shape.head_width).permute(2, 0, 3, 1, 4)
            query_key_2BHTD = rotate(mixed_3BHTD[:2], *self._rotary)
            gathered_BHTD = functional.scaled_dot_product_attention(
                query_key_2BHTD[0], query_key_2BHTD[1], mixed_3BHTD[2], is_causal=True
            )
            gathered = gathered_BHTD.transpose(1, 2).reshape(stack, batch * length, shape.width)
            stream_SLW = stream_SLW + _linear(gathered, own["attention.output"])
            normed = _norm(stream_SLW, own["feed_forward_norm.gain"])
            gate, up = _linear(normed, own["feed_forward.gate_up"]).chunk(2, dim=-1)
            stream_SLW = stream_SLW + _linear(functional.silu(gate) * up, own["feed_forward.down"])
        logits = _linear(_norm(stream_SLW, named["norm.gain"]), named["head"])
        losses = functional.cross_entropy(logits.flatten(0, 1), windows_SBT[..., 1:].flatten(), reduction="none")
        return losses.view(stack, -1).mean(dim=1)


def _split(flat_SN: Tensor, slots: Sequence[_Slot]) -> Sequence[Tensor]:
    return torch.split(flat_SN, [slot.stop - slot.start for slot in slots], dim=1)


def _linear(stream_SLW: Tensor, matrix: Tensor) -> Tensor:
    return torch.bmm(stream_SLW, matrix.mT)


def _norm(stream_SLW: Tensor, gain_SW: Tensor) -> Tensor:
    return functional.rms_norm(stream_SLW, stream_SLW.shape[-1:], None, NORM_EPSILON) * gain_SW[:, None]


class _Update:
    """Optimiser state of one fragment of all learners: AdamW, and Muon for matrices if the rule has it."""

    def __init__(self, model: _StackedModel, fragment: Fragment, rule: InnerRule) -> None:
        self._rule = rule
        slots = model.slots[fragment.index]
        self._matrices: dict[torch.Size, list[_Slot]] = {}
        if rule.optimizer == "muon":
            for slot in slots:
                if slot.name in model.matrices:
                    self._matrices.setdefault(slot.shape, []).append(slot)
        rates, decays = np.ones(fragment.elements, np.float32), np.zeros(fragment.elements, np.float32)
        for slot in slots:
            if slot.name == "embedding":
                rates[slot.start : slot.stop] = rule.embedding_rate
            if slot.name in model.matrices | model.others:
                decays[slot.start : slot.stop] = rule.weight_decay
        self._factors = (torch.from_numpy(rates), torch.from_numpy(decays))
        self._moments: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def apply(
        self, theta_SN: Tensor, gradient_SN: Tensor, rate_S1: Tensor, steps_S1: Tensor, applied_S1: Tensor
    ) -> None:
        """Make one step of the learners that `applied_S1` names, with the gradients after clipping."""
        rule = self._rule
        if not self._moments:
            self._moments = (torch.zeros_like(theta_SN), torch.zeros_like(theta_SN), torch.zeros_like(theta_SN))
            self._factors = (self._factors[0].to(theta_SN.device), self._factors[1].to(theta_SN.device))
        gradient_SN = gradient_SN.where(applied_S1, 0.0)
        first_SN, second_SN, mean_SN = self._moments
        first_SN.copy_(first_SN.lerp(gradient_SN, 1.0 - rule.beta1).where(applied_S1, first_SN))
        squares_SN = second_SN.lerp(gradient_SN.square(), 1.0 - rule.beta2)
        second_SN.copy_(squares_SN.where(applied_S1, second_SN))
        depth_S1 = (1.0 - rule.beta2**steps_S1).sqrt()
        step_SN = first_SN / (second_SN.sqrt() / depth_S1 + _EPSILON) / (1.0 - rule.beta1**steps_S1)
        if self._matrices:
            mean_SN.copy_(mean_SN.lerp(gradient_SN, 1.0 - MOMENTUM).where(applied_S1, mean_SN))
            direction_SN = gradient_SN.lerp(mean_SN, MOMENTUM)
            for shape, slots in self._matrices.items():
                self._orthogonalise(direction_SN, step_SN, shape, slots)
        rates_N, decays_N = self._factors
        rate_SN = rate_S1 * rates_N
        theta_SN.copy_((theta_SN * (1.0 - rate_SN * decays_N) - rate_SN * step_SN).where(applied_S1, theta_SN))

    def _orthogonalise(self, direction_SN: Tensor, step_SN: Tensor, shape: torch.Size, slots: Sequence[_Slot]) -> None:
        """Write Muon's steps of matrices of one shape over those of AdamW."""
        rows, columns = shape
        stacked = torch.stack([direction_SN[:, slot.start : slot.stop].view(-1, *shape) for slot in slots])
        found = orthogonal((stacked.mT if rows > columns else stacked).flatten(0, 1))
        found = (found.mT if rows > columns else found).view(*stacked.shape[:2], rows, columns)
        length = RMS * math.sqrt(max(rows, columns))
        for slot, update in zip(slots, found, strict=True):
            step_SN[:, slot.start : slot.stop] = length * update.flatten(1)
