"""Claims about fragments and spans: every element is in exactly one of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.fragments import Fragment, TensorSlot, plan_fragments, plan_spans, suited_spans

SIZES = st.lists(st.integers(min_value=1, max_value=100_000), min_size=1, max_size=40)


def named(sizes: list[int]) -> list[tuple[str, int]]:
    return [(f"tensor {position}", elements) for position, elements in enumerate(sizes)]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[str, int]], int]:
    sizes = draw(SIZES)
    return named(sizes), draw(st.integers(min_value=1, max_value=len(sizes)))


@settings(deadline=None)
@given(plan=plans())
def test_every_tensor_is_in_exactly_one_fragment(plan: tuple[list[tuple[str, int]], int]) -> None:
    sizes, num_fragments = plan
    fragments = plan_fragments(sizes, num_fragments)
    dealt = [(slot.name, slot.elements) for fragment in fragments for slot in fragment.tensors]
    assert sorted(dealt) == sorted(sizes)
    assert [fragment.index for fragment in fragments] == list(range(num_fragments))
    assert all(fragment.tensors for fragment in fragments)


@settings(deadline=None)
@given(plan=plans())
def test_every_element_of_a_fragment_belongs_to_exactly_one_tensor(plan: tuple[list[tuple[str, int]], int]) -> None:
    for fragment in plan_fragments(*plan):
        stops = [0, *(slot.stop for slot in fragment.tensors)]
        assert [slot.start for slot in fragment.tensors] == stops[:-1]
        assert fragment.elements == stops[-1]


@settings(deadline=None)
@given(plan=plans())
def test_fragments_are_balanced_up_to_one_tensor(plan: tuple[list[tuple[str, int]], int]) -> None:
    loads = [fragment.elements for fragment in plan_fragments(*plan)]
    assert max(loads) - min(loads) <= max(elements for _, elements in plan[0])


@settings(deadline=None)
@given(plan=plans())
def test_tensors_of_a_fragment_keep_the_order_of_the_model(plan: tuple[list[tuple[str, int]], int]) -> None:
    order = {name: position for position, (name, _) in enumerate(plan[0])}
    for fragment in plan_fragments(*plan):
        positions = [order[slot.name] for slot in fragment.tensors]
        assert positions == sorted(positions)


def test_ties_are_broken_by_the_order_of_the_model_and_the_lower_index() -> None:
    assert plan_fragments([("a", 2), ("b", 5), ("c", 2), ("d", 2)], 2) == (
        Fragment(index=0, tensors=(TensorSlot(name="b", elements=5, start=0),), elements=5),
        Fragment(
            index=1,
            tensors=tuple(TensorSlot(name=name, elements=2, start=2 * place) for place, name in enumerate("acd")),
            elements=6,
        ),
    )


@pytest.mark.parametrize(
    ("sizes", "num_fragments", "text"),
    [
        ([("a", 1)], 0, "cannot split tensors into 0 fragments; expected at least 1"),
        ([("a", 1)], 2, "cannot split 1 tensors into 2 fragments; choose at most 1 fragments"),
        ([], 1, "cannot split 0 tensors into 1 fragments"),
        ([("a", 1), ("b", 0)], 1, "tensor 'b' has 0 elements; expected at least 1"),
        ([("a", 1), ("a", 1)], 1, "tensor 'a' is listed twice"),
    ],
)
def test_tensors_that_cannot_be_split_are_refused_with_a_reason(
    sizes: list[tuple[str, int]], num_fragments: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        plan_fragments(sizes, num_fragments)


@settings(deadline=None)
@given(
    elements=st.integers(min_value=1, max_value=10**9),
    num_spans=st.integers(min_value=1, max_value=200),
    block_elements=st.sampled_from([1, 2, 64, 256]),
)
def test_every_element_is_in_exactly_one_span(elements: int, num_spans: int, block_elements: int) -> None:
    spans = plan_spans(elements, num_spans, block_elements)
    assert spans[0][0] == 0
    assert spans[-1][1] == elements
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert all(start < stop for start, stop in spans)
    assert all(start % block_elements == 0 for start, _ in spans)


@settings(deadline=None)
@given(
    elements=st.integers(min_value=1, max_value=10**9),
    num_spans=st.integers(min_value=1, max_value=200),
    block_elements=st.sampled_from([1, 2, 64, 256]),
)
def test_spans_differ_by_at_most_one_block(elements: int, num_spans: int, block_elements: int) -> None:
    spans = plan_spans(elements, num_spans, block_elements)
    assert len(spans) == min(num_spans, -(-elements // block_elements))
    blocks = [-(-(stop - start) // block_elements) for start, stop in spans]
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize(
    ("elements", "num_spans", "block_elements", "text"),
    [(0, 1, 1, "elements = 0"), (1, 0, 1, "num_spans = 0"), (1, 1, 0, "block_elements = 0")],
)
def test_empty_plans_of_spans_are_refused(elements: int, num_spans: int, block_elements: int, text: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot plan spans with {text}; expected at least 1"):
        plan_spans(elements, num_spans, block_elements)


@pytest.mark.parametrize(
    ("elements", "columns", "spans"),
    [
        (10_000_000, 4, 4),
        (16_000_000, 4, 8),
        (10_000_000, 1, 3),
        (100_000_000, 4, 25),
        (1000, 16, 16),
        (1 << 40, 4, 2048),
    ],
)
def test_each_peer_of_a_row_gets_a_span_or_two_and_none_is_too_long(elements: int, columns: int, spans: int) -> None:
    assert suited_spans(elements, columns) == spans
