"""Writing vectors to a safetensors file from where they lie.

The library's own writer first copies all of them into one list of bytes: as much memory again as φ and m take. The
format is plain: eight bytes that say how long the header is, the header as JSON, then the bytes of each tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from p2p_diloco.outer.vector import Vector

_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Vector], metadata: Mapping[str, str]) -> None:
    """Write float32 vectors under their names, little-endian, in the order of the mapping.

    Raises:
        OSError: the disk refuses; part of the file may be there.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, vector_N in tensors.items():
        begin, end = end, end + 4 * len(vector_N)
        header[name] = {"dtype": "F32", "shape": [len(vector_N)], "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for vector_N in tensors.values():
            file.write(np.ascontiguousarray(vector_N, dtype="<f4").data.cast("B"))
