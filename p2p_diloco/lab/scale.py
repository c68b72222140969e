"""What a round costs as a swarm grows: whole swarms of up to a thousand engines over an internet of drawn delays.

Vectors are tiny, since the rules never look into one; their bytes are counted as if the model had `parameters`, with
the real size of every header, list and signature. Peers begin as members with the same state: how a swarm comes to be
is the business of `trial.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p_diloco.codec.codec import Codec, codec_named
from p2p_diloco.lab.island import Update
from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.maths import SharedMaths
from p2p_diloco.lab.stage import Violated
from p2p_diloco.lab.swarm import Swarm
from p2p_diloco.lab.toy_run import found_run, peer_named, sign_as, start_states, toy_rules
from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.ballot import ballot_number
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.grid import grid_order
from p2p_diloco.protocol.member import Member
from p2p_diloco.protocol.messages import Message, Opening, RowMean, SpanVector, encode_message
from p2p_diloco.protocol.roster import CertifiedRoster, Roster, vote_statement
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.swarm.vector_work import Codecs

ROUND_SECONDS = 32.0
HEARTBEAT_SECONDS = 8.0
FRAGMENTS = 2
GROUP_SIZE = 16
SPAN_ELEMENTS = 8
MEDIAN_DELAY_SECONDS, DELAY_SIGMA = 0.07, 0.6
"""One way, log-normal: a tenth of all messages takes longer than 0.15 s, one in a thousand longer than 0.45 s."""
WARM_UP_CYCLES, MEASURED_CYCLES = 1, 2
"""So few that no new grid is dialled ahead meanwhile: for a cycle before one comes, a peer has the links of both."""
FOUNDER = "founder"
_SIZES_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """What one size of swarm costs.

    Attributes:
        peers: members that train.
        rows: rows of their grid.
        bytes_sent_per_parameter_per_cycle: vectors with their headers, mean over all peers.
        control_bytes_per_cycle: everything else, mean over all peers.
        streams: most links that a peer had at once.
        messages: sent by a peer in a cycle, mean.
        round_seconds: from the begin of a round until the last peer had absorbed its last entry, mean over rounds;
            None: there were no entries.
        included: share of all possible contributions that entries included.
        replicas_equal: whether all hold the same bytes at the end.
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


@dataclass(slots=True)
class Counters:
    """Sums over all peers since they were last set to nothing."""

    vector_bytes: int = 0
    control_bytes: int = 0
    messages: int = 0
    streams: int = 0
    last_absorbed: dict[int, float] = field(default_factory=dict)


class ScaleSwarm(Swarm):
    """A swarm that counts what it sends.

    Args:
        span_parameters: elements that each span would have in the model whose bytes are counted.
    """

    def __init__(self, seed: int, *, rules: RunRules, codecs: Codecs, span_parameters: int) -> None:
        super().__init__(seed, start=-20.0, rules=rules, maths=SharedMaths(codecs, SPAN_ELEMENTS), trace=None)
        self.counters = Counters()
        self._codecs = codecs
        self._span_parameters = span_parameters
        self._sizes: dict[int, tuple[Message, int]] = {}

    def _send(self, machine: Machine, action: Send) -> None:
        if action.to in machine.links:
            counters, message = self.counters, action.message
            counters.messages += 1
            if isinstance(message, Opening | SpanVector | RowMean | Entry):
                counters.vector_bytes += self._size(message)
            else:
                counters.control_bytes += self._size(message)
        super()._send(machine, action)

    def _size(self, message: Message) -> int:
        """Return the bytes of a message in the counted model; one that goes to many is encoded once."""
        known = self._sizes.get(id(message))
        if known is not None and known[0] is message:
            return known[1]
        size = len(encode_message(message))
        codec = self._codec_of(message)
        if codec is not None:
            size += codec.encoded_bytes(self._span_parameters) - codec.encoded_bytes(SPAN_ELEMENTS)
        if len(self._sizes) >= _SIZES_KEPT:
            self._sizes.clear()
        self._sizes[id(message)] = (message, size)
        return size

    def _codec_of(self, message: Message) -> Codec | None:
        match message:
            case SpanVector():
                return self._codecs.contribution
            case RowMean():
                return self._codecs.row_mean
            case Entry():
                return self._codecs.entry
            case _:
                return None

    def _absorb(self, machine: Machine, update: Update) -> None:
        super()._absorb(machine, update)
        round_index = update.entry.round
        took = self.now - self.rules.clock.begin(round_index)
        last = self.counters.last_absorbed
        last[round_index] = max(took, last.get(round_index, 0.0))

    def begin(self, name: str) -> None:
        """Start a machine."""
        self.start(name)

    def count_streams(self) -> None:
        """Note the most links that a peer has now."""
        self.counters.streams = max(self.counters.streams, *(len(machine.links) for machine in self.running()))


