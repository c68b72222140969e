"""A run for tests: its rules, its founder, and machines with a disk and a fake state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.actions import Report, RoundClosed
from p2p_diloco.protocol.clock import LEAD_TURNS, RoundClock
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.histories import Activity
from p2p_diloco.protocol.membership.reach_proofs import provers_for
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import NO_BALLOTS, Ballots
from p2p_diloco.protocol.wire.entry import Entry, next_head
from p2p_diloco.protocol.wire.member import MOST_PROOFS, NO_PLACE, Member, ReachProof
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, founding_roster, founding_statement
from p2p_diloco.span_log import GENESIS_ROUND, SpanHead

RUN = sha256(b"a run")
ROUND_SECONDS = 8.0
NUM_SPANS = (3, 2)
SPAN_ELEMENTS = 4
PAYLOAD_BYTES = 6
PIECE_BYTES = 20
START_SECONDS = 0.0
MINUTE = 60.0


def peer_id(name: str) -> PeerId:
    return PeerId(sha256(b"peer", name.encode()))


def sign_as(peer: PeerId, statement: bytes) -> bytes:
    """A cheap stand-in for Ed25519: signatures are forged only by tests that say so."""
    return sha256(b"signed by", peer, statement) * 2


def verify(peer: PeerId, statement: bytes, signature: bytes) -> bool:
    return signature == sign_as(peer, statement)


def ballot_number(round_index: int, turn: int) -> int:
    """The ballot of a turn of a round; rounds here have four."""
    return LEAD_TURNS * round_index + turn + 1


def believed_proofs(engine: PeerEngine, now: float) -> tuple[ReachProof, ...]:
    """Proofs that the engine's peer can be dialled, by the founder where it is; no peer really dials for them."""
    roster, peer = engine.book.in_force, engine.me.peer
    if roster is None:
        return ()
    founder, cycle = engine.book.founder, max(engine.rules.clock.cycle(engine.rules.clock.round_at(now)), 0)
    provers = [founder] if peer != founder else sorted(provers_for(peer, roster, founder))[:MOST_PROOFS]
    unsigned = [ReachProof(prover=each, place=NO_PLACE, cycle=cycle, signature=bytes(64)) for each in provers]
    return tuple(replace(each, signature=sign_as(each.prover, each.statement(RUN, peer))) for each in unsigned)


ORGANISER = peer_id("organiser")
ALL_SPANS = tuple(SpanId(f, i) for f, count in enumerate(NUM_SPANS) for i in range(count))
CYCLE_SECONDS = ROUND_SECONDS * len(NUM_SPANS)


def run_rules(*, stalled_cycles: int = 3, group_size: int = 16) -> RunRules:
    clock = RoundClock(start_seconds=START_SECONDS, round_seconds=ROUND_SECONDS, num_fragments=len(NUM_SPANS))
    return RunRules(
        run=RUN,
        organiser=ORGANISER,
        clock=clock,
        num_spans=NUM_SPANS,
        span_elements=dict.fromkeys(ALL_SPANS, SPAN_ELEMENTS),
        payload_bytes=dict.fromkeys(ALL_SPANS, PAYLOAD_BYTES),
        row_mean_bytes=dict.fromkeys(ALL_SPANS, PAYLOAD_BYTES),
        entry_bytes=dict.fromkeys(ALL_SPANS, PAYLOAD_BYTES),
        group_size=group_size,
        least_stalled_cycles=stalled_cycles,
        heartbeat_seconds=1.0,
        weight_clip=4.0,
        contribution_limit=2.0,
        entry_limit=3.0,
        retained_cycles=16,
    )


def genesis_heads(founding: Roster) -> dict[SpanId, SpanHead]:
    return {
        span: SpanHead(
            digest=sha256(b"start", repr(span).encode()),
            height=0,
            round=GENESIS_ROUND,
            roster=founding.digest(),
            radius=1.0,
            median_weight=1000.0,
        )
        for span in ALL_SPANS
    }


def genesis_bytes(span: SpanId) -> bytes:
    return sha256(b"bytes", repr(span).encode())


def found_run(founder: PeerId, incarnation: int, *, trains: bool = True) -> CertifiedRoster:
    member = Member(peer=founder, incarnation=incarnation, trains=trains)
    roster = founding_roster(RUN, sha256(b"genesis"), member)
    return CertifiedRoster(
        roster=roster, ballot=0, votes=((ORGANISER, sign_as(ORGANISER, founding_statement(roster.digest()))),)
    )


@dataclass
class Disk:
    """The data that survives a kill."""

    incarnation: int = 0
    rosters: list[CertifiedRoster] = field(default_factory=list)
    ballots: Ballots = NO_BALLOTS
    activity: Activity | None = None
    checkpoint: dict[SpanId, tuple[SpanHead, bytes]] = field(default_factory=dict)
    entries: dict[SpanId, dict[Digest, Entry]] = field(default_factory=dict)

    def replayed(self) -> dict[SpanId, tuple[SpanHead, bytes]]:
        """Return the checkpoint with all entries on this disk that follow it."""
        return {span: self.rebuilt(span) for span in self.checkpoint}

    def rebuilt(self, span: SpanId, until: Digest | None = None) -> tuple[SpanHead, bytes]:
        """Return what a span should be at chain digest `until`, or as far as the entries lead."""
        head, state = self.checkpoint[span]
        while head.digest != until and (entry := self.entries.get(span, {}).get(head.digest)) is not None:
            head, state = next_head(head, entry), absorbed_bytes(state, entry)
        return head, state

    def rebuilt_before(self, span: SpanId, tip: Digest) -> tuple[SpanHead, bytes] | None:
        """Return what a span was before the entry that led to `tip`, if checkpoint and entries lead there."""
        before, now = None, self.checkpoint[span]
        while now[0].digest != tip and (entry := self.entries.get(span, {}).get(now[0].digest)) is not None:
            before, now = now, (next_head(now[0], entry), absorbed_bytes(now[1], entry))
        return before if now[0].digest == tip else None


def absorbed_bytes(state: bytes, entry: Entry) -> bytes:
    return sha256(state, entry.payload)


@dataclass
class Machine:
    """One peer with its disk, its island's vectors and its reports."""

    name: str
    peer: PeerId
    dialable: bool
    trains: bool
    offset: float = 0.0
    disk: Disk = field(default_factory=Disk)
    engine: PeerEngine | None = None
    vectors: dict[SpanId, tuple[SpanHead, bytes]] = field(default_factory=dict)
    paused: bool = False
    backlog: list[Callable[[], None]] = field(default_factory=list)
    life: int = 0
    wakes: int = 0
    reports: list[tuple[float, Report]] = field(default_factory=list)
    closed: list[RoundClosed] = field(default_factory=list)
    contributes: bool = True

    @property
    def rules_engine(self) -> PeerEngine:
        assert self.engine is not None, f"{self.name} is not running"
        return self.engine

    @property
    def roster(self) -> Roster:
        roster = self.rules_engine.book.in_force
        assert roster is not None
        return roster

    def topics(self) -> list[str]:
        return [report.topic for _, report in self.reports]
