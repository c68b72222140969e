from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2p_diloco.codec.vectors import compiled_loops, numpy_alone


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each claim about a codec with the compiled loops and with NumPy alone."""
    if request.param == "numpy":
        with numpy_alone():
            assert compiled_loops() is None
            yield
    else:
        assert compiled_loops() is not None
        yield
