"""Held-out loss of the anchor and of θ, always over the same windows, so that losses are comparable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from p2p_diloco.app.models.model import DecoderModel, rotary_tables, token_loss
from p2p_diloco.app.models.text_model import TextModel, WithLoss
from p2p_diloco.app.text.data import Text, held_out_windows
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.island.parameters import Buffers, trained
from p2p_diloco.outer.fragments import Fragment
from p2p_diloco.session.held_state import Slice, anchor_slice
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.session.training import HeldOutLoss

EVALUATION_TOKENS = 6144
"""Tokens of one evaluation: under half a second for the tiny model on one CPU core, see `held_out_loss`."""
_BATCH_TOKENS = 512
"""Small, because training runs at the same time. On a CPU, batches of 2,048 take an eighth longer."""


@torch.no_grad()
def held_out_loss(model: DecoderModel, corpus: Text, *, num_tokens: int = EVALUATION_TOKENS) -> float:
    """Return the mean loss in nats per byte over a fixed set of held-out windows, about `num_tokens` in total.

    Call this from the thread that trains the model. Parameters and gradients are not changed.

    Raises:
        ConfigError: every held-out stretch is shorter than the model's context.
    """
    batches, device = _batches(corpus, model.shape.context, num_tokens), model.embedding.device
    return _mean(batches, (model.loss(batch.to(device)) for batch in batches))


class AnchorEvaluation:
    """Evaluates parameter vectors without loading them into a model, so that any thread can do it during training.

    All windows pass through one part of the model, then through the next: embedding, each block, norm and head. So only
    one part's parameters need to be in memory besides the vectors, and the vectors themselves can be fetched part by
    part (`begin`, then `take` for each of `parts`). The loss is bitwise equal to `held_out_loss` of a model with these
    parameters.

    Not thread-safe.

    Attributes:
        parts: the slices of fragments that form each part of the model, tensor by tensor.
    """

    def __init__(
        self,
        shape: ModelShape,
        fragments: Sequence[Fragment],
        corpus: Text,
        *,
        device: torch.device | str = "cpu",
        num_tokens: int = EVALUATION_TOKENS,
    ) -> None:
        self._device = torch.device(device)
        with torch.device("meta"):
            self._model = DecoderModel(shape)
        self._rotary = tuple(table.to(self._device) for table in rotary_tables(shape.context, shape.head_width))
        slots = {slot.name: (fragment.index, slot) for fragment in fragments for slot in fragment.tensors}
        self._names = _parts_of(self._model)
        self._shapes = {name: parameter.shape for name, parameter in self._model.named_parameters()}
        self.parts = tuple(
            tuple(Slice(fragment, slot.start, slot.stop) for fragment, slot in map(slots.__getitem__, names))
            for names in self._names
        )
        # Read here, once: later only the training thread may read the corpus.
        self._batches = [batch.to(self._device) for batch in _batches(corpus, shape.context, num_tokens)]
        self._streams: list[Tensor] = []
        self._next = 0

    def loss(self, vectors: Sequence[NDArray[np.float32]]) -> float:
        """Return the held-out loss in nats per byte of `vectors`, one per fragment by index."""
        self.begin()
        loss = None
        for part in self.parts:
            loss = self.take([vectors[fragment][start:stop] for fragment, start, stop in part])
        assert loss is not None, "the last part returns it"
        return loss

    def begin(self) -> None:
        """Start with the first part; discard an unfinished evaluation."""
        self._streams, self._next = [], 0

    @torch.no_grad()
    def take(self, tensors: Sequence[NDArray[np.float32]]) -> float | None:
        """Pass all windows through the next part, whose weights are the flat `tensors`; return the loss at the end."""
        names, last = self._names[self._next], len(self._names) - 1
        named = {
            name: _as_tensor(vector_N).to(self._device).view(self._shapes[name])
            for name, vector_N in zip(names, tensors, strict=True)
        }
        if self._next == 0:
            embedding = named["embedding"]
            self._streams = [functional.embedding(batch[:, :-1], embedding) for batch in self._batches]
        elif self._next < last:
            block = self._model.blocks[self._next - 1]
            prefix = f"blocks.{self._next - 1}."
            own = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
            for index, stream_BTW in enumerate(self._streams):
                self._streams[index] = functional_call(block, own, (stream_BTW, self._rotary))
        else:
            loss = self._end(named["norm.gain"], named["head"])
            self.begin()
            return loss
        self._next += 1
        return None

    def _end(self, gain: Tensor, head: Tensor) -> float:
        normed = (functional_call(self._model.norm, {"gain": gain}, (stream_BTW,)) for stream_BTW in self._streams)
        losses = (
            token_loss(functional.linear(normed_BTW, head), batch)
            for batch, normed_BTW in zip(self._batches, normed, strict=True)
        )
        return _mean(self._batches, losses)


class WholeEvaluation:
    """Evaluates parameter vectors in a copy of any model; see `AnchorEvaluation`.

    All windows pass through the whole model, so all vectors are in memory at once. A model with frozen parameters is
    evaluated on their device, others on the CPU.

    Args:
        live: the module in training, whose buffers are used; None: that of the model.

    Attributes:
        batches: the held-out windows.
    """

    def __init__(
        self,
        model: TextModel,
        fragments: Sequence[Fragment],
        corpus: Text,
        *,
        live: nn.Module | None = None,
        num_tokens: int = EVALUATION_TOKENS,
    ) -> None:
        own = model.skeleton()
        frozen = [parameter for parameter in own.module.parameters() if not parameter.requires_grad]
        self._device = frozen[0].device if frozen else torch.device("cpu")
        for module in own.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self._device))
        self._buffers, self._live = Buffers(own.module), Buffers(live or model.module)
        self._shapes = {name: parameter.shape for name, parameter in trained(own.module).items()}
        self._scored = WithLoss(own)
        self._names = tuple(slot.name for fragment in fragments for slot in fragment.tensors)
        self._own_names = {name: f"module.{full}" for name, full in _full_names(own.module).items()}
        self.parts = (
            tuple(Slice(fragment.index, slot.start, slot.stop) for fragment in fragments for slot in fragment.tensors),
        )
        self.batches = _batches(corpus, model.context, num_tokens)

    def begin(self) -> None:
        """Do nothing: there is only one part."""

    @torch.no_grad()
    def take(self, tensors: Sequence[NDArray[np.float32]]) -> float:
        """Return the loss of all windows with the flat `tensors`."""
        named = {
            self._own_names[name]: _as_tensor(vector_N).to(self._device).view(self._shapes[name])
            for name, vector_N in zip(self._names, tensors, strict=True)
        }
        self._buffers.load_state_dict(self._live.tensors())
        scored = (functional_call(self._scored, named, (batch.to(self._device),)) for batch in self.batches)
        return _mean(self.batches, scored)


def _full_names(module: nn.Module) -> dict[str, str]:
    """Return the names in `named_parameters` of the trained parameters, by their names without wrappers."""
    full = (name for name, parameter in module.named_parameters() if parameter.requires_grad)
    return dict(zip(trained(module), full, strict=True))


def _as_tensor(vector_N: NDArray[np.float32]) -> Tensor:
    """Return a vector as a tensor that shares its memory; copy read-only arrays, about which torch would warn."""
    return torch.from_numpy(vector_N) if vector_N.flags.writeable else torch.tensor(vector_N)


def _batches(corpus: Text, context: int, num_tokens: int) -> tuple[Tensor, ...]:
    """Return the held-out windows in batches small enough to stay in the cache."""
    windows_BT = held_out_windows(corpus, context=context, num_windows=max(1, num_tokens // context))
    return torch.split(windows_BT, max(1, _BATCH_TOKENS // context))


def _mean(batches: Sequence[Tensor], losses: Iterable[Tensor]) -> float:
    """Return the mean loss of a window from those of its batches."""
    total = 0.0
    for batch, loss in zip(batches, losses, strict=True):
        total += loss.item() * len(batch)
    return total / sum(map(len, batches))


def _parts_of(model: DecoderModel) -> list[tuple[str, ...]]:
    """Return the parameter names of each part, in forward order."""
    names = [name for name, _ in model.named_parameters()]
    blocks = [tuple(n for n in names if n.startswith(f"blocks.{index}.")) for index in range(len(model.blocks))]
    return [("embedding",), *blocks, ("norm.gain", "head")]


def evaluation_of(
    plan: RunPlan, model: TextModel | None, text: Text, live: nn.Module | None = None
) -> AnchorEvaluation | WholeEvaluation:
    """Return the evaluation of a run's model on the held-out part of a text.

    Args:
        model: the model; the built-in one may be None.
        live: the module in training, if the model is a copy of it.
    """
    if plan.built_in is not None:
        return AnchorEvaluation(plan.built_in, plan.fragments, text)
    assert model is not None, "only the built-in model is evaluated part by part"
    return WholeEvaluation(model, plan.fragments, text, live=live)


class HeldOutWatch:
    """Measures both losses, copying only one part of the model at a time.

    Each part is read when it is needed. During training, a fragment may be updated between two parts; once training
    has stopped, the figures are exact.
    """

    def __init__(self, plan: RunPlan, evaluation: AnchorEvaluation | WholeEvaluation) -> None:
        self._plan = plan
        self._evaluation = evaluation
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._measuring = asyncio.Lock()

    async def measure(self, state: TrainedState) -> HeldOutLoss:
        """Measure the current state; concurrent measurements run one after the other."""
        async with self._measuring:
            anchor = await self._loss(lambda part: self._anchor_of(state, part))
            return HeldOutLoss(anchor=anchor, local=await self._loss(lambda part: _local_of(state, part)))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _loss(self, fetch: Callable[[Sequence[Slice]], Awaitable[Sequence[Vector]]]) -> float:
        loop, loss = asyncio.get_running_loop(), None
        # In the thread, which may still be busy with a cancelled measurement.
        await loop.run_in_executor(self._thread, self._evaluation.begin)
        for part in self._evaluation.parts:
            loss = await loop.run_in_executor(self._thread, self._evaluation.take, await fetch(part))
        assert loss is not None, "the last part returns it"
        return loss

    async def _anchor_of(self, state: TrainedState, part: Sequence[Slice]) -> list[Vector]:
        states = state.moving_states()
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: [anchor_slice(self._plan, states, each) for each in part]
        )


async def _local_of(state: TrainedState, part: Sequence[Slice]) -> tuple[Vector, ...]:
    """Return slices of θ as they are at the next step border."""
    came: asyncio.Future[tuple[Vector, ...]] = asyncio.get_running_loop().create_future()
    state.look(part, lambda vectors: came.set_result(vectors) if not came.done() else None)
    return await came
