"""Contribute a span whose θ is on a GPU: only codes and scales are copied to the host, an eighth of the size of θ.

φ is copied to the device in chunks, of which about six exist at a time: 25 MiB of device memory for any span size. Each
operation is a separate PyTorch kernel, so multiply and add round separately and the bytes equal those of the host's
loops. `encodes_alike` tests that: a device with a differing operation must not encode contributions.

Legend: N = 64 B elements, B blocks, K = 64 elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from p2p_diloco.codec.codec import Codec, Int4Codec, is_whole
from p2p_diloco.codec.codes import Limits, contribute4, widened
from p2p_diloco.codec.vectors import BLOCK, CHUNK_ELEMENTS, Bits, Bytes, Integers, Vector, squared_norm_of_bfloat16
from p2p_diloco.outer.state import InFlight, IslandSpan, PendingContribution, SpanState, record_contribution
from p2p_diloco.span.fused import SentSpan, encode_within, is_plain

_MAGNITUDE = 0x7FFFFFFF
_TO_INTEGER = 12582912.0
_TRIED = 1 << 14
_ONE = np.float32(1)
_BYTES = (2, 2, 4, 32)
"""Bytes copied to the host per block: scale, sum of squared codes, squared length in units of the scale, codes."""


def contribute_from_device(
    state: SpanState, in_flight: InFlight, local: torch.Tensor, *, round_index: int, codec: Codec, max_norm_ratio: float
) -> SentSpan | None:
    """Encode φ − θ on the device of θ, scaled down until reducers accept it, and record what was sent.

    Args: those of `contribute_span`; `local` is θ. The vector of θ in the result is not to be used: nothing else is in
        flight, so nothing can overflow, and θ does not change.
    Returns:
        None if the device cannot encode it, or something is not finite: contribute it on the host.
    """
    if not isinstance(codec, Int4Codec) or not is_whole(state.elements) or not is_plain(state, in_flight, round_index):
        return None
    room, scale_bits_B, packed = codec.empty_encoding(state.elements)
    squares_B = np.empty(len(scale_bits_B), dtype=np.int64)
    there = partial(contribute4_there, state.anchor_N, local, codec.loop_limits(), scale_bits_B, packed, squares_B)
    whole, scale = math.nan, 1.0

    def encode(factor: float) -> float:
        nonlocal whole, scale
        scale *= factor
        norm = math.sqrt(there(factor=np.float32(scale)))
        whole = norm if factor == 1.0 else whole
        if not math.isfinite(norm):
            return norm
        return max(norm, math.sqrt(squared_norm_of_bfloat16(scale_bits_B, squares_B)))

    if not encode_within(state.head.norm_limit(max_norm_ratio), encode):
        return None
    payload = room.toreadonly()
    sent = PendingContribution(payload, partial(codec.decode, elements=state.elements))
    span = IslandSpan(state, in_flight, state.anchor_N)
    return SentSpan(whole, payload, record_contribution(span, round_index=round_index, sent=sent))


def contribute4_there(
    anchor_N: Vector,
    local_N: torch.Tensor,
    limits: Limits,
    scale_bits_B: Bits,
    packed: Bytes,
    squares_B: Integers,
    *,
    factor: np.float32 = _ONE,
) -> float:
    """Encode factor · (φ − θ) on the device of θ: the equivalent of `contribute4`.

    Args:
        anchor_N: φ, on the host.
        local_N: θ, float32, on any device. Neither is changed.
        scale_bits_B, packed, squares_B: outputs, on the host.
        factor: scales the difference.
    Returns the sum of the squares of the scaled difference, with float32 precision in each block; NaN if a value is not
    finite.
    """
    largest, least_bits, most_bits = limits
    numbers, total = (float(largest), int(least_bits), int(most_bits), float(factor)), 0.0
    # Reused for each chunk: `to` is blocking by default, so its copy is complete when it returns.
    longest = min(CHUNK_ELEMENTS, len(anchor_N))
    room = torch.empty(longest, dtype=torch.float32, device="cpu", pin_memory=local_N.is_cuda)
    for start in range(0, len(anchor_N), CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, len(anchor_N))
        sent = room[: stop - start]
        np.copyto(sent.numpy(), anchor_N[start:stop])
        came = _encoded(sent.to(local_N.device), local_N[start:stop], *numbers).cpu().numpy()
        blocks = slice(start // BLOCK, stop // BLOCK)
        scales, squares, lengths, codes = np.split(came, np.cumsum(_BYTES[:3]) * (blocks.stop - blocks.start))
        scale_bits_B[blocks] = scales.view("<u2")
        squares_B[blocks] = squares.view("<i2")
        packed[start // 2 : stop // 2] = codes
        scales_B = widened(scale_bits_B[blocks]).astype(np.float64)
        total += float(np.dot(scales_B * scales_B, lengths.view("<f4").astype(np.float64)))
    return total if math.isfinite(total) else math.nan


@torch.no_grad()
def _encoded(
    anchor_N: torch.Tensor, local_N: torch.Tensor, largest: float, least_bits: int, most_bits: int, factor: float
) -> torch.Tensor:
    """Return the concatenated bytes of all scales, sums of squared codes, Σ (value / scale)², and codes.

    Σ is in units of the scale, so that squares of very large and very small numbers neither overflow nor underflow.
    """
    delta_BK = (anchor_N - local_N).view(-1, BLOCK)
    if factor != 1.0:
        delta_BK.mul_(factor)
    peak_bits_B = (delta_BK.view(torch.int32) & _MAGNITUDE).amax(dim=1)
    # Divide by a tensor: on a GPU, dividing by a scalar multiplies by its inverse, which rounds differently.
    quotient_B = peak_bits_B.view(torch.float32) / torch.full_like(peak_bits_B, largest, dtype=torch.float32)
    scale_bits_B = ((quotient_B.view(torch.int32) + 0xFFFF) >> 16).clamp(least_bits, most_bits)
    scale_bits_B = torch.where(peak_bits_B == 0, 0, scale_bits_B)
    inverse_B = torch.where(scale_bits_B > 0, (scale_bits_B << 16).view(torch.float32).reciprocal(), 0.0)
    values_BK = delta_BK * inverse_B[:, None]
    lengths_B = values_BK.square().sum(dim=1)
    rounded_BK = values_BK.clamp_(-largest, largest).add_(_TO_INTEGER)
    codes_BK = rounded_BK.view(torch.int32) & 15
    packed_BH = (codes_BK[:, 0::2] | (codes_BK[:, 1::2] << 4)).to(torch.uint8)
    squares_B = (rounded_BK - _TO_INTEGER).square().sum(dim=1)
    parts = (scale_bits_B.to(torch.int16), squares_B.to(torch.int16), lengths_B, packed_BH)
    return torch.cat([part.view(-1).view(torch.uint8) for part in parts])


@cache
def encodes_alike(where: torch.device) -> bool:
    """Return whether a device encodes exactly as the host does; tested once."""
    return agrees(where, contribute4, Int4Codec().loop_limits())


def agrees(where: torch.device, reference: Callable[..., float], limits: Limits) -> bool:
    """Return whether a device encodes as `reference` does; tests numbers of all magnitudes, zeros and a factor."""
    rng = np.random.Generator(np.random.Philox(key=7))
    powers_N = np.exp2(rng.integers(-140, 120, _TRIED)).astype(np.float32)
    anchor_N = rng.standard_normal(_TRIED, dtype=np.float32) * np.sort(powers_N)
    local_N = np.where(rng.random(_TRIED) < 0.1, anchor_N, np.float32(0))
    for vector_N in (anchor_N, local_N):
        vector_N.setflags(write=False)
    try:
        there = _tried(contribute4_there, anchor_N, torch.tensor(local_N, device=where), limits)
    except (RuntimeError, TypeError):  # a missing operation, or not enough memory
        return False
    if there != _tried(reference, anchor_N, local_N, limits):
        return False
    # Halving is exact except for the very smallest numbers.
    half, start = np.float32(0.5), _TRIED // 2
    there = _tried(
        partial(contribute4_there, factor=half), anchor_N[start:], torch.tensor(local_N[start:], device=where), limits
    )
    return there == _tried(reference, half * anchor_N[start:], half * local_N[start:], limits)


def _tried(loop: Callable[..., float], anchor_N: Any, local_N: Any, limits: Limits) -> list[bytes]:
    blocks = len(anchor_N) // BLOCK
    rooms = (np.zeros(blocks, np.uint16), np.zeros(len(anchor_N) // 2, np.uint8), np.zeros(blocks, np.int64))
    loop(anchor_N, local_N, limits, *rooms)
    return [room.tobytes() for room in rooms]
