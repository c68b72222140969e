"""One peer of a memory swarm: its rules, its disk, its island and what it has reported."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState, absorb, content_digest, genesis_state
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.ballot import NO_BALLOTS, Ballots
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.member import Member
from p2p_diloco.protocol.roster import CertifiedRoster, Goodbye, Roster, founding_roster, founding_statement
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.signing import SigningKey
from p2p_diloco.swarm.clock_sync import SwarmClock
from p2p_diloco.swarm.link_keeper import LinkKeeper
from p2p_diloco.swarm.node import SwarmNode
from p2p_diloco.swarm.replica import absorbed_entry
from p2p_diloco.swarm.vector_work import state_bytes
from p2p_diloco.transport.link import TransportLimits
from p2p_diloco.transport.memory import MemoryTransport
from tests.swarm.fake_island import CODECS, OPTIMA, OUTER, SPAN_ELEMENTS, FakeIsland

RUN = sha256(b"a run in memory")
START_SECONDS = 1_000_000.0
"""Unix time at which a stage opens; round 0 begins a little later."""
MANIFEST = b"the signed manifest"


def key_of(name: str) -> SigningKey:
    return SigningKey(sha256(b"key of", name.encode()))


ORGANISER = key_of("organiser")


def sign_as(peer: PeerId, statement: bytes) -> bytes:
    """A cheap stand-in for Ed25519, which would cost the tests half their time."""
    return sha256(b"signed by", peer, statement) * 2


def verify(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    return signature == sign_as(peer, statement)


def run_rules(
    *, round_seconds: float = 16.0, heartbeat_seconds: float = 2.0, spans: int = 4, group_size: int = 32
) -> RunRules:
    num_spans = (spans, spans)
    all_spans = [SpanId(fragment, index) for fragment, count in enumerate(num_spans) for index in range(count)]
    return RunRules(
        run=RUN,
        organiser=ORGANISER.peer,
        clock=RoundClock(
            start_seconds=START_SECONDS + round_seconds, round_seconds=round_seconds, num_fragments=len(num_spans)
        ),
        num_spans=num_spans,
        span_elements=dict.fromkeys(all_spans, SPAN_ELEMENTS),
        payload_bytes=dict.fromkeys(all_spans, CODECS.contribution.encoded_bytes(SPAN_ELEMENTS)),
        row_mean_bytes=dict.fromkeys(all_spans, CODECS.row_mean.encoded_bytes(SPAN_ELEMENTS)),
        entry_bytes=dict.fromkeys(all_spans, CODECS.entry.encoded_bytes(SPAN_ELEMENTS)),
        group_size=group_size,
        void_cycles=8,
        heartbeat_seconds=heartbeat_seconds,
        weight_clip=4.0,
        contribution_limit=2.0,
        entry_limit=3.0,
        retained_cycles=16,
    )


def start_states(rules: RunRules, founding: Roster) -> dict[SpanId, SpanState]:
    return {span: genesis_state(OPTIMA[span] * 0, founding.digest()) for span in rules.span_elements}


def found_run(rules: RunRules, founder: Member) -> CertifiedRoster:
    start_N = OPTIMA[SpanId(0, 0)] * 0
    genesis = sha256(*(content_digest(start_N, start_N, ZERO_DIGEST) for _ in rules.span_elements))
    roster = founding_roster(rules.run, genesis, founder)
    signature = sign_as(ORGANISER.peer, founding_statement(roster.digest()))
    return CertifiedRoster(roster=roster, ballot=0, votes=((ORGANISER.peer, signature),))


@dataclass
class Disk:
    """What survives a restart; a `PeerMemory` and an `EntryArchive`."""

    incarnation: int = 0
    rosters: list[CertifiedRoster] = field(default_factory=list)
    ballots: Ballots = NO_BALLOTS
    goodbye: Goodbye | None = None
    checkpoint: dict[SpanId, SpanState] = field(default_factory=dict)
    entries: dict[SpanId, dict[Digest, Entry]] = field(default_factory=dict)
    clock_offset: float = 0.0

    def keep_entry(self, entry: Entry) -> None:
        self.entries.setdefault(entry.span, {})[entry.parent] = entry

    def give_up(self, span: SpanId) -> None:
        self.entries.pop(span, None)

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        return self.entries.get(span, {}).get(parent)

    def rebuild(self, span: SpanId, digest: Digest) -> SpanState | None:
        state = self.replayed(span, digest) if span in self.checkpoint else None
        return state if state is not None and state.head.digest == digest else None

    def rebuild_parent(self, span: SpanId, tip: Digest) -> SpanState | None:
        before, state = None, self.checkpoint.get(span)
        while state is not None and state.head.digest != tip:
            entry = self.entry_after(span, state.head.digest)
            before, state = state, self._absorbed(state, entry) if entry is not None else None
        return before if state is not None else None

    def _absorbed(self, state: SpanState, entry: Entry) -> SpanState:
        update_N = CODECS.entry.decode(entry.payload, state.elements)
        return absorb(state, entry=absorbed_entry(entry), update_N=update_N, rule=OUTER)

    def replayed(self, span: SpanId, until: Digest | None = None) -> SpanState:
        state = self.checkpoint[span]
        while state.head.digest != until and (entry := self.entry_after(span, state.head.digest)) is not None:
            state = self._absorbed(state, entry)
        return state

    def keep_ballots(self, ballots: Ballots) -> None:
        self.ballots = ballots

    def keep_goodbye(self, goodbye: Goodbye) -> None:
        self.goodbye = goodbye

    def keep_roster(self, certified: CertifiedRoster) -> None:
        self.rosters.append(certified)


@dataclass
class Machine:
    """One peer with its disk, its island and what it has reported; a `SwarmObserver`.

    Attributes:
        clock_offset: how far its steady clock is ahead of true time; changed while it runs, the steady clock jumps.
        wall_step: by how much its wall clock was set since it was started. Its next start goes by the wall clock.
    """

    name: str
    dialable: bool
    trains: bool
    step_seconds: float
    clock_offset: float
    wall_step: float = 0.0
    limits: TransportLimits = field(default_factory=TransportLimits)
    disk: Disk = field(default_factory=Disk)
    reports: list[tuple[float, str, str]] = field(default_factory=list)
    closed: list[RoundClosed] = field(default_factory=list)
    island: FakeIsland | None = None
    node: SwarmNode | None = None
    clock: SwarmClock | None = None
    transport: MemoryTransport | None = None
    keeper: LinkKeeper | None = None
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> SigningKey:
        return key_of(self.name)

    @property
    def peer(self) -> PeerId:
        return self.key.peer

    @property
    def running(self) -> SwarmNode:
        assert self.node is not None, f"{self.name} is not running"
        return self.node

    @property
    def engine(self) -> PeerEngine:
        return self.running.engine

    def report(self, topic: str, text: str) -> None:
        self.reports.append((asyncio.get_running_loop().time() - START_SECONDS, topic, text))

    def round_closed(self, closed: RoundClosed) -> None:
        self.closed.append(closed)

    def texts(self, topic: str) -> list[str]:
        return [text for _, its_topic, text in self.reports if its_topic == topic]

    def height(self) -> int:
        assert self.island is not None
        return sum(state.head.height for state in self.island.states.values())

    def digest(self) -> str:
        """Return SHA-256 over φ and m of all spans, as the trainer's session says it at the end."""
        assert self.island is not None
        self.island.settle()
        return sha256(*(state_bytes(state) for _, state in sorted(self.island.states.items()))).hex()


def distance_to_optimum(machine: Machine) -> float:
    """Return ‖φ − optimum‖ / ‖optimum‖ over all spans."""
    assert machine.island is not None
    missing = [float(np.sum((state.anchor_N - OPTIMA[span]) ** 2)) for span, state in machine.island.states.items()]
    whole = [float(np.sum(OPTIMA[span] ** 2)) for span in machine.island.states]
    return math.sqrt(sum(missing) / sum(whole))
