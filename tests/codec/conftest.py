from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2p_diloco.kernels.choice import block_kernels, numpy_alone


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each claim about a codec with the compiled loops and with NumPy alone."""
    if request.param == "numpy":
        with numpy_alone():
            assert block_kernels() is None
            yield
    else:
        assert block_kernels() is not None
        yield
