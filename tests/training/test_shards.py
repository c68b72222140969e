"""Which elements of a sharded fragment each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from p2p_diloco.island.shards import is_sharded, local_part, pieces_held, row_bounds, why_unsupported, with_part
from p2p_diloco.outer.fragments import TensorSlot


@given(st.integers(1, 40), st.integers(1, 9))
def test_rows_are_cut_as_torch_cuts_them(rows: int, num_ranks: int) -> None:
    table = torch.arange(rows)
    chunks = [chunk.tolist() for chunk in table.chunk(num_ranks)]
    chunks += [[] for _ in range(num_ranks - len(chunks))]
    bounds = [row_bounds(rows, rank, num_ranks) for rank in range(num_ranks)]
    assert [table[start:stop].tolist() for start, stop in bounds] == chunks


tensors = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.booleans()), min_size=1, max_size=5)


@given(tensors, st.integers(1, 5), st.data())
def test_every_element_of_a_slice_is_held_once_or_by_all_ranks(
    shapes: list[tuple[int, int, bool]], num_ranks: int, data: st.DataObject
) -> None:
    slots, rows, wholes, start = [], dict[str, int](), list[torch.Tensor](), 0
    for number, (height, width, is_cut) in enumerate(shapes):
        slots.append(TensorSlot(name=str(number), elements=height * width, start=start))
        if is_cut:
            rows[str(number)] = height
        wholes.append(torch.arange(start, start + height * width).view(height, width))
        start += height * width
    low = data.draw(st.integers(0, start))
    high = data.draw(st.integers(low, start))
    found: list[list[int]] = [[] for _ in range(high - low)]
    for rank in range(num_ranks):
        for piece in pieces_held(slots, rows, low, high, rank=rank, num_ranks=num_ranks):
            whole = wholes[int(piece.name)]
            first, last = (0, len(whole)) if piece.is_whole else row_bounds(len(whole), rank, num_ranks)
            local = whole[first:last].flatten()
            for step in range(piece.elements):
                assert local[piece.low + step] == low + piece.offset + step
                found[piece.offset + step].append(rank)
    for at, ranks in enumerate(found, low):
        is_cut = next(slot.name in rows for slot in slots if slot.start <= at < slot.stop)
        assert (len(ranks) == 1) if is_cut else (ranks == list(range(num_ranks)))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("shape", "placements", "expected"),
    [
        ((1,), [Shard(0)], ""),
        ((1,), [Replicate()], ""),
        ((1,), [Shard(1)], "is placed as S(1); only shards of rows are supported, as fully_shard makes by default"),
        (
            (1, 1),
            [Replicate(), Shard(0)],
            "is spread over a device mesh of 2 dimensions; hybrid sharding and tensor parallelism are not supported; "
            "call fully_shard without a mesh",
        ),
    ],
    ids=["rows", "whole", "columns", "two dimensions"],
)
def test_only_rows_over_all_ranks_are_supported(shape: tuple[int, ...], placements: list[Any], expected: str) -> None:
    mesh = init_device_mesh("cpu", shape)
    tensor = distribute_tensor(torch.ones(4, 2), mesh, placements)
    assert is_sharded(tensor)
    assert why_unsupported(tensor, 1) == expected
    assert why_unsupported(tensor, 2) != ""
    local_part(tensor).zero_()
    assert not tensor.full_tensor().any(), "the part shares memory with the tensor"


@pytest.mark.usefixtures("one_rank")
def test_a_part_becomes_a_sharded_tensor_again() -> None:
    tensor = distribute_tensor(torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    again = with_part(local_part(tensor).clone(), tensor)
    assert is_sharded(again)
    assert again.placements == tensor.placements
    assert torch.equal(again.full_tensor(), tensor.full_tensor())


def test_a_plain_tensor_is_its_own_part() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert not is_sharded(parameter)
    local_part(parameter).zero_()
    assert not parameter.any()
    assert why_unsupported(parameter, 2) == ""