def scale_swarm(
    num_peers: int, *, dial_out_only: float = 0.0, seed: int = 0, parameters: int = 100_000_000
) -> ScaleSwarm:
    """Return a swarm whose peers are members already, hold the start, and are about to look for their links.

    Args:
        dial_out_only: share of peers that accept no connection.
        parameters: of the model whose bytes are counted.
    """
    width = max(GROUP_SIZE, math.isqrt(max(num_peers - 1, 0)) + 1)
    num_spans = 2 * width
    int4 = codec_named("int4")
    codecs = Codecs(contribution=int4, row_mean=codec_named("int8"), entry=int4, rounds_stochastically=False)
    rules = toy_rules(
        num_spans=(num_spans,) * FRAGMENTS,
        span_elements=SPAN_ELEMENTS,
        codecs=codecs,
        group_size=GROUP_SIZE,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        round_seconds=ROUND_SECONDS,
    )
    swarm = ScaleSwarm(seed, rules=rules, codecs=codecs, span_parameters=parameters // (FRAGMENTS * num_spans))
    swarm.network.weather.delay_median, swarm.network.weather.delay_sigma = MEDIAN_DELAY_SECONDS, DELAY_SIGMA
    draw = random.Random(f"scale {seed}")
    names = [f"p{number}" for number in range(num_peers)]
    hidden = set(draw.sample(names, round(dial_out_only * num_peers)))
    rosters = _first_rosters(rules, [(name, name not in hidden) for name in names])
    states = start_states(rules, rosters[0].roster)
    swarm.inspector.founded(states)
    for name in names:
        machine = swarm.add(name, dialable=name not in hidden, step_seconds=0.1, start=False)
        machine.disk.rosters = list(rosters)
        machine.disk.keep_checkpoint(states)
        swarm.at(swarm.now + 5.0 * draw.random(), swarm.begin, name)
    for certified in rosters:
        swarm.inspector.rosters[certified.roster.digest()] = certified.roster
    return swarm


def _first_rosters(rules: RunRules, peers: Sequence[tuple[str, bool]]) -> tuple[CertifiedRoster, CertifiedRoster]:
    """Return the founding roster and roster 1, which lists everybody and is certified by the founder."""
    founder = peer_named(FOUNDER)
    founding = found_run(rules, Member(peer=founder, incarnation=1, can_be_dialled=True))
    members = [Member(peer=peer_named(name), incarnation=1, can_be_dialled=dialable) for name, dialable in peers]
    roster = Roster(
        run=rules.run,
        genesis=founding.roster.genesis,
        parent=founding.roster.digest(),
        k=1,
        epoch=0,
        level=0,
        cycle=0,
        regrid=0,
        members=grid_order(members, rules.run, 0),
        helper=founder,
        goodbyes=(),
        included_total=0,
    )
    ballot = ballot_number(0, 0)
    vote = sign_as(founder, vote_statement(roster.digest(), ballot))
    return founding, CertifiedRoster(roster=roster, ballot=ballot, votes=((founder, vote),))


def measure(num_peers: int, *, dial_out_only: float = 0.0, seed: int = 0, parameters: int = 100_000_000) -> ScaleRow:
    """Play a few cycles of a swarm of that size and return what they cost.

    Raises:
        Violated: a promise of the protocol was broken on the way.
    """
    swarm = scale_swarm(num_peers, dial_out_only=dial_out_only, seed=seed, parameters=parameters)
    clock = swarm.rules.clock
    first = (WARM_UP_CYCLES + 1) * FRAGMENTS
    swarm.run_to(clock.begin(first))
    swarm.counters = Counters()
    for round_index in range(first, first + MEASURED_CYCLES * FRAGMENTS):
        swarm.run_to(clock.begin(round_index) + 0.5 * clock.round_seconds)
        swarm.count_streams()
        swarm.run_to(clock.begin(round_index + 1))
    counters = swarm.counters
    whole = num_peers * MEASURED_CYCLES
    grid = swarm.running()[0].running.book.grid()
    took = [seconds for index, seconds in counters.last_absorbed.items() if index >= first]
    included = _included_share(swarm, first, first + MEASURED_CYCLES * FRAGMENTS, num_peers)
    return ScaleRow(
        peers=num_peers,
        rows=len(grid.rows) if grid is not None else 0,
        bytes_sent_per_parameter_per_cycle=counters.vector_bytes / (whole * parameters),
        control_bytes_per_cycle=counters.control_bytes / whole,
        streams=counters.streams,
        messages=counters.messages / whole,
        round_seconds=sum(took) / len(took) if took else None,
        included=included,
        replicas_equal=comes_to_agree(swarm, 2 * FRAGMENTS),
    )


def comes_to_agree(swarm: Swarm, num_rounds: float) -> bool:
    """Tell whether, at some moment within so many rounds, all hold the same bytes."""
    try:
        swarm.run_until(swarm.agreed, num_rounds * swarm.rules.clock.round_seconds, step=1.0)
    except Violated as broken:
        if broken.invariant != "claim":
            raise
        return False
    return True


def _included_share(swarm: Swarm, first: int, behind: int, num_peers: int) -> float:
    entries = [entry for entry in swarm.inspector.entries.values() if first <= entry.round < behind]
    included = sum(int.from_bytes(entry.included, "little").bit_count() for entry in entries)
    possible = num_peers * sum(swarm.rules.num_spans[swarm.rules.clock.fragment(r)] for r in range(first, behind))
    return included / possible
