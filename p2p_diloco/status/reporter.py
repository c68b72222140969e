"""Publish one peer's current status and its events, in sentences for people. It only observes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from p2p_diloco.bandwidth.line import LineWatch
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.errors import clean_text
from p2p_diloco.ids import Digest, PeerId, format_peer_id, sha256, short_peer_id
from p2p_diloco.node.node import SwarmNode
from p2p_diloco.node.traffic import Purpose
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.reach import Network, Standing, network_of
from p2p_diloco.protocol.wire.member import EQUAL_SHARE
from p2p_diloco.rate import counted, format_part
from p2p_diloco.status.event_log import Figure, PeerEvent
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus
from p2p_diloco.transport.link import TransportLimits

SPAN_BY_SPAN = frozenset({"adoption", "tips"})
"""Topics reported span by span, in every round in which an owner is dishonest."""
SHOWN_A_MINUTE = 4
"""Events shown per minute for each of those topics; the others are only counted."""


PACE_SECONDS = 10.0
"""Minimum time over which inner steps are counted; at least one cycle, too."""
MOST_OF_PLAN, FEWEST_IN_ROUND = 2.0, 2.0
"""A peer reports its pace above this multiple of the planned steps of a cycle, or below this many steps in a round."""
IDLE_CYCLES = 3
"""A ready peer reports a reason once it has been in no entry for this many cycles."""
STANDSTILL_SECONDS = 5.0
"""Time between two looks, about a second apart, beyond which this process did not run."""
MOST_FAILURES = 3
_WITHIN = {Network.MACHINE: ", within this machine", Network.SITE: ", within its own network", Network.WORLD: ""}


class PeerObserver(Protocol):
    """Receives a peer's status and events: implemented by the command line and by tests."""

    def listening(self, invite: str, *, own_model: bool) -> None:
        """Called with the invite of a founded run, once others can use it."""
        ...

    def status(self, status: PeerStatus) -> None:
        """Called with the current status, about once a second."""
        ...

    def event(self, event: PeerEvent) -> None:
        """Called with each event."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerStatus:
    """Effects of the limits of the machine's owner; the fields are those of `PeerStatus`."""

    paused: str = ""
    pause_reason: str = ""
    paused_until: float | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    month: str = ""
    month_sent: int = 0
    month_received: int = 0
    disk_saving: str = "all"
    control: str = ""

    def fields(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class StatusReporter:
    """A `SwarmObserver` that keeps counters and forwards events.

    Args:
        unix_seconds: this machine's wall clock, by which events are dated.
        steady: a clock that nobody sets, and that counts sleep where the system has one.
    """

    def __init__(
        self, *, observer: PeerObserver, unix_seconds: Callable[[], float], steady: Callable[[], float]
    ) -> None:
        self.phase = "connecting"
        self.anchor_loss: float | None = None
        self.local_loss: float | None = None
        self.state_digest = ""
        self.invite = ""
        self.addresses: tuple[str, ...] = ()
        self.engine: PeerEngine | None = None
        self.standing = Standing(is_reachable=False)
        self.ports: tuple[int, ...] = ()
        self.failed_dials: Mapping[PeerId, str] = {}
        self.trouble = ""
        self.line: LineWatch | None = None
        self.owner = OwnerStatus()
        """Effects of the limits of the machine's owner; the watch over them sets this."""
        self._latest = PeerStatus()
        self._observer = observer
        self._unix_seconds, self._steady = unix_seconds, steady
        self._looked_at: float | None = None
        self._standstill = (-math.inf, 0.0)
        """The end of the last standstill of this process, and its length."""
        self._others_heard_at = -math.inf
        self._rounds_closed = 0
        self._spans_closed = 0
        self._entries = 0
        self._included = 0
        self._could_be_included = 0
        self._ready_since: int | None = None
        self._steps_when_included = self._undone_when_included = 0
        self._included_before: int | None = None
        self._is_alone = False
        self._entries_at: int | None = None
        self._reported_reach: tuple[object, ...] = ()
        self._minutes: dict[str, tuple[float, int]] = {}
        self._counted: tuple[float, int] | None = None
        self._cycle_steps: float | None = None
        self._pace = ""

    def report(self, topic: str, text: str, **figures: Figure) -> None:
        """Forward an event, unless too many of its topic have occurred in the last minute."""
        now = self._unix_seconds()
        self._sum_up(now)
        if topic in SPAN_BY_SPAN:
            since, num = self._minutes.get(topic, (now, 0))
            self._minutes[topic] = (since, num + 1)
            if num >= SHOWN_A_MINUTE:
                return
        self._observer.event(PeerEvent(time=now, topic=topic, text=clean_text(text), figures=figures))

    def _sum_up(self, now: float) -> None:
        """Report how many events of a topic were omitted, a minute after the first of them."""
        over = {topic: num for topic, (since, num) in self._minutes.items() if not 0.0 <= now - since < 60.0}
        for topic, num in over.items():
            del self._minutes[topic]
            if num > SHOWN_A_MINUTE:
                text = f"{counted(num - SHOWN_A_MINUTE, 'more span')} like those above in the last minute"
                self._observer.event(PeerEvent(time=now, topic=topic, text=text, figures={}))

    def round_closed(self, closed: RoundClosed) -> None:
        """Count a round if this peer is ready, and report it."""
        if self.engine is not None and self.engine.ready:
            self._rounds_closed += 1
            self._spans_closed += closed.num_spans
            self._entries += closed.num_entries
            self._included += closed.num_included
            # An entry may include a peer that was ready until a moment ago, so cap the share at 1.
            self._could_be_included += max(closed.num_ready * closed.num_spans, closed.num_included)
            if closed.num_entries:
                self._entries_at = closed.round
        self.report(
            "round",
            f"round {closed.round}: {format_part(closed.num_entries, closed.num_spans, 'span')} got an entry",
            round=closed.round,
            num_spans=closed.num_spans,
            num_entries=closed.num_entries,
            num_included=closed.num_included,
            num_ready=closed.num_ready,
            num_members=closed.num_members,
        )

    def publish(
        self, engine: PeerEngine, node: SwarmNode, manifest: RunManifest, num_parameters: int, now: float
    ) -> None:
        """Publish the current status, and report when trouble or pace changes."""
        self._look_for_trouble(engine, now)
        self._look_at_pace(engine, manifest, now)
        self._latest = self.status(engine, node, manifest, num_parameters, now)
        self._observer.status(self._latest)

    def publish_offline(self, run: Digest, peer: PeerId) -> None:
        """Publish the status of a peer that is not on the network at present: the last one, without the others."""
        self._looked_at = None
        self._latest = replace(
            self._latest,
            run=run.hex(),
            peer=format_peer_id(peer),
            pid=os.getpid(),
            updated=self._unix_seconds(),
            phase=self.phase,
            ready=False,
            leaving=False,
            peers=(),
            upload_rate=None,
            download_rate=None,
            tokens_per_second=0.0,
            **self.owner.fields(),
        )
        self._observer.status(self._latest)

    def report_reach(self, standing: Standing, ports: tuple[int, ...], *, trains: bool) -> None:
        """Record whether and where others can dial this peer; report changes."""
        self.standing, self.ports = standing, ports
        place = standing.proofs[0].place if standing.proofs else ""
        said = (standing.is_reachable, place, bool(standing.failures))
        if self._reported_reach[:2] != said[:2] or not (standing.is_reachable or self._reported_reach == said):
            self._reported_reach = said
            self.report("reach", reach_sentence(standing, ports, trains=trains))

    def _look_for_trouble(self, engine: PeerEngine, now: float) -> None:
        """Find out why this peer is in no entry or alone, if it is; report when that begins and ends."""
        self._look_at_time(engine)
        silent = now - self._others_heard_at
        round_index = engine.rules.clock.round_at(now)
        if not engine.ready or engine.membership.is_paused:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = max(round_index, 0)
        cycles = idle_cycles(engine, self._ready_since, now)
        if not cycles:
            self._steps_when_included = engine.conditions.progress.steps
            self._undone_when_included = engine.conditions.progress.undone
        before, self.trouble = self.trouble, ""
        is_alone = self._ready_since is not None and was_cut_off(engine)
        if is_alone:
            self.trouble = explain_solitude(engine, silent)
        elif cycles >= IDLE_CYCLES:
            span = IDLE_CYCLES * engine.rules.clock.num_fragments
            woke, stood = self._standstill
            is_recent = self._steady() - woke < (IDLE_CYCLES + 1) * engine.rules.cycle_seconds
            idle = Idleness(
                cycles=cycles,
                steps=engine.conditions.progress.steps - self._steps_when_included,
                undone=engine.conditions.progress.undone - self._undone_when_included,
                failures=self.failed_dials,
                others_learn=self._entries_at is not None and round_index - self._entries_at <= span,
                stood=stood if is_recent else 0.0,
                silent=silent,
            )
            self.trouble = explain_idleness(engine, idle, now)
        is_new = is_alone and not self._is_alone
        self._is_alone = is_alone
        if self.trouble and (is_new or not before):
            self._included_before = engine.last_included
            self.report("trouble", self.trouble)
        elif is_alone:
            self._included_before = engine.last_included  # its own entries include nobody else
        elif before and not self.trouble and engine.ready and engine.last_included != self._included_before:
            again = "" if self._included_before is None else " again"
            self.report("trouble", f"contributions are included in entries{again}")

    def _look_at_time(self, engine: PeerEngine) -> None:
        """Note whether this process has stood still for over a cycle, and when another peer was last heard."""
        steady = self._steady()
        stood = steady - self._looked_at if self._looked_at is not None else 0.0
        if stood > max(STANDSTILL_SECONDS, engine.rules.cycle_seconds):
            self._standstill = (steady, stood)
        self._looked_at = steady
        # The membership forgets who has been silent for long.
        heard = (heard.at for peer, heard in engine.membership.peer_views.items() if peer != engine.me.peer)
        self._others_heard_at = max(self._others_heard_at, *heard, -math.inf)

    def _look_at_pace(self, engine: PeerEngine, manifest: RunManifest, now: float) -> None:
        """Count the inner steps per cycle; report when they become too many or too few."""
        steps, cycle_seconds = engine.conditions.progress.steps, engine.rules.cycle_seconds
        if self._counted is None or not engine.ready or not steps or engine.membership.is_paused:
            self._counted = (now, steps)
            return
        since, before = self._counted
        if now - since < max(PACE_SECONDS, cycle_seconds):
            return
        self._counted = (now, steps)
        self._cycle_steps = (steps - before) * cycle_seconds / (now - since)
        had_pace, self._pace = bool(self._pace), ""
        if (planned := manifest.rounds.planned_steps) is not None:
            own_model = manifest.model.is_own_loop
            self._pace = _explain_pace(self._cycle_steps, planned, engine.rules.clock, own_model=own_model)
        if self._pace and not had_pace:
            self.report("pace", self._pace, cycle_steps=self._cycle_steps)

    def status(
        self, engine: PeerEngine, node: SwarmNode, manifest: RunManifest, num_parameters: int, now: float
    ) -> PeerStatus:
        """Return the current status."""
        roster, grid, progress = engine.book.in_force, engine.book.grid(), engine.conditions.progress
        round_index = engine.rules.clock.round_at(now)
        limits = self.line.limits if self.line is not None else TransportLimits()
        up, down = self.line.rates(self._unix_seconds()) if self.line is not None else (None, None)
        heads = [head.digest for _, head in sorted(engine.chains.heads.items())]
        return PeerStatus(
            run=engine.rules.run.hex(),
            run_name=manifest.name,
            peer=format_peer_id(engine.me.peer),
            role="trainer" if engine.me.trains else "archivist" if engine.me.archives else "bootstrap",
            incarnation=engine.me.incarnation,
            pid=os.getpid(),
            updated=self._unix_seconds(),
            round=round_index,
            cycle=engine.rules.clock.cycle(round_index),
            roster=roster.k if roster is not None else 0,
            degraded_rosters=engine.book.num_degraded() if roster is not None else 0,
            num_members=sum(member.trains for member in roster.members) if roster is not None else 0,
            grid=tuple(map(len, grid.rows)) if grid is not None else (),
            row=grid.row_of.get(engine.me.peer) if grid is not None else None,
            averaging_share=engine.conditions.share / EQUAL_SHARE,
            num_ready=engine.membership.presence.num_ready(now),
            ready=engine.ready,
            leaving=engine.membership.leaving,
            phase=self.phase,
            inner_steps=progress.steps,
            steps_undone=progress.undone,
            cycle_steps=self._cycle_steps,
            planned_steps=manifest.rounds.planned_steps,
            tokens=progress.tokens,
            tokens_per_second=progress.tokens_per_second,
            loss=progress.loss if progress.steps else None,
            anchor_loss=self.anchor_loss,
            local_loss=self.local_loss,
            parameters=num_parameters,
            rounds_closed=self._rounds_closed,
            spans_closed=self._spans_closed,
            entries_absorbed=self._entries,
            participation=self._included / self._could_be_included if self._could_be_included else None,
            bytes_sent=_byte_counts(node.traffic.sent),
            bytes_received=_byte_counts(node.traffic.received),
            max_upload=_bits(limits.upload_bytes_per_second),
            max_download=_bits(limits.download_bytes_per_second),
            upload_rate=up,
            download_rate=down,
            vector_cycles=self._rounds_closed / engine.rules.clock.num_fragments,
            peers=_peer_lines(engine, now),
            log_digest=sha256(*heads).hex() if heads else "",
            state_digest=self.state_digest,
            addresses=self.addresses,
            reachable=self.standing.is_reachable,
            reachable_at=tuple(dict.fromkeys(proof.place for proof in self.standing.proofs)),
            proved_by=self.standing.num_proved,
            reach=clean_text(reach_sentence(self.standing, self.ports, trains=engine.me.trains)),
            trouble=clean_text(self.trouble),
            pace=self._pace,
            clock=node.clocks.sentence,
            weight=engine.influence.shares.get(engine.me.peer),
            influence=engine.influence.named(),
            invite=self.invite,
            own_model=manifest.model.is_own_loop,
            **self.owner.fields(),
        )


def _explain_pace(cycle_steps: float, planned_steps: int, clock: RoundClock, *, own_model: bool) -> str:
    """Return what is wrong with the number of steps in a cycle, and what to do; empty if nothing is."""
    found = f"a cycle has {cycle_steps:.2g} inner steps here, {planned_steps} were planned"
    step_seconds = clock.round_seconds * clock.num_fragments / max(cycle_steps, 0.1)
    new = f"new_run(step_seconds={step_seconds:.2g})" if own_model else f"new --step-seconds {step_seconds:.2g}"
    remedy = f"if most islands are like this one, create the next run with {new}"
    if cycle_steps > MOST_OF_PLAN * planned_steps:
        return f"{found}, and longer cycles learn less; {remedy}"
    if cycle_steps < FEWEST_IN_ROUND * clock.num_fragments:
        return f"{found}; contributions are due in the first half of a round, so many arrive late; {remedy}"
    return ""


def _bits(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else 8 * bytes_per_second


def _byte_counts(counts: dict[Purpose, int]) -> ByteCounts:
    return ByteCounts(vectors=counts["vectors"], control=counts["control"], transfer=counts["transfer"])


def _peer_lines(engine: PeerEngine, now: float) -> tuple[PeerLine, ...]:
    grid = engine.book.grid()
    lines = []
    for peer, heard in sorted(engine.membership.peer_views.items()):
        beat = heard.heartbeat
        lines.append(
            PeerLine(
                peer=format_peer_id(peer),
                ready=beat.ready,
                reachable=beat.can_be_dialled,
                trains=beat.trains,
                steps=beat.steps,
                tokens_per_second=beat.tokens_per_second,
                loss=beat.loss if beat.steps else None,
                seconds_since_heard=max(now - heard.at, 0.0),
                row=grid.row_of.get(peer) if grid is not None else None,
                weight=engine.influence.shares.get(peer),
            )
        )
    return tuple(lines)


def reach_sentence(standing: Standing, ports: tuple[int, ...], *, trains: bool) -> str:
    """Return a sentence: whether others can dial this peer, and what its owner can do about it.

    Args:
        standing: the reachability that the proofs show.
        ports: ports on which the peer listens; none with --dial-out-only.
        trains: False for a bootstrap peer, which others must be able to reach.
    """
    if not ports:
        return "outbound only, as configured; training works through other peers"
    if standing.is_reachable:
        proof, peers = standing.proofs[0], counted(standing.num_proved, "peer")
        return f"reachable at {proof.place}{_WITHIN[network_of(proof.host)]} (proved by {peers})"
    if not standing.proofs and not standing.failures:
        return "outbound only until another member has dialled this peer"
    if standing.proofs:
        near = standing.proofs[0]
        why = f"reached only at {near.place}{_WITHIN[network_of(near.host)]}, but some members are on other networks"
        if standing.failures:
            why = f"{why} ({standing.failures[0].reason})"
    else:
        why = f"no member could dial it ({standing.failures[0].reason})"
    otherwise = (
        "do nothing: training works through other peers"
        if trains
        else "other peers can join through it only from there"
    )
    return f"outbound only: {why}; forward TCP port {ports[0]} on the router to this machine, or {otherwise}"


def idle_cycles(engine: PeerEngine, ready_since: int | None, now: float) -> int:
    """Return for how many whole cycles a ready trainer has been in no entry; 0 for any other peer."""
    if ready_since is None or not engine.ready or not engine.me.trains:
        return 0
    clock = engine.rules.clock
    since = max(ready_since, engine.last_included if engine.last_included is not None else ready_since)
    return max(clock.round_at(now) - since - 1, 0) // clock.num_fragments


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """The facts about a peer that is in no entry.

    Attributes:
        cycles: for how many cycles.
        steps: inner steps that it made meanwhile.
        undone: steps that were undone or not made meanwhile, because something was not finite.
        failures: reason for each failed dial, by peer.
        others_learn: whether entries with other peers' contributions arrived meanwhile.
        stood: for how many seconds this process stood still just before; 0 if it ran.
        silent: for how many seconds nobody has been heard; infinite if nobody ever was.
    """

    cycles: int
    steps: int
    failures: Mapping[PeerId, str]
    others_learn: bool
    undone: int = 0
    stood: float = 0.0
    silent: float = 0.0


def was_cut_off(engine: PeerEngine) -> bool:
    """Return whether this peer trains alone since a roster that the others did not vote for.

    It makes entries there, with nobody's contributions but its own, so nothing else shows it.
    """
    alone, roster = None, engine.book.in_force
    if roster is None or not engine.me.trains or sum(member.trains for member in roster.members) != 1:
        return False
    for certified in reversed(engine.book.chain()):
        if {member.peer for member in certified.roster.members if member.trains} != {engine.me.peer}:
            break
        alone = certified.roster
    return alone is not None and alone.degraded


def explain_solitude(engine: PeerEngine, silent: float) -> str:
    """Explain why a peer that was cut off trains alone.

    Args:
        silent: for how many seconds nobody has been heard.
    """
    why = _explain_silence(engine, silent) or "it and the others left each other out while there was no link"
    return f"trains alone, until it reaches others and they agree on a roster: {why}"


def _explain_silence(engine: PeerEngine, silent: float) -> str:
    """Return for how long nobody has been heard; empty if somebody was just now, or nobody ever."""
    if not engine.rules.silence_seconds < silent < math.inf:
        return ""
    return (
        f"nothing has arrived from any other peer for {silent:.0f} s; is its connection down, or are all others gone?"
    )


def explain_idleness(engine: PeerEngine, idle: Idleness, now: float) -> str:
    """Explain why a peer is in no entry."""
    return f"in no entry for {counted(idle.cycles, 'cycle')}: {_reason(engine, idle, now)}"


def _reason(engine: PeerEngine, idle: Idleness, now: float) -> str:
    if idle.stood:
        return f"this process stood still for {idle.stood:.0f} s: its machine was asleep or far too busy, or stopped it"
    roster, grid, me = engine.book.in_force, engine.book.grid(), engine.me.peer
    if roster is None or grid is None:
        return "no roster received; is any member reachable?"
    if silence := _explain_silence(engine, idle.silent):
        refused = sorted(idle.failures[peer] for peer in grid.reducers() & idle.failures.keys())[:MOST_FAILURES]
        return f"{silence} {'; '.join(refused)}".rstrip()
    if roster.member(me) is None:
        return _why_unlisted(engine, now)
    averaging = grid.reducers() - {me}
    unlinked = sorted(averaging - engine.linked)
    if unlinked:
        told = [f"{short_peer_id(peer)}: {idle.failures.get(peer, 'not dialled yet')}" for peer in unlinked]
        more = f" and {len(unlinked) - MOST_FAILURES} more" if len(unlinked) > MOST_FAILURES else ""
        return (
            f"no link to {format_part(len(unlinked), len(averaging), 'member')} that average "
            f"({'; '.join(told[:MOST_FAILURES])}{more})"
        )
    unsent = _why_unsent(engine, idle, now)
    if unsent:
        return unsent
    if idle.others_learn:
        return _why_late(engine, idle, now)
    others = roster.peers() - {me}
    if not others:
        return "no span gets an entry, and this peer is alone on the roster"
    away = sorted(others - engine.linked)
    told = [idle.failures[peer] for peer in away if peer in idle.failures][:MOST_FAILURES]
    dials = f" ({'; '.join(told)})" if told else ""
    linked = format_part(len(others) - len(away), len(others), "other member")
    return f"no span gets an entry; linked with {linked}{dials}"


def _why_unlisted(engine: PeerEngine, now: float) -> str:
    roster = engine.book.in_force
    assert roster is not None, "asked only of a peer that follows a roster"
    said = f"this peer is not on roster {roster.k} of {counted(len(roster.members), 'member')}"
    wait = engine.membership.declarations.returns.wait_seconds(engine.me.peer, engine.membership.me.incarnation, now)
    if not wait:
        return said
    return (
        f"{said}: it was in no entry for too long, and is listed again in about {wait:.0f} s; is its line or its "
        f"machine too slow for rounds of {engine.rules.clock.round_seconds:g} s?"
    )


def _why_unsent(engine: PeerEngine, idle: Idleness, now: float) -> str:
    """Return why the island made no contribution in all these cycles; empty if it made one or was not asked."""
    clock, exchange = engine.rules.clock, engine.exchange
    since = clock.round_at(now) - idle.cycles * clock.num_fragments
    if exchange.made_in >= since or exchange.asked_in < since:
        return ""
    if idle.undone:
        failed = f"{counted(idle.undone, 'step')} failed, the last one because {engine.conditions.progress.undone_why}"
        return f"{failed}; look at the learning rate, the batch and the precision"
    if not idle.steps:
        return "it has made no inner step meanwhile; does it wait for data, or is its machine too busy?"
    return (
        "it makes inner steps, but none ended in the first half of a round "
        f"({clock.round_seconds / 2:.2g} s); are steps too long for this run, or is its machine too busy?"
    )


def _why_late(engine: PeerEngine, idle: Idleness, now: float) -> str:
    clock, rules = engine.rules.clock, engine.rules
    refused = engine.last_refusal
    if refused is not None and refused[0] >= clock.round_at(now) - idle.cycles * clock.num_fragments:
        return f"its contributions are left out: {refused[1]}"
    num_bytes = max(
        sum(size for span, size in rules.payload_bytes.items() if span.fragment == fragment)
        for fragment in range(clock.num_fragments)
    )
    seconds = clock.round_seconds / 2
    return (
        f"its contributions arrive too late, or the entries that they build on do: {num_bytes / 1e6:.2g} MB are due in "
        f"the first half of a round, which takes an upload of more than {8 * num_bytes / 1e6 / seconds:.2g} Mbit/s; is "
        "its line slower, or does it lose packets?"
    )
