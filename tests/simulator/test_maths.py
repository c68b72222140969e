"""The vector maths that simulated peers share."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from p2p_diloco.ids import ZERO_DIGEST, SpanId, sha256
from p2p_diloco.outer.state import SpanState, genesis_state
from p2p_diloco.span_log import AbsorbedEntry
from simulator.maths import SharedMaths, mean_of_span
from simulator.run import SPAN_ELEMENTS, codecs_of

INT8 = codecs_of("int8")
PAYLOAD = INT8.entry.encode(np.linspace(-1, 1, SPAN_ELEMENTS, dtype=np.float32))


def test_decoded_vectors_are_shared_and_read_only() -> None:
    shared = SharedMaths(INT8, SPAN_ELEMENTS)
    decoded_N = shared.decode(INT8.entry, PAYLOAD)
    assert shared.decode(INT8.entry, PAYLOAD) is decoded_N
    assert shared.norm(INT8.entry, PAYLOAD) == pytest.approx(math.sqrt(float((decoded_N**2).sum())))
    with pytest.raises(ValueError, match="read-only"):
        decoded_N[0] = 0.0


def test_following_an_entry_is_shared_for_the_same_state_object_only() -> None:
    shared = SharedMaths(INT8, SPAN_ELEMENTS)
    state = genesis_state(np.zeros(SPAN_ELEMENTS, np.float32), ZERO_DIGEST)
    entry = AbsorbedEntry(digest=sha256(b"entry"), round=0, roster=ZERO_DIGEST, radius=1.0, median_weight=1.0)
    after = shared.follow(state, entry, PAYLOAD)
    assert shared.follow(state, entry, PAYLOAD) is after
    flipped = SpanState(head=state.head, anchor_N=state.anchor_N + 1, momentum_N=state.momentum_N)
    other = shared.follow(flipped, entry, PAYLOAD)
    assert other.head == after.head
    assert shared.raw(other) != shared.raw(after)
    assert shared.raw(after) is shared.raw(after)


def test_a_mean_is_radial_in_marked_blocks_and_plain_in_spans_without_marks() -> None:
    radial = replace(INT8, radial={SpanId(0, 1): np.array([True, False])})
    vectors = np.zeros((2, 128), np.float32)
    vectors[0, [0, 64]] = vectors[1, [1, 65]] = 2.0  # at right angles in either block
    plain_N, marked_N = (mean_of_span(radial, SpanId(0, index), list(vectors), [1.0, 1.0]) for index in (0, 1))
    lengths = [float(np.linalg.norm(block_K)) for mean_N in (plain_N, marked_N) for block_K in mean_N.reshape(2, 64)]
    assert lengths == pytest.approx([math.sqrt(2.0), math.sqrt(2.0), 2.0, math.sqrt(2.0)])
