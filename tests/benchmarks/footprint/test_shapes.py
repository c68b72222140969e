"""Shapes of any size keep the proportions of the built-in models."""

from __future__ import annotations

import pytest

from benchmarks.footprint.shapes import shape_of
from p2p_diloco.config.decoder import model_shape
from p2p_diloco.errors import ConfigError


@pytest.mark.parametrize("parameters", [200_000, 1_000_000, 10_000_000, 50_000_000, 125_000_000, 1_000_000_000])
def test_a_shape_has_about_as_many_parameters_as_asked_for(parameters: int) -> None:
    assert shape_of(parameters).num_parameters == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize(("size", "parameters"), [("small", 10_000_000), ("base", 125_000_000)])
def test_where_there_is_a_built_in_size_it_is_nearly_that(size: str, parameters: int) -> None:
    ours, built_in = shape_of(parameters), model_shape(size)
    assert (ours.layers, ours.width, ours.heads) == (built_in.layers, built_in.width, built_in.heads)


def test_what_no_machine_trains_is_refused() -> None:
    with pytest.raises(ConfigError, match="--parameters names 10; expected 100,000 to 1,000,000,000"):
        shape_of(10)
