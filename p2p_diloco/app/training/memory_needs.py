"""Compare the memory that a run needs on this machine with what is free, before anything is built or downloaded.

A run is refused only if a lower bound of its need does not fit. The bound counts what must be in memory at one time:
one window, blocks that recompute their activations, and no libraries, work areas or fragmentation. What is likely
needed is more; if only that does not fit, the peer says so and tries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from p2p_diloco.app.models.run_model import SHARE_OF_MEMORY
from p2p_diloco.config.decoder import EMBEDDINGS, MODEL_SIZES, ModelShape, decoder_tensors
from p2p_diloco.config.inner_rule import OptimizerName
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import ConfigError
from p2p_diloco.memory.available import free_memory, total_memory
from p2p_diloco.session.start import BYTES_TO_EXPORT
from p2p_diloco.wording import format_bytes

FLOAT_BYTES, TWO_FLOATS = 4, 8
"""Bytes per parameter: of θ, or of its gradient; and of φ and m, or of AdamW's moments."""
FIXED_BYTES, SPARE_BYTES = 200_000_000, 2
"""Likely bytes of a peer besides, at any size and per parameter (docs/performance.md, memory)."""
LEAST_CONTEXT = 64
"""Shortest context to propose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The sizes on which the memory of a run depends.

    Attributes:
        parameters: elements that the run trains.
        moments: bytes of the optimisers' state.
        encoded: bytes of a cycle's entries and of one contribution.
        least_window: minimum bytes of the activations of one window; the blocks recompute theirs.
        window: likely bytes of them if the blocks keep theirs.
        frozen: bytes of tensors that are not trained, as far as known.
    """

    parameters: int
    moments: int
    encoded: int
    least_window: int
    window: int
    frozen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where an island trains, and the memory there.

    Attributes:
        device: of one rank.
        host_free, host_total: bytes of this machine.
        device_free, device_total: bytes of a device with its own memory; None: it uses the host's.
        ranks: ranks of the island; `here` of them are on this machine.
        has_shards: whether each rank holds a shard of the model instead of a copy.
    """

    device: str
    host_free: int
    host_total: int
    device_free: int | None = None
    device_total: int = 0
    ranks: int = 1
    here: int = 1
    has_shards: bool = False


def room_here(device: torch.device, *, ranks: int = 1, here: int = 1, has_shards: bool = False) -> Room:
    """Measure the memory of this machine and of a device; one that shares the machine's has none of its own."""
    free, total = None, 0
    if device.type == "cuda" and not torch.cuda.get_device_properties(device).is_integrated:
        free, total = torch.cuda.mem_get_info(device)
    return Room(
        device=str(device),
        host_free=free_memory(),
        host_total=total_memory(),
        device_free=free,
        device_total=total,
        ranks=ranks,
        here=here,
        has_shards=has_shards,
    )


def load_of(plan: RunPlan) -> Load:
    """Derive the load of a run from its manifest."""
    section, optimizer = plan.manifest.model, plan.inner.optimizer
    encoded = sum(plan.rules.entry_bytes.values()) + sum(
        plan.rules.payload_bytes[span] for span in plan.spans_of(len(plan.fragments) - 1)
    )
    if plan.built_in is not None:
        return _load_of_decoder(plan.built_in, optimizer, encoded)
    # The logits of a window and their logarithms, in float32; a Python model may compute its loss in parts.
    window = TWO_FLOATS * plan.context * (section.vocabulary or 0) if section.kind == "hf" else 0
    return Load(
        parameters=plan.num_parameters,
        moments=_moments(((shape, mean == "plain") for _, shape, mean in section.tensors), optimizer),
        encoded=encoded,
        least_window=window,
        window=window,
    )


def _load_of_decoder(shape: ModelShape, optimizer: OptimizerName, encoded: int) -> Load:
    tensors, logits = decoder_tensors(shape), TWO_FLOATS * shape.vocabulary
    kept = 13 * shape.width + 4 * shape.feed_forward  # floats of a position in a block, as autograd keeps them
    return Load(
        parameters=shape.num_parameters,
        moments=_moments(((size, name in EMBEDDINGS) for name, size in tensors.items()), optimizer),
        encoded=encoded,
        least_window=shape.context * (FLOAT_BYTES * shape.layers * shape.width + logits),
        window=shape.context * (FLOAT_BYTES * shape.layers * kept + logits),
    )


def _moments(tensors: Iterable[tuple[tuple[int, ...], bool]], optimizer: OptimizerName) -> int:
    """Return the bytes of the moments: one of Muon for the matrices of the blocks, two of AdamW for other tensors."""
    return sum(
        math.prod(shape) * (FLOAT_BYTES if optimizer == "muon" and len(shape) == 2 and not is_embedding else TWO_FLOATS)
        for shape, is_embedding in tensors
    )


