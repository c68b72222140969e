"""Small lab swarms that have been founded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.ids import SpanId
from p2p_diloco.lab.maths import SharedMaths
from p2p_diloco.lab.swarm import INT4, Swarm, swarm_of
from p2p_diloco.lab.trace import Trace
from p2p_diloco.swarm.vector_work import Codecs

INT8 = Codecs(
    contribution=codec_named("int8"),
    row_mean=codec_named("int8"),
    entry=codec_named("int8"),
    rounds_stochastically=False,
)
ELEMENTS = 8


RADIAL = replace(INT4, radial=dict.fromkeys((SpanId(0, 1), SpanId(1, 0)), np.ones(1, np.bool_)))
"""Two spans of the five have radial means."""


def founded(
    num_peers: int = 3,
    *,
    dialable: bool = True,
    seed: int = 1,
    codecs: Codecs = INT4,
    group_size: int = 16,
    trace: Trace | None = None,
) -> Swarm:
    """A swarm in which all are members and hold the same bytes."""
    swarm = swarm_of(seed=seed, codecs=codecs, group_size=group_size, trace=trace)
    swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}", dialable=dialable)
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 120.0)
    return swarm


def maths() -> SharedMaths:
    return SharedMaths(INT8, ELEMENTS)
