"""Choose the precision of matrix products on a device; parameters are float32 everywhere."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Literal

import torch

PrecisionSetting = Literal["auto", "float32", "bfloat16", "float16"]
_FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability of Ampere. Older NVIDIA GPUs emulate bfloat16, and are fast in float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Precision of the matrix products of an island.

    Attributes:
        dtype: type that autocast uses; None: float32, without autocast.
        scales: whether losses are scaled, because small gradients are zero in float16.
        reason: why, for people.
    """

    dtype: torch.dtype | None
    scales: bool
    reason: str

    @property
    def name(self) -> str:
        """The type as settings name it."""
        return str(self.dtype).removeprefix("torch.") if self.dtype is not None else "float32"

    def __str__(self) -> str:
        return f"matrix products in {self.name} ({self.reason})"


def choose_precision(
    agreed: str, own: PrecisionSetting, device: torch.device, capability: tuple[int, int] | None = None
) -> Precision:
    """Choose the precision for a device.

    Args:
        agreed: the manifest's precision. With "float32" an island may not use less.
        own: setting of this machine.
        capability: compute capability of a CUDA device; None on ROCm and other devices.
    """
    if own != "auto":
        return _named(own, "chosen with --precision")
    if agreed == "float32":
        return _named("float32", "set by the run")
    if device.type == "cuda" and capability is not None and capability < _FIRST_WITH_BFLOAT16:
        return _named("float16", "this GPU has no fast bfloat16")
    if device.type == "cuda":
        return _named("bfloat16", "set by the run")
    if device.type == "mps":
        return _named("float32", "less was not tried on Apple GPUs; see --precision")
    if device.type == "cpu" and not _has_fast_bfloat16():
        return _named("float32", "this processor has no instructions for bfloat16")
    return _named("bfloat16", "set by the run")


def _named(name: str, reason: str) -> Precision:
    dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return Precision(dtype=dtype, scales=name == "float16", reason=reason)


def _has_fast_bfloat16() -> bool:
    """Return whether this processor has instructions for bfloat16; others emulate it slowly."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(check() for check in checks if check is not None)
    is_there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(is_there and torch.ops.mkldnn._is_mkldnn_bf16_supported())
