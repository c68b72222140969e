from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2p_diloco.kernels.choice import loops_of, numpy_alone


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each claim about a codec with the compiled loops and with NumPy alone."""
    if request.param == "numpy":
        with numpy_alone():
            assert loops_of("blocks") is None
            yield
    else:
        assert loops_of("blocks") is not None
        yield
