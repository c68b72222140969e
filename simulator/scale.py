"""The cost of a cycle as a swarm grows: whole swarms of up to a thousand peers on a network with random delays.

Vectors are tiny, since the rules never look into one. Their bytes are counted as if the model had `parameters`
parameters, with the real size of every header, list and signature. Peers start as members that were stopped and hold
the same state; `trial.py` covers how a swarm forms. One more peer may join, with links to only a few members.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.messages import Opening, RowMean, SpanVector, decode_message
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, grid_order, vote_statement
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.transport.link import whole
from simulator.inspector import Violated
from simulator.network import OPEN, OUTBOUND_ONLY, SentFrames
from simulator.run import ROUND_ZERO, SPAN_ELEMENTS, found_run, key_named, run_rules, sign_as, start_states
from simulator.simulation import START_SECONDS, Simulation, play

ROUND_SECONDS = 32.0
HEARTBEAT_SECONDS = 8.0
FRAGMENTS = 2
CYCLE_SECONDS = FRAGMENTS * ROUND_SECONDS
GROUP_SIZE = 16
STEP_SECONDS = 0.1
MEDIAN_DELAY_SECONDS, DELAY_SIGMA = 0.07, 0.6
"""One-way delays are log-normal: a tenth of all messages take over 0.15 s, one in a thousand over 0.45 s."""
WARM_UP_CYCLES, MEASURED_CYCLES = 1, 2
"""Few enough that no new grid is dialled ahead meanwhile: for a cycle before one, a peer has the links of both."""
DAY_SECONDS = 86_400.0
"""Time between checkpoints. No peer restarts, so one each is enough, and writing them takes a tenth of the time."""
FOUNDER, NEWCOMER = "founder", "newcomer"
INT4 = codec_named("int4")
CODECS = Codecs(contribution=INT4, row_mean=codec_named("int8"), entry=INT4, rounds_stochastically=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """Options of a measurement.

    Attributes:
        peers: number of members that train.
        dial_out_only: share of them that accept no connections.
        parameters: size of the model whose bytes are counted.
        cycles: number of measured cycles, after one that is not measured.
        newcomer_reaches: number of members that a newcomer can reach, and no other peer; 0: no newcomer joins.
    """

    peers: int
    dial_out_only: float = 0.0
    seed: int = 0
    parameters: int = 100_000_000
    cycles: int = MEASURED_CYCLES
    newcomer_reaches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """The cost of one size of swarm.

    Attributes:
        peers: number of members that train.
        rows: number of rows of their grid.
        bytes_sent_per_parameter_per_cycle: vectors with their headers, mean over all peers.
        control_bytes_per_cycle: everything else, mean over all peers.
        streams: largest number of links that a peer had at once.
        messages: number of messages sent by a peer in a cycle, mean.
        round_seconds: time from the start of a round until the last peer absorbed its last entry, mean over rounds;
            None: there were no entries.
        included: share of all possible contributions that entries included.
        replicas_equal: whether all members hold the same bytes at the end.
        newcomer_cycles: cycles until the newcomer was ready and every roster in force listed it; None: this did not
            happen, or no newcomer joined.
    """

    peers: int
    rows: int
    bytes_sent_per_parameter_per_cycle: float
    control_bytes_per_cycle: float
    streams: int
    messages: float
    round_seconds: float | None
    included: float
    replicas_equal: bool
    newcomer_cycles: float | None = None


def measure(plan: ScalePlan) -> ScaleRow:
    """Simulate a few cycles of a swarm and return their cost.

    Raises:
        Violated: an invariant was broken.
    """

    async def scene() -> ScaleRow:
        async with scale_swarm(plan.peers, dial_out_only=plan.dial_out_only, seed=plan.seed) as swarm:
            return await _measured(swarm, plan)

    gc.disable()  # a swarm allocates much and frees it all at once
    try:
        return play(scene)
    finally:
        gc.enable()
        gc.collect()


async def _measured(swarm: Simulation, plan: ScalePlan) -> ScaleRow:
    first = (WARM_UP_CYCLES + 1) * FRAGMENTS
    behind = first + plan.cycles * FRAGMENTS
    await swarm.run_to(first * ROUND_SECONDS)
    sent: dict[int, SentFrames] = {}
    swarm.network.sent = sent
    newcomer_cycles, streams = None, 0
    if plan.newcomer_reaches:
        _add_newcomer(swarm, plan.newcomer_reaches)
    for round_index in range(first, behind):
        await swarm.run_to((round_index + 0.5) * ROUND_SECONDS)
        streams = max(streams, *(len(machine.running.linked) for machine in swarm.running()))
        await swarm.run_to((round_index + 1) * ROUND_SECONDS)
        if plan.newcomer_reaches and newcomer_cycles is None and _is_listed(swarm):
            newcomer_cycles = (round_index + 1 - first) / FRAGMENTS
    swarm.network.sent = None
    vector_bytes = control_bytes = 0
    span_parameters = plan.parameters // sum(swarm.rules.num_spans)
    for frames in sent.values():
        longer = _longer_bytes(frames, span_parameters)
        if longer is None:
            control_bytes += frames.num_bytes
        else:
            vector_bytes += frames.num_bytes + longer
    whole_swarm = plan.peers * plan.cycles
    grid = swarm.running()[0].running.book.grid()
    absorbed = swarm.inspector.absorbed_at.items()
    took = [at - index * ROUND_SECONDS for index, at in absorbed if first <= index < behind]
    return ScaleRow(
        peers=plan.peers,
        rows=len(grid.rows) if grid is not None else 0,
        bytes_sent_per_parameter_per_cycle=vector_bytes / (whole_swarm * plan.parameters),
        control_bytes_per_cycle=control_bytes / whole_swarm,
        streams=streams,
        messages=sum(frames.count for frames in sent.values()) / whole_swarm,
        round_seconds=sum(took) / len(took) if took else None,
        included=_included_share(swarm, first, behind, plan.peers),
        replicas_equal=await comes_to_agree(swarm, CYCLE_SECONDS),
        newcomer_cycles=newcomer_cycles,
    )


def scale_swarm(num_peers: int, *, dial_out_only: float = 0.0, seed: int = 0) -> Simulation:
    """Return a swarm whose peers are members already, hold the initial state, and are about to open links.

    Args:
        dial_out_only: share of peers that accept no connections.
    """
    width = max(GROUP_SIZE, math.isqrt(max(num_peers - 1, 0)) + 1)
    rules = run_rules(
        num_spans=(2 * width,) * FRAGMENTS,
        codecs=CODECS,
        group_size=GROUP_SIZE,
        stalled_cycles=8,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        round_seconds=ROUND_SECONDS,
    )
    draw = random.Random(f"scale {seed}")
    names = [f"p{number}" for number in range(num_peers)]
    hidden = set(draw.sample(names, round(dial_out_only * num_peers)))
    places = {name: OUTBOUND_ONLY if name in hidden else OPEN for name in names}
    return standing_swarm(rules, places, draw=draw, seed=seed, checkpoint_seconds=DAY_SECONDS)


def standing_swarm(
    rules: RunRules,
    places: Mapping[str, str],
    *,
    draw: random.Random,
    seed: int,
    checkpoint_seconds: float,
    with_bootstrap: bool = False,
) -> Simulation:
    """Return a swarm whose peers are members already, hold the initial state, and are about to open links.

    Args:
        places: place of each peer on the network, by name.
        draw: random source of the times at which they start.
        checkpoint_seconds: time between two checkpoints of a peer.
        with_bootstrap: whether the founder runs too, as a bootstrap peer named `FOUNDER`.
    """
    swarm = Simulation(seed=seed, codecs=CODECS, rules=rules, as_bytes=False)
    swarm.network.log_normal = (MEDIAN_DELAY_SECONDS, DELAY_SIGMA)
    if with_bootstrap:
        swarm.add(FOUNDER, trains=False, start=False).checkpoint_seconds = checkpoint_seconds
        swarm.at(START_SECONDS - ROUND_ZERO, swarm.start, FOUNDER)
    for name, place in places.items():
        swarm.add(name, place=place, step_seconds=STEP_SECONDS, start=False).checkpoint_seconds = checkpoint_seconds
        swarm.at(START_SECONDS - ROUND_ZERO + 5.0 * draw.random(), swarm.start, name)
    rosters = first_rosters(rules, [(swarm.machines[name].peer, place == OPEN) for name, place in places.items()])
    swarm.keep_on_disks(rosters, start_states(rules, rosters[0].roster))
    return swarm


def first_rosters(rules: RunRules, peers: Sequence[tuple[PeerId, bool]]) -> tuple[CertifiedRoster, CertifiedRoster]:
    """Return the founding roster and roster 1, which lists all peers and is certified by the founder."""
    founder = key_named(FOUNDER).peer
    founding = found_run(rules, Member(peer=founder, incarnation=1, trains=False), 0)
    members = [Member(peer=peer, incarnation=1, counts=True, reduces=is_open) for peer, is_open in peers]
    roster = Roster(
        run=rules.run,
        genesis=founding.roster.genesis,
        parent=founding.roster.digest(),
        k=1,
        cycle=0,
        degraded=False,
        members=grid_order(members, rules.run, 0),
        height=0,
    )
    ballot = 1
    vote = sign_as(founder, vote_statement(roster.digest(), ballot))
    return founding, CertifiedRoster(roster=roster, ballot=ballot, votes=((founder, vote),))


def _add_newcomer(swarm: Simulation, reaches: int) -> None:
    members = [machine for machine in swarm.machines.values() if machine.place == OPEN]
    newcomer = swarm.add(NEWCOMER, step_seconds=STEP_SECONDS, start=False)
    reached = swarm.rng.sample(members, reaches)
    swarm.network.split([newcomer.peer], [m.peer for m in swarm.machines.values() if m not in (newcomer, *reached)])
    newcomer.first_known = {m.peer: m.addresses for m in reached}
    swarm.start(NEWCOMER)


def _is_listed(swarm: Simulation) -> bool:
    newcomer = swarm.machines[NEWCOMER]
    return newcomer.running.ready and all(newcomer.peer in machine.roster.peers() for machine in swarm.running())


def _longer_bytes(frames: SentFrames, span_parameters: int) -> int | None:
    """Return how much longer the frames of a kind would be in the counted model; None if they carry no vector."""
    message = decode_message(whole(frames.sample))
    match message:
        case SpanVector():
            codec = CODECS.contribution
        case RowMean():
            codec = CODECS.row_mean
        case Entry():
            codec = CODECS.entry
        case Opening():
            return 0
        case _:
            return None
    return frames.count * (codec.encoded_bytes(span_parameters) - codec.encoded_bytes(SPAN_ELEMENTS))


async def comes_to_agree(swarm: Simulation, within: float) -> bool:
    """Return whether all members except a newcomer hold the same bytes at some moment within that time."""
    members = [machine.name for machine in swarm.running() if machine.name != NEWCOMER]
    try:
        await swarm.until(lambda: swarm.agreed(members), within, step=1.0)
    except Violated as broken:
        if broken.invariant != "claim":
            raise
        return False
    return True


def _included_share(swarm: Simulation, first: int, behind: int, num_peers: int) -> float:
    entries = [entry for entry in swarm.inspector.entries.values() if first <= entry.round < behind]
    included = sum(int.from_bytes(entry.included, "little").bit_count() for entry in entries)
    possible = num_peers * sum(swarm.rules.num_spans[swarm.rules.clock.fragment(r)] for r in range(first, behind))
    return included / possible
