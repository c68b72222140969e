"""Settings for all tests, and what is left to `make test-long`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from p2p_diloco.app.text.data import Corpus, open_corpus

# No deadline for an example of a property, because its time depends on the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


LAB = [Path(__file__).parent / folder for folder in ("benchmarks", "gauges", "research")]


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow: tests of programs beside the package, and all cases of a story but its first.

    The other cases of a story are the same claim for other seeds and sizes.
    """
    begun = set()
    for item in items:
        story = item.nodeid.partition("[")[0] if item.get_closest_marker("story") else None
        if story in begun or any(folder in item.path.parents for folder in LAB):
            item.add_marker("slow")
        if story is not None:
            begun.add(story)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Return a corpus of words of a small language, 40 kB, the same in every run."""
    words = ["anchor", "island", "round", "roster", "entry", "void", "span", "\n"]
    generator = random.Random(5)
    path = tmp_path / "words.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(7_000)))
    return open_corpus(path)
