"""What is written is a safetensors file like any other, and costs no copy of what it holds."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from p2p_diloco.trainer.tensor_file import write_tensors


def vectors(elements: int) -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.Philox(key=1))
    return {name: rng.standard_normal(elements + place, dtype=np.float32) for place, name in enumerate("abc")}


@pytest.mark.parametrize("text", ["", "x", "é" * 7, '{"a": [1, "b"]}'])
def test_the_library_reads_what_was_written(tmp_path: Path, text: str) -> None:
    written = {**vectors(1000), "empty": np.empty(0, np.float32)}
    write_tensors(tmp_path / "file", written, {"text": text})
    with safe_open(tmp_path / "file", framework="numpy") as file:
        assert file.metadata() == {"text": text}
    read = load_file(tmp_path / "file")
    assert read.keys() == written.keys()
    assert all(np.array_equal(read[name], vector_N) for name, vector_N in written.items())
    assert all(read[name].dtype == np.float32 for name in read)


def test_nothing_is_copied(tmp_path: Path) -> None:
    written = vectors(1 << 20)
    tracemalloc.start()
    try:
        write_tensors(tmp_path / "file", written, {})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_tensors(tmp_path / "gone" / "file", vectors(1), {})
