"""The public names of the package can be imported."""

from __future__ import annotations

import pytest

import p2p_diloco


@pytest.mark.parametrize("name", p2p_diloco.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(p2p_diloco, name) is not None
