"""Reinterpret a float32 as an integer, and back, inside compiled loops."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _bitcast(source: Any, target: Any) -> Any:
    def bitcast(context: Any, value: Any) -> Any:
        def generate(backend: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], backend.get_value_type(target))

        return target(source), generate

    return intrinsic(bitcast)


bits_of = _bitcast(types.float32, types.uint32)
"""float32 -> uint32."""
float_of = _bitcast(types.uint32, types.float32)
"""uint32 -> float32."""
