"""Encoding on θ's device gives the bytes of the host's loops; no GPU is needed, because only the device differs."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.codec.codec import Int4Codec, codec_named, parts_of
from p2p_diloco.codec.vectors import Vector, compiled_loops, read_only
from p2p_diloco.span import device

INT4 = codec_named("int4")
assert isinstance(INT4, Int4Codec)


def encoded_there(anchor_N: Vector, local_N: Vector) -> tuple[float, bytes, list[int]]:
    return encoded(device.contribute4_there, anchor_N, torch.tensor(local_N))


def encoded_here(anchor_N: Vector, local_N: Vector) -> tuple[float, bytes, list[int]]:
    loops = compiled_loops()
    assert loops is not None
    return encoded(loops.contribute4, anchor_N, read_only(local_N))


def encoded(loop, anchor_N, local_N):  # type: ignore[no-untyped-def]
    room = np.empty(INT4.encoded_bytes(len(anchor_N)), np.uint8)
    scale_bits_B, packed = parts_of(room, len(anchor_N))
    squares_B = np.empty(len(scale_bits_B), np.int64)
    squared = loop(read_only(anchor_N), local_N, INT4.loop_limits(), scale_bits_B, packed, squares_B)
    return squared, room.tobytes(), squares_B.tolist()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.sampled_from([1, 2, 7, 64]),
    size=st.sampled_from([1e-44, 1e-38, 1e-20, 1.0, 1e19, 1e37]),
)
def test_bytes_match_the_host(seed: int, blocks: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    powers_N = np.exp2(rng.integers(-20, 3, 64 * blocks))
    anchor_N = (rng.standard_normal(64 * blocks) * powers_N * size).astype(np.float32)
    local_N = (anchor_N + rng.standard_normal(64 * blocks) * 0.1 * size).astype(np.float32)
    local_N[:64:3] = anchor_N[:64:3]
    there, here = encoded_there(anchor_N, local_N), encoded_here(anchor_N, local_N)
    assert there[1:] == here[1:]
    assert there[0] == pytest.approx(here[0], rel=1e-5)


@pytest.mark.parametrize("anchor", [0.0, -0.0, 1e-45, 3.4e38])
def test_a_span_of_one_repeated_number_encodes_alike(anchor: float) -> None:
    anchor_N = np.full(128, anchor, np.float32)
    for local in (anchor, 0.0, -0.0):
        local_N = np.full(128, local, np.float32)
        assert encoded_there(anchor_N, local_N)[1:] == encoded_here(anchor_N, local_N)[1:]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 191])
def test_a_vector_that_is_not_finite_has_no_length(wrong: float, place: int) -> None:
    anchor_N, local_N = np.ones(192, np.float32), np.zeros(192, np.float32)
    local_N[place] = wrong
    assert math.isnan(encoded_there(anchor_N, local_N)[0])


def test_a_difference_beyond_float32_has_no_length() -> None:
    assert math.isnan(encoded_there(np.full(64, 3e38, np.float32), np.full(64, -3e38, np.float32))[0])


def test_a_long_span_is_copied_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    anchor_N, local_N = (rng.standard_normal(64 * 11, dtype=np.float32) for _ in range(2))
    whole = encoded_there(anchor_N, local_N)
    monkeypatch.setattr(device, "CHUNK_ELEMENTS", 256)
    parted = encoded_there(anchor_N, local_N)
    assert parted[1:] == whole[1:] == encoded_here(anchor_N, local_N)[1:]
    assert parted[0] == pytest.approx(whole[0], rel=1e-12)


def test_neither_vector_is_changed() -> None:
    anchor_N, local_N = np.linspace(-1, 1, 128, dtype=np.float32), torch.linspace(0, 1, 128)
    before = anchor_N.tobytes(), local_N.numpy().tobytes()
    encoded(device.contribute4_there, anchor_N, local_N)
    assert (anchor_N.tobytes(), local_N.numpy().tobytes()) == before


def test_a_device_with_one_wrong_operation_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    loops, here = compiled_loops(), torch.device("cpu")
    assert loops is not None
    assert device.agrees(here, loops.contribute4, INT4.loop_limits())
    monkeypatch.setattr(torch.Tensor, "amax", lambda tensor, dim: tensor.select(dim, 0))
    assert not device.agrees(here, loops.contribute4, INT4.loop_limits())


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_the_local_gpu_agrees(name: str) -> None:
    if not getattr(torch, name if name == "cuda" else "mps").is_available():
        pytest.skip(f"no {name} here")
    loops = compiled_loops()
    assert loops is not None
    assert device.agrees(torch.device(name), loops.contribute4, INT4.loop_limits())


def test_a_factor_shortens_the_encoded_vector() -> None:
    rng = np.random.default_rng(9)
    anchor_N, local_N = (rng.standard_normal(256, dtype=np.float32) for _ in range(2))
    half = encoded(partial(device.contribute4_there, factor=np.float32(0.5)), anchor_N, torch.tensor(local_N))
    assert half[0] == pytest.approx(encoded_here(anchor_N, local_N)[0] / 4, rel=1e-5)
    assert half[1:] == encoded_here(anchor_N * np.float32(0.5), local_N * np.float32(0.5))[1:]


def test_the_default_dtype_of_torch_does_not_matter() -> None:
    anchor_N, local_N = np.linspace(-1, 1, 128, dtype=np.float32), np.zeros(128, np.float32)
    there = torch.tensor(local_N)
    torch.set_default_dtype(torch.float16)
    try:
        found = encoded(device.contribute4_there, anchor_N, there)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[1:] == encoded_here(anchor_N, local_N)[1:]
