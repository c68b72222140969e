"""What a run would need, worked out before anybody starts one: bytes, length of a cycle, speed kept.

Bytes follow from the codecs and the grid (`testing/scale.py` measures the same swarm and comes to 3 % more, for
headers). How long the outer work takes on a core is measured by whoever asks, see `measure_outer_work`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.config.manifest import LONGEST_ROUND, MembershipSection
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import ZERO_DIGEST, Digest, sha256
from p2p_diloco.log.head import AbsorbedEntry
from p2p_diloco.outer.advance import advance_span, prepare_contribution, record_contribution
from p2p_diloco.outer.fragments import suited_spans
from p2p_diloco.outer.in_flight import InFlight
from p2p_diloco.outer.merge import MergeRule
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.state import genesis_state
from p2p_diloco.protocol.round.demand import Encoded, Flow, exchange_flow
from p2p_diloco.rate import check_count, check_positive, format_rate
from p2p_diloco.span.vector_work import encode_contribution

LARGEST_FRAGMENT = 500_000_000
"""Parameters of a fragment, at most, where the number of fragments allows it."""
WANTED_FRAGMENTS, MOST_FRAGMENTS = 4, 24
STEPS_OF_A_ROUND = 4
"""At least, for islands contribute at step borders and only in the first half of a round: two of them lie in it."""
SHARE_OF_LINE = 0.5
"""A cycle is so long that the exchange takes this share of the line: rounds have deadlines, and lines have bad days."""
SHARE_OF_CORES = 0.1
"""And so long that the outer work takes at most this share of it."""
SAFE_ROUND_SECONDS = 2.0
"""Rounds this long have all contributions over the internet, in one row and in several; in half of that some are lost,
and busy machines miss more (docs/decisions/0033)."""
LOSS_BY_STEPS = {8: 1.625, 16: 1.650, 32: 1.694, 64: 1.753, 128: 1.825, 256: 1.923}
"""Final loss by inner steps per cycle, four islands: `python -m research sync --size micro`."""
BFLOAT16_BYTES = 2
DAY_SECONDS = 86_400.0

Bound = Literal["steps", "line", "cores", "rounds", "heartbeat"]
"""The constraint that sets the length of a cycle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is known of a run.

    Attributes:
        parameters: of the model.
        islands: that train.
        uplink_bits: per second, of the slowest island.
        step_seconds: an inner step.
        group_size: peers that average in one row.
        contribution, row_mean, entry: codecs.
        cores: that share an island's outer work; a process uses one.
        core_nanoseconds: of one core for each parameter and cycle.
        fewest_steps: of a cycle, whatever the line would carry. The more often, the better it learns, down to here at
            least (`python -m research sync`, docs/lab-log.md).
        heartbeat_seconds: of the manifest; members of a shorter cycle would not be heard in it.
        fragments: where their number is settled; None: as suits.
    """

    parameters: int
    islands: int
    uplink_bits: float
    step_seconds: float
    group_size: int = 16
    contribution: str = "int4"
    row_mean: str = "int8"
    entry: str = "int4"
    cores: int = 1
    core_nanoseconds: float = 40.0
    fewest_steps: int = 8
    heartbeat_seconds: float = MembershipSection().heartbeat_seconds
    fragments: int | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "islands", "group_size", "cores"):
            check_count(getattr(self, name), name)
        check_positive(self.uplink_bits, "uplink_bits", "20e6")
        check_positive(self.step_seconds, "step_seconds", "0.045")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What follows.

    Attributes:
        bytes_per_parameter: sent by an island in a cycle.
        received_per_parameter: bytes that come in: as many, or fewer with one or two islands, whose bootstrap reduces.
        transfer_seconds: of a cycle's bytes on an empty line.
        cycle_seconds: recommended.
        steps: inner steps in a cycle.
        set_by: which of the bounds is the longest, and so the cycle's length.
        fragments, spans_per_fragment: of the manifest.
        round_seconds: a fragment's share of the cycle.
        utilisation: share of the time that goes into inner steps.
        data_parallel_step_seconds: of bfloat16 gradients in a ring over the same line, nothing hidden.
        host_bytes: beyond training: anchor, momentum, and a fragment on its way.
    """

    bytes_per_parameter: float
    received_per_parameter: float
    transfer_seconds: float
    cycle_seconds: float
    steps: int
    set_by: Bound
    fragments: int
    spans_per_fragment: int
    round_seconds: float
    utilisation: float
    data_parallel_step_seconds: float
    host_bytes: int


