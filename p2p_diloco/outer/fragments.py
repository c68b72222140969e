"""Fragments and spans: assign tensors and their elements to units of exchange.

A fragment is a set of whole tensors and the unit of scheduling; a span is a slice of a fragment's flat vector on
codec-block borders and the unit of ownership. Every peer derives both from the manifest alone, so the computation is
deterministic: integers only, no hash order, defined ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2p_diloco.errors import ConfigError

SHORT_SPAN, LARGEST_SPAN = 2_000_000, 4_000_000
"""In elements. A span has a fixed cost of about 3 ms per peer, a tenth of the work on two million elements."""
MOST_SPANS = 2048
"""Maximum spans of a fragment; beyond that, spans are longer than `LARGEST_SPAN`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """Position of one tensor in its fragment's flat vector.

    Attributes:
        name: the tensor's name in the model.
        elements: its number of elements.
        start: offset of its first element in the fragment.
    """

    name: str
    elements: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A set of whole tensors that is exchanged in one round.

    Attributes:
        index: index of the fragment in the run; it is due in rounds r with r mod P = index.
        tensors: its tensors in model order, contiguous from offset 0.
        elements: total number of elements.
    """

    index: int
    tensors: tuple[TensorSlot, ...]
    elements: int


def plan_fragments(sizes: Sequence[tuple[str, int]], num_fragments: int) -> tuple[Fragment, ...]:
    """Distribute whole tensors over balanced fragments, every tensor exactly once.

    Greedy bin packing: the largest remaining tensor goes to the smallest fragment (Graham 1969: the largest fragment is
    at most 4/3 of the optimum). Ties go to the earlier tensor and the lower fragment index, so that all peers agree.

    Args:
        sizes: (name, elements) of every tensor, in model order.
        num_fragments: P.
    Returns:
        The fragments by index, none empty.
    Raises:
        ConfigError: there are fewer tensors than fragments, a tensor is empty or duplicated, or `num_fragments` < 1.
    """
    _check_sizes(sizes, num_fragments)
    loads = [0] * num_fragments
    dealt: list[list[int]] = [[] for _ in range(num_fragments)]
    for position in sorted(range(len(sizes)), key=lambda position: (-sizes[position][1], position)):
        lightest = loads.index(min(loads))
        dealt[lightest].append(position)
        loads[lightest] += sizes[position][1]
    return tuple(
        _lay_out(index, [sizes[position] for position in sorted(dealt[index])]) for index in range(num_fragments)
    )


def plan_spans(elements: int, num_spans: int, block_elements: int) -> tuple[tuple[int, int], ...]:
    """Split a fragment's flat vector into spans on codec-block borders, every element exactly once.

    Span lengths differ by at most one block (the last block may be short). A fragment with fewer blocks than
    `num_spans` has one span per block.

    Args:
        elements: length of the flat vector.
        num_spans: desired number of spans.
        block_elements: elements per codec block; every border but the last stop is a multiple of it.
    Returns:
        (start, stop) of each span, in order.
    Raises:
        ConfigError: an argument is less than 1.
    """
    for name, value in (("elements", elements), ("num_spans", num_spans), ("block_elements", block_elements)):
        if value < 1:
            raise ConfigError(f"cannot plan spans with {name} = {value}; expected at least 1")
    num_blocks = -(-elements // block_elements)
    count = min(num_spans, num_blocks)
    borders = [index * num_blocks // count * block_elements for index in range(count)] + [elements]
    return tuple(pairwise(borders))


def suited_spans(elements: int, columns: int) -> int:
    """Return the best number of spans for a fragment.

    One per peer of a row; two if they are not short, so that a peer that joins or leaves changes little of what each
    reduces. More if they would be long, up to the manifest's limit.

    Args:
        elements: elements of the fragment.
        columns: peers of a row.
    """
    are_short = elements < 2 * columns * SHORT_SPAN
    return min(MOST_SPANS, max(columns if are_short else 2 * columns, -(-elements // LARGEST_SPAN)))


def _check_sizes(sizes: Sequence[tuple[str, int]], num_fragments: int) -> None:
    if num_fragments < 1:
        raise ConfigError(f"cannot split tensors into {num_fragments} fragments; expected at least 1")
    if num_fragments > len(sizes):
        raise ConfigError(
            f"cannot split {len(sizes)} tensors into {num_fragments} fragments; choose at most {len(sizes)} fragments"
        )
    names = set()
    for name, elements in sizes:
        if elements < 1:
            raise ConfigError(f"tensor {name!r} has {elements} elements; expected at least 1")
        if name in names:
            raise ConfigError(f"tensor {name!r} is listed twice; list a tied tensor once")
        names.add(name)


def _lay_out(index: int, sizes: Sequence[tuple[str, int]]) -> Fragment:
    slots = []
    start = 0
    for name, elements in sizes:
        slots.append(TensorSlot(name=name, elements=elements, start=start))
        start += elements
    return Fragment(index=index, tensors=tuple(slots), elements=start)
