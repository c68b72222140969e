"""Tensors as the bytes of a safetensors file, which are the same for the same tensors and facts."""

from __future__ import annotations

import json
from collections.abc import Mapping

from safetensors.torch import save
from torch import Tensor

_LENGTH_BYTES = 8


def tensor_bytes(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """Return a safetensors file. Checksums of two files show whether their tensors are equal.

    safetensors writes `facts` in a random order; here they are in the order in which they are given.

    Args:
        tensors: by name; none share memory.
        facts: the file's metadata, besides its format.
    """
    facts = {"format": "pt", **facts}
    raw = save(dict(tensors), metadata=facts)
    begin = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    header = json.loads(raw[_LENGTH_BYTES:begin])
    ordered = json.dumps({**header, "__metadata__": facts}, separators=(",", ":")).encode()
    ordered += b" " * (-len(ordered) % _LENGTH_BYTES)
    return len(ordered).to_bytes(_LENGTH_BYTES, "little") + ordered + memoryview(raw)[begin:]