def make_plan(question: Question) -> Plan:
    """Work out what a run needs.

    Raises:
        ConfigError: rounds would be longer than a manifest allows.
    """
    size = question.parameters
    flow = flow_per_parameter(question)
    transfer = 8.0 * size * flow.sent / question.uplink_bits
    border = size * question.core_nanoseconds * 1e-9 / question.cores
    needed = question.fragments or min(math.ceil(size / LARGEST_FRAGMENT), MOST_FRAGMENTS)
    seconds: dict[Bound, float] = {
        "steps": max(question.fewest_steps, STEPS_OF_A_ROUND * needed) * question.step_seconds,
        "line": transfer / SHARE_OF_LINE,
        "cores": border / SHARE_OF_CORES,
        "rounds": SAFE_ROUND_SECONDS * needed,
        "heartbeat": question.heartbeat_seconds,
    }
    set_by = max(seconds, key=lambda bound: seconds[bound])
    steps = math.ceil(seconds[set_by] / question.step_seconds - 1e-9)
    cycle = steps * question.step_seconds
    suited = min(WANTED_FRAGMENTS, steps // STEPS_OF_A_ROUND, math.floor(cycle / SAFE_ROUND_SECONDS))
    fragments = question.fragments or max(needed, suited)
    _check_round(cycle / fragments, question)
    spans = suited_spans(math.ceil(size / fragments), min(question.group_size, question.islands))
    ring = 2.0 * (1.0 - 1.0 / question.islands) * BFLOAT16_BYTES * 8.0 * size / question.uplink_bits
    return Plan(
        bytes_per_parameter=flow.sent,
        received_per_parameter=flow.received,
        transfer_seconds=transfer,
        cycle_seconds=cycle,
        steps=steps,
        set_by=set_by,
        fragments=fragments,
        spans_per_fragment=spans,
        round_seconds=cycle / fragments,
        utilisation=cycle / (cycle + border),
        data_parallel_step_seconds=question.step_seconds + ring,
        host_bytes=8 * size + math.ceil(size / fragments) * 8,
    )


def _check_round(seconds: float, question: Question) -> None:
    if seconds > LONGEST_ROUND:
        raise ConfigError(
            f"a round would take {seconds / DAY_SECONDS:,.1f} days at {format_rate(question.uplink_bits)}; a manifest "
            f"allows {LONGEST_ROUND / DAY_SECONDS:.0f}: name a faster line with its unit, such as 20mbit, "
            "fewer parameters or shorter steps"
        )


def loss_cost(steps: float) -> float:
    """Return by which share of the loss a cycle of so many steps ends above one of the fewest; at most what was tried.

    Between two lengths that were tried, by the logarithm of the steps.
    """
    best = LOSS_BY_STEPS[min(LOSS_BY_STEPS)]
    for (fewer, less), (more, loss) in pairwise(LOSS_BY_STEPS.items()):
        if steps <= more:
            share = max(math.log2(steps / fewer), 0.0) / math.log2(more / fewer)
            return (less + share * (loss - less)) / best - 1.0
    return LOSS_BY_STEPS[max(LOSS_BY_STEPS)] / best - 1.0


def flow_per_parameter(question: Question) -> Flow:
    """Return the bytes that an island moves in a cycle for each parameter.

    The mean over islands that can all be dialled, with a bootstrap peer that founded the run.
    """
    contribution, row_mean, entry = (
        _bytes_of(name) for name in (question.contribution, question.row_mean, question.entry)
    )
    islands = question.islands
    return exchange_flow(
        Encoded(contribution=contribution, row_mean=row_mean, entry=entry),
        members=islands,
        group_size=question.group_size,
        reachable=islands,
        is_reachable=True,
        has_bootstrap=True,
    )


def _bytes_of(codec_name: str) -> float:
    elements = 1 << 20
    return codec_named(codec_name).encoded_bytes(elements) / elements


def measure_outer_work(elements: int = 1 << 21, repeats: int = 3) -> float:
    """Return how many nanoseconds of one core a parameter costs in a cycle: contribute, reduce, absorb, merge.

    The best of a few runs, here and now; a busy machine says more.
    """
    codec = codec_named("int4")
    state = genesis_state(np.zeros(elements, np.float32), ZERO_DIGEST)
    rng = np.random.Generator(np.random.Philox(key=1))
    local_N = rng.standard_normal(elements, dtype=np.float32) * np.float32(0.01)  # too short to be clipped
    best = math.inf
    for _ in range(repeats):
        began = time.process_time()
        prepared = prepare_contribution(state, InFlight(), local_N, round_index=0)
        prepared, payload = encode_contribution(codec, prepared)
        decoded_N = codec.decode(payload, elements)
        sent = record_contribution(state, InFlight(), local_N, round_index=0, sent=decoded_N)
        entry = AbsorbedEntry(
            digest=sha256(b"entry"), round=0, roster=Digest(ZERO_DIGEST), radius=prepared.norm, median_weight=1.0
        )
        advance_span(
            state,
            sent.in_flight,
            sent.local_N,
            entry=entry,
            update_N=codec.decode(payload, elements),
            own_included=True,
            outer_rule=OuterRule(),
            merge_rule=MergeRule(kind="keep", alpha=0.0, late="drop"),
        )
        best = min(best, time.process_time() - began)
    return 1e9 * best / elements
