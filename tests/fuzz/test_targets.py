"""The corpus of `python -m tests.fuzz.run`, and a few thousand changes of it, raise nothing but refusals."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.run import CORPUS
from tests.fuzz.targets import TARGETS, feed

INPUTS = sorted(CORPUS.iterdir())
CHANGES = 20


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.name[:12])
def test_an_input_and_changes_of_it_are_read_or_refused(path: Path) -> None:
    data, rng = path.read_bytes(), random.Random(path.name)
    feed(data)
    for _ in range(CHANGES):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(changed) + 1)
            changed[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
        feed(bytes(changed))


def test_the_corpus_has_inputs_of_each_target() -> None:
    assert {path.read_bytes()[0] % len(TARGETS) for path in INPUTS} == set(range(len(TARGETS)))
