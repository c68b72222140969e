"""One peer of a lab swarm: its engine, its disk, its island, its clock, and what has befallen it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.lab.island import Island
from p2p_diloco.lab.maths import SharedMaths
from p2p_diloco.lab.toy_run import peer_named
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.actions import Report, RoundClosed
from p2p_diloco.protocol.ballot import NO_BALLOTS, Ballots
from p2p_diloco.protocol.engine import PeerEngine, Recalled
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.roster import CertifiedRoster, Goodbye, Roster

REPORTS_KEPT = 64


@dataclass(slots=True)
class Disk:
    """What survives a kill. A full one refuses everything new and keeps what it holds.

    Attributes:
        incarnation: how often this peer was started; a disk that is lost does not reset it, since a peer that counts
            anew would not be heard.
    """

    incarnation: int = 0
    rosters: list[CertifiedRoster] = field(default_factory=list)
    ballots: Ballots = NO_BALLOTS
    goodbye: Goodbye | None = None
    checkpoint: dict[SpanId, SpanState] = field(default_factory=dict)
    entries: dict[SpanId, dict[Digest, Entry]] = field(default_factory=dict)
    is_full: bool = False

    def keep_incarnation(self) -> int:
        """Count a start.

        Raises:
            StateError: the disk is full.
        """
        self._need_room()
        self.incarnation += 1
        return self.incarnation

    def keep_ballots(self, ballots: Ballots) -> None:
        """Keep what the peer is bound to; raises StateError when full."""
        self._need_room()
        self.ballots = ballots

    def keep_roster(self, certified: CertifiedRoster) -> None:
        """Keep a certified roster; raises StateError when full."""
        self._need_room()
        self.rosters.append(certified)

    def keep_goodbye(self, goodbye: Goodbye) -> None:
        """Keep a good-bye; raises StateError when full."""
        self._need_room()
        self.goodbye = goodbye

    def keep_checkpoint(self, states: dict[SpanId, SpanState]) -> None:
        """Keep all spans, unless the disk is full: then the checkpoint before stays."""
        if not self.is_full:
            self.checkpoint = dict(states)

    def keep_entry(self, entry: Entry) -> None:
        """Keep an entry for others and for a restart, unless the disk is full."""
        if not self.is_full:
            self.entries.setdefault(entry.span, {})[entry.parent] = entry

    def give_up(self, span: SpanId) -> None:
        """Drop a span's entries: it goes by another branch."""
        self.entries.pop(span, None)

    def rebuilt(self, span: SpanId, maths: SharedMaths, until: Digest) -> SpanState:
        """Return what a span should be at chain digest `until`, or as far as the entries lead."""
        state = self.checkpoint[span]
        while state.head.digest != until and (entry := self.entry_after(span, state.head.digest)) is not None:
            state = maths.absorb(state, entry)
        return state

    def rebuilt_before(self, span: SpanId, maths: SharedMaths, tip: Digest) -> SpanState | None:
        """Return what a span was before the entry that led to `tip`, if the checkpoint and the entries lead there."""
        before, state = None, self.checkpoint[span]
        while state.head.digest != tip and (entry := self.entry_after(span, state.head.digest)) is not None:
            before, state = state, maths.absorb(state, entry)
        return before if state.head.digest == tip else None

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        """Return the kept entry of a span whose parent is `parent`."""
        return self.entries.get(span, {}).get(parent)

    def recall(self, states: Mapping[SpanId, SpanState]) -> Recalled:
        """Return what a restarted peer finds; `states` as replayed."""
        heads = {span: state.head for span, state in states.items()}
        return Recalled(
            rosters=tuple(self.rosters), ballots=self.ballots, goodbye=self.goodbye, heads=heads if heads else None
        )

    def _need_room(self) -> None:
        if self.is_full:
            raise StateError("the disk is full")


@dataclass(eq=False)
class Machine:
    """One peer. Times are seconds of virtual time; `local` is what its own swarm clock says.

    Attributes:
        life: changes with every start and every kill, so that what was meant for an earlier life is dropped.
        step_seconds: how long an inner step takes.
        offset_seconds, drift: how wrong its clock is; drift is seconds per second.
        links: open halves of links, by the peer at the other end.
        wanted: whom it would dial; None: everybody.
        cut_off_since: when it was first seen without links that lead anywhere; None: it has some.
        founds: whether it founds the run, and founds it again should it die before anybody else is certified.
        remembers: whether it knew, at its last start, what earlier incarnations had voted.
        tick_at: when the next tick is due, so that a later one is recognised as outdated.
    """

    name: str
    dialable: bool
    trains: bool
    step_seconds: float = 0.5
    offset_seconds: float = 0.0
    drift: float = 0.0
    disk: Disk = field(default_factory=Disk)
    engine: PeerEngine | None = None
    island: Island | None = None
    paused_at: float | None = None
    backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    life: int = 0
    links: dict[PeerId, Any] = field(default_factory=dict)
    wanted: frozenset[PeerId] | None = None
    cut_off_since: float | None = None
    tick_at: float = 0.0
    border_is_due: bool = False
    awake_since: float = 0.0
    slept_seconds: float = 0.0
    ready_at: float = 0.0
    contributes: bool = True
    founds: bool = False
    remembers: bool = False
    reports: deque[tuple[float, Report]] = field(default_factory=lambda: deque(maxlen=REPORTS_KEPT))
    topics: set[str] = field(default_factory=set)
    closed: deque[RoundClosed] = field(default_factory=lambda: deque(maxlen=REPORTS_KEPT))

    def __post_init__(self) -> None:
        self.peer: PeerId = peer_named(self.name)

    def wants(self, other: Machine) -> bool:
        """Tell whether it would dial `other`."""
        return self.wanted is None or other.peer in self.wanted

    def __repr__(self) -> str:
        return self.name

    @property
    def runs(self) -> bool:
        """Tell whether it has been started and not killed; it may be paused."""
        return self.engine is not None

    @property
    def running(self) -> PeerEngine:
        """The engine of a machine that runs."""
        assert self.engine is not None, f"{self.name} is not running"
        return self.engine

    @property
    def vectors(self) -> Island:
        """The island of a machine that runs."""
        assert self.island is not None, f"{self.name} is not running"
        return self.island

    @property
    def paused(self) -> bool:
        """Tell whether it is stopped as by SIGSTOP."""
        return self.paused_at is not None

    @property
    def roster(self) -> Roster:
        """The roster in force here."""
        roster = self.running.book.in_force
        assert roster is not None, f"{self.name} knows no roster"
        return roster

    def local(self, now: float) -> float:
        """Return what this machine's swarm clock says."""
        return now + self.offset_seconds + self.drift * now

    def steps_made(self, now: float) -> int:
        """Return the inner steps since the last start; none while paused."""
        return int((now - self.awake_since - self.slept_seconds) / self.step_seconds)

    def height(self) -> int:
        """Return the entries absorbed, summed over all spans."""
        return sum(state.head.height for state in self.vectors.states.values())