def needed_bytes(load: Load, room: Room, windows: int | None = None) -> tuple[int, int]:
    """Return the bytes that a run needs of the host and of the device; the latter are 0 if it uses the host's memory.

    Args:
        windows: windows that a rank takes at a time, for what is likely; None: the minimum. There gradients and
            activations do not add up, because the backward pass frees the ones as it computes the others.
    """
    theta, shares = FLOAT_BYTES * load.parameters, room.ranks if room.has_shards else 1
    agreed, built = TWO_FLOATS * load.parameters + load.encoded, theta + load.frozen
    each = (theta + load.moments) // shares + load.frozen
    if windows is None:
        each += max(theta // shares, load.least_window)
    else:
        buckets = theta if room.ranks > shares else 0  # gradients that copies exchange
        each += theta // shares + buckets + windows * load.window
        agreed += FIXED_BYTES + SPARE_BYTES * load.parameters
    # Each rank first builds the whole model on the host.
    if room.device_free is not None:
        return max(agreed, room.here * built), each
    return max(agreed + room.here * each, room.here * built), 0


def check_memory(plan: RunPlan, room: Room) -> None:
    """Refuse a run that cannot fit here.

    Raises:
        ConfigError: with what would fit.
    """
    load = load_of(plan)
    if _fits(load, room):
        return
    host, device = needed_bytes(load, room)
    if host > room.host_free:
        agreed = TWO_FLOATS * load.parameters + load.encoded
        ranks = f" in {room.here} ranks" if room.here > 1 else ""
        training = f", {format_bytes(host - agreed)} to train it{ranks}" if host > agreed else ""
        text = (
            f"this run needs at least {format_bytes(host)} of memory on this machine ({format_bytes(agreed)} to hold "
            f"the shared model of {load.parameters:,} parameters{training}), and {format_bytes(room.host_free)} of "
            f"{format_bytes(room.host_total)} are free"
        )
    else:
        text = (
            f"training the {load.parameters:,} parameters of this run needs at least {format_bytes(device)} of memory "
            f"on {room.device}, and {format_bytes(room.device_free)} of {format_bytes(room.device_total)} are free"
        )
    own, organisers = list(_choices_here(plan, load, room)), list(_smaller_runs(plan, load, room))
    if organisers:
        own.append(f"ask the organiser for a run with {' or '.join(organisers)}")
    raise ConfigError(f"{text}; {'; or '.join(own) or 'take a machine with more memory, or a run of a smaller model'}")


def explain_tight(plan: RunPlan, room: Room, windows: int) -> str | None:
    """Return a sentence if the run can fit, but is likely to run out of memory; otherwise None."""
    host, device = needed_bytes(load_of(plan), room, windows)
    smaller = "" if room.device_free is not None else ", or set --windows-at-once 1 or --recompute always"
    for needed, free, where in (
        (host, room.host_free, "on this machine"),
        (device, room.device_free, f"on {room.device}"),
    ):
        if free is not None and needed > free:
            return (
                f"memory may run out: training is likely to need {format_bytes(needed)} {where}, and "
                f"{format_bytes(free)} are free; if it does, close other programs{smaller}"
            )
    return None


def _fits(load: Load, room: Room) -> bool:
    host, device = needed_bytes(load, room)
    return host <= room.host_free and (room.device_free is None or device <= room.device_free)


def _choices_here(plan: RunPlan, load: Load, room: Room) -> Iterable[str]:
    """Yield what this machine's owner can do, if it is enough."""
    emptied = None if room.device_free is None else room.device_total
    if _fits(load, replace(room, host_free=room.host_total, device_free=emptied)):
        yield "close the programs that use the rest"
    alone = replace(room, ranks=1, here=1, has_shards=False)
    if room.ranks == room.here > 1 and _fits(load, alone):
        yield "train in one process with --ranks 1"
    can_share = room.ranks > 1 and plan.inner.batch % room.ranks == 0
    if can_share and not room.has_shards and _fits(load, replace(room, has_shards=True)):
        yield "cut the model among the ranks with --shards always"
    if room.device_free is not None and _fits(load, replace(alone, device="cpu", device_free=None)):
        flag = "--device cpu --ranks 1" if room.ranks > 1 else "--device cpu"
        yield f"train on the processor, which is slower, with {flag}"
    if (bytes_to_export := BYTES_TO_EXPORT * load.parameters) <= room.host_free:
        yield f"export the model without training it, in {format_bytes(bytes_to_export)}: `p2p-diloco archive`"


def _smaller_runs(plan: RunPlan, load: Load, room: Room) -> Iterable[str]:
    """Yield changes of the manifest, each of which is enough."""
    section, optimizer, shape = plan.manifest.model, plan.inner.optimizer, plan.built_in
    if shape is not None:
        if optimizer == "adamw" and _fits(_load_of_decoder(shape, "muon", load.encoded), room):
            yield 'inner.optimizer "muon"'
        contexts = (shape.context >> halvings for halvings in range(1, shape.context.bit_length()))
        for context in contexts:
            shorter = replace(shape, context=context)
            is_suited = context >= LEAST_CONTEXT and shape.context % context == 0
            if is_suited and _fits(_load_of_decoder(shorter, optimizer, load.encoded), room):
                yield f"model.context {context}"
                break
        for size, smaller in reversed(MODEL_SIZES.items()):
            encoded = load.encoded * smaller.num_parameters // load.parameters
            is_smaller = smaller.num_parameters < load.parameters
            if is_smaller and _fits(_load_of_decoder(smaller, optimizer, encoded), room):
                yield f'model.size "{size}"'
                break
    elif section.kind == "hf" and section.weights == "loaded" and not section.lora_rank:
        # Adapters of rank 8 have less than a hundredth of the parameters. `build_run_model` limits the frozen rest.
        few, frozen = load.parameters // 100, FLOAT_BYTES * load.parameters
        adapters = replace(load, parameters=few, moments=TWO_FLOATS * few, encoded=load.encoded // 100, frozen=frozen)
        if frozen <= SHARE_OF_MEMORY * room.host_total and _fits(adapters, room):
            yield "LoRA adapters (model.lora_rank 8)"
