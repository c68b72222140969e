from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from p2p_diloco.app.models.model import DecoderModel, build_model
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.errors import ConfigError
from p2p_diloco.island.parameters import LocalParameters, first_not_finite, lay_end_to_end, sizes
from p2p_diloco.outer.fragments import plan_fragments, plan_spans


@pytest.fixture
def model(shape: ModelShape) -> DecoderModel:
    return build_model(shape, seed=4)


@pytest.fixture
def local(model: DecoderModel) -> LocalParameters:
    return LocalParameters(model, plan_fragments(sizes(model), 3))


def test_sizes_are_those_of_the_model_in_its_order(model: DecoderModel) -> None:
    expected = [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    assert sizes(model) == expected
    assert sum(elements for _, elements in expected) == model.shape.num_parameters


def test_a_tied_tensor_counts_once_and_a_frozen_one_does_not_count() -> None:
    tied = nn.ModuleList((nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)))
    tied[1].weight = tied[0].weight
    tied[2].weight.requires_grad_(False)
    assert sizes(tied) == [("0.weight", 16)]


def test_every_element_of_the_model_is_in_exactly_one_fragment(model: DecoderModel, local: LocalParameters) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 10_000 * index)
    expected = np.concatenate([parameter.detach().flatten().numpy() for parameter in model.parameters()])
    assert np.array_equal(np.sort(np.concatenate(local.read_all())), np.sort(expected))


def test_a_fragment_is_its_tensors_end_to_end(model: DecoderModel, local: LocalParameters) -> None:
    tensors = dict(model.named_parameters())
    for fragment in local.fragments:
        vector_N = local.read(fragment.index)
        assert vector_N.shape == (fragment.elements,)
        for slot in fragment.tensors:
            piece_N = vector_N[slot.start : slot.start + slot.elements]
            assert np.array_equal(piece_N, tensors[slot.name].detach().flatten().numpy())


def test_the_end_of_a_tensor_of_more_than_two_to_the_31_elements_is_read_and_written(tmp_path: Path) -> None:
    elements = 2**31 + 300  # a sparse file: pages that are never touched take no memory
    table = np.memmap(tmp_path / "embedding", np.float32, "w+", shape=(elements,))
    model = nn.Module()
    model.register_parameter("gain", nn.Parameter(torch.ones(7)))
    model.register_parameter("embedding", nn.Parameter(torch.from_numpy(table)))
    local = LocalParameters(model, plan_fragments(sizes(model), 1))
    (whole,) = local.fragments
    spans = plan_spans(whole.elements, 700, 128)
    start, stop = spans[-1]
    assert start < 2**31 < stop
    values_N = np.arange(1, stop - start + 1, dtype=np.float32)
    local.write(0, start, stop, values_N)
    assert np.array_equal(local.read(0, start, stop), values_N)
    assert np.array_equal(table[elements - 300 :], values_N[-300:])  # "gain" is before it
    assert np.array_equal(local.read(0, 0, 8), np.array([1.0] * 7 + [0.0], np.float32))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_written_slice_is_read_back_and_nothing_else_changes(local: LocalParameters, data: st.DataObject) -> None:
    fragment = local.fragments[data.draw(st.integers(0, 2))]
    start = data.draw(st.integers(0, fragment.elements))
    stop = data.draw(st.integers(start, fragment.elements))
    before = local.read_all()
    values_N = np.random.default_rng(start + stop).standard_normal(stop - start).astype(np.float32)
    local.write(fragment.index, start, stop, values_N)
    assert np.array_equal(local.read(fragment.index, start, stop), values_N)
    before[fragment.index][start:stop] = values_N
    for expected_N, vector_N in zip(before, local.read_all(), strict=True):
        assert np.array_equal(expected_N, vector_N)


def test_read_returns_a_copy(local: LocalParameters) -> None:
    first_N = local.read(0)
    expected_N = first_N.copy()
    first_N[:] = 7.0
    assert np.array_equal(local.read(0), expected_N)


def test_a_slice_of_one_tensor_is_a_copy_too(local: LocalParameters) -> None:
    first_N = local.read(0, 0, 1)
    first_N[:] = 7.0
    assert local.read(0, 0, 1)[0] != 7.0


def test_written_values_are_copied_and_may_be_read_only(local: LocalParameters) -> None:
    values_N = np.ones(5, np.float32)
    values_N.flags.writeable = False
    local.write(1, 2, 7, values_N)
    values_N.flags.writeable = True
    values_N[:] = 9.0
    assert np.array_equal(local.read(1, 2, 7), np.ones(5, np.float32))


