"""Settings for all tests, and what is left to `make test-long`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import closing
from inspect import iscoroutinefunction, signature
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


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    """Yield what runs a test that is a coroutine: in virtual time, from shortly before round 0 of a simulation."""

    def make_loop() -> asyncio.AbstractEventLoop:
        from simulator.process import SimulationLoop  # only where a test needs it
        from simulator.simulation import START_SECONDS

        return SimulationLoop(START_SECONDS)

    with closing(asyncio.Runner(loop_factory=make_loop)) as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on the loop of its `runner`."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    pyfuncitem.funcargs["runner"].run(pyfuncitem.obj(**given))
    return True


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Return a corpus of words of a small language, 40 kB, the same in every run."""
    words = ["anchor", "island", "round", "roster", "entry", "void", "span", "\n"]
    generator = random.Random(5)
    path = tmp_path / "words.txt"
    path.write_text(" ".join(generator.choice(words) for _ in range(7_000)))
    return open_corpus(path)
