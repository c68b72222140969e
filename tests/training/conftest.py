from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from p2p_diloco.training.data import Corpus, open_corpus
from p2p_diloco.training.model import ModelShape


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shape() -> ModelShape:
    """Return the shape of a model small enough to build, step and evaluate in milliseconds."""
    return ModelShape(layers=2, width=16, heads=2, feed_forward=24, context=12)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Return a corpus of words of a small language, 40 kB, the same in every run."""
    words = ["anchor", "island", "round", "roster", "entry", "void", "span", "\n"]
    generator = random.Random(5)
    path = tmp_path / "words.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(7_000)))
    return open_corpus(path)
