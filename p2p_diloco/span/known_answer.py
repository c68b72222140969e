"""Makes this machine ready: compiles the loops, and checks that it computes the same bytes as all others.

A peer whose processor, NumPy or compiler rounds differently would follow every entry to bytes that no other peer has.
It would notice only when contents are compared, cycles later. So each thread that decodes and steps is tested first,
which takes a few milliseconds. A thread that flushes subnormal numbers passes: see `codec/vectors.py`.
"""

from __future__ import annotations

import gc
import hashlib

import numpy as np

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.codec.vectors import Vector, compiled_loops
from p2p_diloco.errors import ConfigError, FrameError, RoundError, StateError
from p2p_diloco.ids import ZERO_DIGEST
from p2p_diloco.memory.heap import shed_compiler, trim_heap
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import InFlight, IslandSpan, SpanState
from p2p_diloco.span.fused import follow_span
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.span_log import GENESIS_ROUND, AbsorbedEntry, SpanHead

KNOWN_ANSWER = "8ad2943b43d22e5a"
"""First digits of a SHA-256 over all anchors, momenta and norms; only another codec or outer step changes it."""
CODEC_NAMES = ("int4", "int8", "bfloat16", "float32")
LENGTHS = (256, 200, 40)
"""Numbers of elements: complete blocks, a short last block, and less than one block, for each kind of loop."""
STEPS = 2


def warm_up() -> None:
    """Compile all loops now: a loop never compiled on this machine takes seconds, too long for the first round.

    Then free the compiler and its part of the heap, which are not needed any more. Also exempt all imported objects
    from garbage collection: scanning the 300,000 objects of torch, numba and hivemind takes a tenth of a second, during
    which neither training nor the loop runs.
    """
    compiled_loops()
    shed_compiler()
    trim_heap()
    gc.freeze()


def check_known_answer() -> None:
    """Decode and step known vectors on this thread.

    Raises:
        ConfigError: it computes different bytes than other peers.
    """
    try:
        answer = known_answer()
    except (FrameError, RoundError, StateError) as error:
        answer = str(error)
    if answer != KNOWN_ANSWER:
        raise ConfigError(
            "this machine computes different bytes than other peers: decoding and stepping known vectors gave "
            f"{answer}, expected {KNOWN_ANSWER}; install the versions in constraints.txt, clear numba's cache, or use "
            "another machine"
        )


def known_answer() -> str:
    """Return this thread's answer for the known vectors."""
    answer = hashlib.sha256()
    for place, name in enumerate(CODEC_NAMES):
        codec = codec_named(name)
        codecs = Codecs(contribution=codec, row_mean=codec, entry=codec, rounds_stochastically=False)
        for elements in LENGTHS:
            bits = np.random.Philox(key=place * 1000 + elements)
            anchor_N = _numbers(bits, elements, least=-40, most=4)
            head = SpanHead(
                digest=ZERO_DIGEST, height=0, round=GENESIS_ROUND, roster=ZERO_DIGEST, radius=1.0, median_weight=1.0
            )
            state = SpanState(head=head, anchor_N=anchor_N, momentum_N=_numbers(bits, elements, least=-63, most=2))
            for step in range(STEPS):
                payload = codec.encode(_numbers(bits, elements, least=-60, most=3))
                entry = AbsorbedEntry(digest=ZERO_DIGEST, round=step, roster=ZERO_DIGEST, radius=1.0, median_weight=1.0)
                state, _, local_N = follow_span(
                    IslandSpan(state, InFlight(), state.anchor_N),
                    entry=entry,
                    payload=payload,
                    codecs=codecs,
                    outer_rule=OuterRule(),
                    merge_rule=MergeRule(),
                )
                norm = np.array([codec.norm(payload, elements)], "<f8")
                for array in (state.anchor_N, state.momentum_N, local_N):
                    answer.update(array.astype("<f4").tobytes())
                answer.update(norm.tobytes())
    return answer.hexdigest()[: len(KNOWN_ANSWER)]


def _numbers(bits: np.random.Philox, elements: int, *, least: int, most: int) -> Vector:
    """Return numbers of either sign from 2^least to 2^most, built from integers, so that nothing is rounded."""
    words = bits.random_raw(elements)
    exponents = np.sort((words >> np.uint64(32)) % np.uint64(most - least)).astype(np.uint32)  # blocks of similar ones
    mantissas = (words & np.uint64(0x7FFFFF)).astype(np.uint32)
    signs = ((words >> np.uint64(31)) & np.uint64(1)).astype(np.uint32)
    return (signs << np.uint32(31) | (exponents + np.uint32(127 + least)) << np.uint32(23) | mantissas).view(np.float32)
