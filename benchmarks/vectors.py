"""Cost per element of each step of a peer's cycle, with compiled loops and with NumPy alone, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.interleaved import Spread, measure_in_turn
from p2p_diloco.codec.codec import Codec, codec_named
from p2p_diloco.codec.vectors import numpy_alone
from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, sha256
from p2p_diloco.outer.mean import check_mean, mark_radial, shares_of
from p2p_diloco.outer.outer_step import MergeRule, OuterRule, apply_outer_step, merge_local
from p2p_diloco.outer.state import InFlight, IslandSpan, content_digest, genesis_state, prepare_contribution
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.span.reduce import Codecs, reduce_parts

COMPILED, NUMPY = "compiled", "numpy"
PARTS = 4
"""Number of contributions in a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step of a cycle.

    Attributes:
        share: share of all parameters for which a peer, one of `PARTS` in a row, does this step in a cycle; 0 for steps
            done only by a scrub and for alternatives to other steps in the list.
        compiled, numpy: nanoseconds of CPU time per element.
    """

    name: str
    share: float
    compiled: Spread
    numpy: Spread


def measure_vectors(*, codec_name: str, elements: int, repeats: int) -> list[StepFigures]:
    """Measure each step on vectors of `elements`.

    Raises:
        ConfigError: the codec is unknown.
    """
    figures = []
    for name, (share, step) in _steps(codec_name, elements).items():
        both: dict[str, Callable[[], object]] = {COMPILED: step, NUMPY: partial(_by_numpy, step)}
        taken = measure_in_turn(both, repeats=repeats, seconds=time.process_time)
        compiled, numpy = (_per_element(taken[which], elements) for which in (COMPILED, NUMPY))
        figures.append(StepFigures(name=name, share=share, compiled=compiled, numpy=numpy))
    return figures


def _by_numpy(step: Callable[[], object]) -> None:
    with numpy_alone():
        step()


def _per_element(spread: Spread, elements: int) -> Spread:
    factor = 1e9 / elements
    return Spread(middle=factor * spread.middle, low=factor * spread.low, high=factor * spread.high)


def _add_up(codec: Codec, encoded: bytes, elements: int) -> None:
    mean_N = codec.add_up([encoded] * PARTS, shares_of([1.0, 2.0, 3.0, 4.0], PARTS), elements)
    check_mean(mean_N, PARTS)


def _averaging(codec: Codec, encoded: bytes, elements: int) -> tuple[ReduceSpan, Codecs, Codecs]:
    """Return a reduce action, and the codecs of a run with plain means and of one with radial means."""
    parts = tuple(
        Part(peer=PeerId(sha256(bytes([place]))), payload=encoded, weight=1.0, norm=1.0) for place in range(PARTS)
    )
    span = SpanId(0, 0)
    order = ReduceSpan(
        round=0,
        span=span,
        stage=Stage.WHOLE,
        parts=parts,
        norm_limit=float("inf"),
        rounding_seed=b"seed",
        levels=False,
    )
    plain = Codecs(contribution=codec, row_mean=codec, entry=codec, rounds_stochastically=True)
    return order, plain, replace(plain, radial={span: mark_radial(0, elements, ())})


Step = Callable[[], object]


def _steps(codec_name: str, elements: int) -> dict[str, tuple[float, Step]]:
    """Return the steps of a peer in a cycle, in order, each with the share of all parameters that it covers."""
    codec = codec_named(codec_name)
    rng = np.random.Generator(np.random.Philox(key=1))
    state = genesis_state(rng.standard_normal(elements, dtype=np.float32), ZERO_DIGEST)
    local_N = state.anchor_N + np.float32(0.01) * rng.standard_normal(elements, dtype=np.float32)
    span = IslandSpan(state, InFlight(), local_N)
    prepared = prepare_contribution(span, round_index=0)
    encoded = codec.encode(prepared.delta_N)
    decoded_N = codec.decode(encoded, elements)
    rule = OuterRule()
    after_N, _ = apply_outer_step(state.anchor_N, state.momentum_N, decoded_N, rule)
    merge = MergeRule()
    together, plain, radial = _averaging(codec, encoded, elements)
    of_strangers = replace(together, levels=True)
    return {
        "take the pseudo-gradient": (1, lambda: prepare_contribution(span, round_index=0)),
        "encode it": (1, lambda: codec.encode(prepared.delta_N)),
        "measure what was encoded": (1, lambda: codec.squared_norm(encoded, elements)),
        "decode it, to be in flight": (1, lambda: codec.decode(encoded, elements)),
        "measure parts, as a reducer": (1, lambda: codec.squared_norm(encoded, elements)),
        f"add up {PARTS} of them": (1 / PARTS, lambda: _add_up(codec, encoded, elements)),
        f"average {PARTS} of them at once": (0, lambda: reduce_parts(together, plain, elements)),
        f"average {PARTS}, radial": (0, lambda: reduce_parts(together, radial, elements)),
        f"average {PARTS}, radial, of strangers": (0, lambda: reduce_parts(of_strangers, radial, elements)),
        "encode the entry": (1 / PARTS, lambda: codec.encode(decoded_N, rounding_seed=b"seed")),
        "measure entries": (1, lambda: codec.squared_norm(encoded, elements)),
        "decode entries": (1, lambda: codec.decode(encoded, elements)),
        "outer step": (1, lambda: apply_outer_step(state.anchor_N, state.momentum_N, decoded_N, rule)),
        "merge": (1, lambda: merge_local(local_N, state.anchor_N, after_N, decoded_N, merge)),
        "digest of the contents": (0, lambda: content_digest(state.anchor_N, state.momentum_N, ZERO_DIGEST)),
    }
