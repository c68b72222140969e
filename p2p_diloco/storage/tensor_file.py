"""Write vectors to a safetensors file without copying them.

The library's writer needs all vectors at once and copies them, which would take as much memory again as φ and m. The
format is simple: eight bytes for the length of the header, the header as JSON (padded with spaces), then each tensor's
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from p2p_diloco.outer.vector import Vector

_LENGTH_BYTES = _ALIGNMENT = 8


def write_tensors(
    path: Path,
    elements: Mapping[str, int],
    vectors: Iterable[Vector],
    *,
    metadata: Callable[[], Mapping[str, str]],
    longest_metadata: Mapping[str, str],
) -> None:
    """Write float32 vectors, little-endian, one at a time.

    Args:
        elements: number of elements by tensor name, in the order of `vectors`.
        metadata: called after all vectors are written.
        longest_metadata: upper bound for the length of `metadata`; this much space is reserved.
    Raises:
        OSError: the write failed; a partial file may remain.
    """
    room = len(_header(elements, longest_metadata))
    room += -room % _ALIGNMENT
    with path.open("wb") as file:
        file.seek(_LENGTH_BYTES + room)
        for vector_N in vectors:
            file.write(np.ascontiguousarray(vector_N, dtype="<f4").data.cast("B"))
        header = _header(elements, metadata()).ljust(room)
        assert len(header) == room, "no metadata is longer than the longest"
        file.seek(0)
        file.write(room.to_bytes(_LENGTH_BYTES, "little") + header)


def _header(elements: Mapping[str, int], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, count in elements.items():
        begin, end = end, end + 4 * count
        header[name] = {"dtype": "F32", "shape": [count], "data_offsets": [begin, end]}
    return json.dumps(header, separators=(",", ":")).encode()
