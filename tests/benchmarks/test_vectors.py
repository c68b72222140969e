"""The bench of vectors measures what a peer does in a cycle, and switches compiled loops off and on again."""

from __future__ import annotations

import pytest

from benchmarks.vectors import measure_vectors
from p2p_diloco.codec.vectors import compiled_loops


@pytest.mark.parametrize("codec", ["int4", "int8", "float32"])
def test_each_step_of_a_cycle_is_measured(codec: str) -> None:
    steps = measure_vectors(codec_name=codec, elements=4096, repeats=1)
    assert len({step.name for step in steps}) == len(steps) == 15
    for step in steps:
        assert 0.0 <= step.share <= 1.0
        for spread in (step.compiled, step.numpy):
            assert 0.0 < spread.low <= spread.middle <= spread.high
    assert compiled_loops() is not None
