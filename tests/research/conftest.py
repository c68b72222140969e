"""Make the learners and the recorded run of this folder importable, and the stages of the peer tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "session"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text long enough for a few stretches."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = [f"line {number} of a text that repeats itself, as most do\n" for number in range(40_000)]
    path.write_text("".join(words))
    return str(path)
