"""Settings for all tests, and what is left to `make test-long`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
