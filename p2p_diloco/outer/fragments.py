"""Fragments and spans: which tensor, and which element, belongs to which unit of exchange.

A fragment is a set of whole tensors and the unit of scheduling; a span is a slice of a fragment's flat vector on
codec-block borders and the unit of ownership. Every peer derives both from the manifest alone, so both are arithmetic
on sizes and names: no hashing order, no floats, no ties left to chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2p_diloco.errors import ConfigError

SHORT_SPAN, LARGEST_SPAN = 2_000_000, 4_000_000
"""Elements. A span costs each peer some 3 ms whatever its length, a tenth of what the work on two million does."""
MOST_SPANS = 2048
"""Of a fragment; beyond, spans are longer than `LARGEST_SPAN`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """Where one tensor lies in its fragment's flat vector.

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
        """Offset behind the tensor's last element."""
        return self.start + self.elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A set of whole tensors that is exchanged in one round.

    Attributes:
        index: which fragment of the run; it is due in rounds r with r mod P = index.
        tensors: its tensors in model order, end to end from offset 0.
        elements: their elements together.
    """

    index: int
    tensors: tuple[TensorSlot, ...]
    elements: int


def plan_fragments(sizes: Sequence[tuple[str, int]], num_fragments: int) -> tuple[Fragment, ...]:
    """Deal whole tensors into balanced fragments, every tensor exactly once.

    Greedy bin packing: the largest tensor left goes to the fragment that is smallest so far (Graham 1969: the largest
    fragment is at most 4/3 of the best possible). Of equal tensors the earlier goes first, of equal fragments the lower
    index takes it, so that all peers deal alike.

    Args:
        sizes: (name, elements) of every tensor, in model order.
        num_fragments: P.
    Returns:
        The fragments by index, none of them empty.
    Raises:
        ConfigError: fewer tensors than fragments, an empty or a doubled tensor, or no fragment at all.
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
    """Cut a fragment's flat vector into spans on codec-block borders, every element exactly once.

    Spans differ by at most one block (the last block may be short). A fragment with fewer blocks than `num_spans` has
    one span per block.

    Args:
        elements: length of the flat vector.
        num_spans: spans wanted.
        block_elements: elements per codec block; every border but the last stop is a multiple of it.
    Returns:
        (start, stop) of each span, in order.
    Raises:
        ConfigError: an argument is less than 1.
    """
    for name, value in (("elements", elements), ("num_spans", num_spans), ("block_elements", block_elements)):
        if value < 1:
            raise ConfigError(f"cannot cut spans with {name} = {value}; expected at least 1")
    num_blocks = -(-elements // block_elements)
    count = min(num_spans, num_blocks)
    borders = [index * num_blocks // count * block_elements for index in range(count)] + [elements]
    return tuple(pairwise(borders))


def suited_spans(elements: int, columns: int) -> int:
    """Return into how many spans a fragment is best cut.

    One for each peer of a row. Two where they are not short, so that a peer that comes or goes changes little of what
    each reduces. More where they would be long, but never more than a manifest may ask for.

    Args:
        elements: of the fragment.
        columns: peers of a row.
    """
    are_short = elements < 2 * columns * SHORT_SPAN
    return min(MOST_SPANS, max(columns if are_short else 2 * columns, -(-elements // LARGEST_SPAN)))


def _check_sizes(sizes: Sequence[tuple[str, int]], num_fragments: int) -> None:
    if num_fragments < 1:
        raise ConfigError(f"cannot deal tensors into {num_fragments} fragments; expected at least 1")
    if num_fragments > len(sizes):
        raise ConfigError(
            f"cannot deal {len(sizes)} tensors into {num_fragments} fragments; choose at most {len(sizes)} fragments"
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
