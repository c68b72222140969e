"""The maths that a lab swarm shares."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from lab_swarms import ELEMENTS, INT8, founded, maths

from p2p_diloco.ids import SpanId
from p2p_diloco.lab.maths import absorbed_entry, mean_of_span
from p2p_diloco.outer.state import SpanState
from p2p_diloco.swarm.vector_work import content_digests


def test_what_is_decoded_once_is_shared_and_cannot_be_written_to() -> None:
    shared = maths()
    payload = INT8.entry.encode(np.linspace(-1, 1, ELEMENTS, dtype=np.float32))
    decoded_N = shared.decode(INT8.entry, payload)
    assert shared.decode(INT8.entry, payload) is decoded_N
    assert shared.norm(INT8.entry, payload) == shared.norm(INT8.entry, payload)
    assert shared.norm(INT8.entry, payload) == pytest.approx(math.sqrt(float((decoded_N**2).sum())))
    with pytest.raises(ValueError, match="read-only"):
        decoded_N[0] = 0.0


def test_the_same_entry_on_the_same_state_is_the_same_object_and_on_other_bytes_another() -> None:
    swarm = founded(1)
    swarm.run(20.0)
    entry = next(iter(swarm.inspector.entries.values()))
    truth = swarm.inspector._truth[entry.span, entry.parent]
    flipped = SpanState(head=truth.head, anchor_N=truth.anchor_N + 1, momentum_N=truth.momentum_N)
    after = swarm.maths.absorb(truth, entry)
    assert swarm.maths.absorb(truth, entry) is after
    other = swarm.maths.absorb(flipped, entry)
    assert other is not after
    assert other.head == after.head
    assert swarm.maths.content(other) != swarm.maths.content(after)
    assert swarm.maths.raw(after) is swarm.maths.raw(after)
    assert ((after.head.digest, swarm.maths.content(after)),) == content_digests([after])
    assert absorbed_entry(entry).round == entry.round


def test_a_mean_is_radial_in_the_blocks_that_a_span_has_marked_and_plain_in_a_span_without_marks() -> None:
    radial = replace(INT8, radial={SpanId(0, 1): np.array([True, False])})
    vectors = np.zeros((2, 128), np.float32)
    vectors[0, [0, 64]] = vectors[1, [1, 65]] = 2.0  # at right angles in either block
    plain_N, marked_N = (mean_of_span(radial, SpanId(0, index), list(vectors), [1.0, 1.0]) for index in (0, 1))
    lengths = [float(np.linalg.norm(block_K)) for mean_N in (plain_N, marked_N) for block_K in mean_N.reshape(2, 64)]
    assert lengths == pytest.approx([math.sqrt(2.0), math.sqrt(2.0), 2.0, math.sqrt(2.0)])
