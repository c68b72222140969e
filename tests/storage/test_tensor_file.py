"""A tensor file is an ordinary safetensors file, and writing it holds no extra memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.storage.checkpoint import write_tensors


def vectors(elements: int) -> dict[str, Vector]:
    rng = np.random.Generator(np.random.Philox(key=1))
    return {name: rng.standard_normal(elements + place, dtype=np.float32) for place, name in enumerate("abc")}


def write(path: Path, written: dict[str, Vector], text: str = "", longest: str = "") -> None:
    elements = {name: len(vector_N) for name, vector_N in written.items()}
    write_tensors(
        path,
        elements,
        iter(written.values()),
        metadata=lambda: {"text": text},
        longest_metadata={"text": longest or text},
    )


@pytest.mark.parametrize("longest", ["", "much longer than any of the texts"])
@pytest.mark.parametrize("text", ["", "x", "é" * 2, '{"a": [1, "b"]}'])
def test_the_safetensors_library_reads_the_file(tmp_path: Path, text: str, longest: str) -> None:
    written = {**vectors(1000), "empty": np.empty(0, np.float32)}
    write(tmp_path / "file", written, text, longest)
    with safe_open(tmp_path / "file", framework="numpy") as file:
        assert file.metadata() == {"text": text}
    read = load_file(tmp_path / "file")
    assert read.keys() == written.keys()
    assert all(np.array_equal(read[name], vector_N) for name, vector_N in written.items())
    assert all(read[name].dtype == np.float32 for name in read)


def test_metadata_longer_than_its_room_fails_an_assertion(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        write(tmp_path / "file", vectors(10), "x" * 50, "x")


def test_nothing_is_copied_and_one_vector_is_needed_at_a_time(tmp_path: Path) -> None:
    def come() -> Iterator[Vector]:
        for place in range(8):
            yield np.full(1 << 18, place, np.float32)

    names = {str(place): 1 << 18 for place in range(8)}
    tracemalloc.start()
    try:
        write_tensors(tmp_path / "file", names, come(), metadata=dict, longest_metadata={})
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()
    assert [read_N[0] for _, read_N in sorted(load_file(tmp_path / "file").items())] == list(range(8))


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write(tmp_path / "gone" / "file", vectors(1))