def test_tensors_laid_end_to_end_give_views_of_slices_across_them(model: DecoderModel) -> None:
    fragments = plan_fragments(sizes(model), 3)
    apart = LocalParameters(build_model(model.shape, seed=4), fragments)
    before = [id(parameter) for parameter in model.parameters()]
    lay_end_to_end(model, fragments)
    local = LocalParameters(model, fragments)
    assert [id(parameter) for parameter in model.parameters()] == before
    for fragment in fragments:
        assert len(fragment.tensors) > 1
        assert np.array_equal(local.read(fragment.index), apart.read(fragment.index))
        view_N = local.view(fragment.index, 1, fragment.elements)
        local.write(fragment.index, 0, fragment.elements, np.full(fragment.elements, 7.0, np.float32))
        assert (view_N == 7.0).all()
    assert all((parameter == 7.0).all() for parameter in model.parameters())
    model.loss(torch.zeros(1, 5, dtype=torch.int64)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not all((local.view(fragment.index, 0, fragment.elements) == 7.0).all() for fragment in fragments)


def test_tensors_of_several_types_are_not_moved() -> None:
    model = nn.Module()
    model.register_parameter("wide", nn.Parameter(torch.ones(3)))
    model.register_parameter("narrow", nn.Parameter(torch.full((2,), 2.0, dtype=torch.bfloat16)))
    fragments = plan_fragments(sizes(model), 1)
    lay_end_to_end(model, fragments)
    assert model.narrow.dtype == torch.bfloat16
    assert LocalParameters(model, fragments).read(0).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_loading_copies_one_model_into_another(shape: ModelShape, local: LocalParameters) -> None:
    other = build_model(shape, seed=5)
    LocalParameters(other, local.fragments).load_flat(local.read_all())
    mine = LocalParameters(build_model(shape, seed=4), local.fragments).read_all()
    for expected_N, vector_N in zip(mine, LocalParameters(other, local.fragments).read_all(), strict=True):
        assert np.array_equal(expected_N, vector_N)


def test_writing_keeps_gradients_and_identity_of_tensors(model: DecoderModel, local: LocalParameters) -> None:
    model.loss(torch.zeros(1, 5, dtype=torch.int64)).backward()
    before = [(id(parameter), parameter.grad) for parameter in model.parameters()]
    local.load_flat([vector_N + 1.0 for vector_N in local.read_all()])
    assert [(id(parameter), parameter.grad) for parameter in model.parameters()] == before


@pytest.mark.parametrize(
    "values",
    [np.zeros(4, np.float32), np.zeros((5, 1), np.float32), np.zeros(5, np.float64)],
    ids=["too few", "wrong axes", "wrong type"],
)
def test_values_of_another_shape_or_type_are_a_bug_of_the_caller(local: LocalParameters, values: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected float32 of \(5,\)"):
        local.write(0, 0, 5, values)


def test_a_slice_outside_the_fragment_is_a_bug_of_the_caller(local: LocalParameters) -> None:
    elements = local.fragments[0].elements
    with pytest.raises(ValueError, match=rf"elements 0 to {elements + 1} are not within fragment 0 of {elements}"):
        local.read(0, 0, elements + 1)


def test_an_empty_slice_is_an_empty_vector(local: LocalParameters) -> None:
    assert local.read(0, 3, 3).shape == (0,)


def test_fragments_of_another_model_are_refused(shape: ModelShape, local: LocalParameters) -> None:
    other = ModelShape(layers=1, width=16, heads=2, feed_forward=24, context=12)
    with pytest.raises(ConfigError, match=r"expected the same names and sizes; is this the model of the run\?"):
        LocalParameters(build_model(other, seed=0), local.fragments)


def test_a_model_in_half_precision_is_read_as_float32(shape: ModelShape) -> None:
    model = build_model(shape, seed=4).to(torch.bfloat16)
    local = LocalParameters(model, plan_fragments(sizes(model), 2))
    vector_N = local.read(0)
    assert vector_N.dtype == np.float32
    local.write(0, 0, vector_N.size, vector_N)
    assert np.array_equal(local.read(0), vector_N)


def test_add_changes_the_tensors_in_place(local: LocalParameters) -> None:
    before_N = local.read(1)
    shift_N = np.linspace(-1.0, 1.0, len(before_N) - 8, dtype=np.float32)
    local.add(1, 3, len(before_N) - 5, shift_N)
    expected_N = before_N.copy()
    expected_N[3:-5] += shift_N
    assert local.read(1).tobytes() == expected_N.tobytes()


def test_added_values_must_have_the_length_of_the_slice(local: LocalParameters) -> None:
    with pytest.raises(ValueError, match=r"expected float32 of \(4,\)"):
        local.add(0, 0, 4, np.zeros(5, np.float32))


def test_a_contiguous_slice_is_a_view_on_its_device(model: DecoderModel) -> None:
    fragments = plan_fragments(sizes(model), 3)
    lay_end_to_end(model, fragments)
    local = LocalParameters(model, fragments)
    here = local.on_device(0, 2, fragments[0].elements - 1)
    assert here is not None
    with torch.no_grad():
        here.zero_()
    assert not local.read(0)[2:-1].any()
    assert local.read(0)[0] != 0


def test_a_slice_across_separate_tensors_has_no_view(model: DecoderModel, local: LocalParameters) -> None:
    longest = max(local.fragments, key=lambda fragment: len(fragment.tensors))
    assert len(longest.tensors) > 1
    assert local.on_device(longest.index, 0, longest.elements) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_tensor_that_is_not_finite_is_named(value: float) -> None:
    tensors = {
        "huge": torch.full((5, 3), 3e38),
        "empty": torch.empty(0),
        "small": torch.zeros(7),
        "last": torch.ones(2),
    }
    assert first_not_finite(tensors) == "", "finite, although the norm of all overflows"
    tensors["small"][3] = tensors["last"][1] = value
    assert first_not_finite(tensors) == "small"
    assert first_not_finite({}) == ""
