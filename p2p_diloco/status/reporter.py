"""Publish one peer's current status and its events, in sentences for people. It only observes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from p2p_diloco.bandwidth.uplink import UplinkWatch
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.errors import clean_text
from p2p_diloco.ids import SHORT_CHARACTERS, Digest, PeerId, format_peer_id, sha256
from p2p_diloco.node.node import Purpose, SwarmNode
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.reach import Network, Standing, network_of
from p2p_diloco.protocol.wire.member import EQUAL_SHARE
from p2p_diloco.protocol.wire.peer_name import decode_name, named
from p2p_diloco.rate import counted, format_part
from p2p_diloco.status.event_log import Figure, PeerEvent
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus
from p2p_diloco.status.trouble import LengthWatch, PaceWatch, TroubleWatch
from p2p_diloco.transport.link import TransportLimits

SPAN_BY_SPAN = frozenset({"adoption", "tips"})
"""Topics reported span by span, in every round in which an owner is dishonest."""
SHOWN_A_MINUTE = 4
"""Events shown per minute for each of those topics; the others are only counted."""
_SHORT_ID = re.compile(rf"12D3\.\.(\w{{{SHORT_CHARACTERS}}})")
"""A peer in a text, as `short_peer_id` writes it."""
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
class RoundCounts:
    """The closed rounds since this peer was ready.

    Attributes:
        rounds, spans, entries: number of rounds, of their spans, and of their entries.
        included: contributions in these entries.
        could_be_included: the same if all that were ready had been included.
        entries_at: the newest round with an entry; None if there was none.
    """

    rounds: int = 0
    spans: int = 0
    entries: int = 0
    included: int = 0
    could_be_included: int = 0
    entries_at: int | None = None

    def plus(self, closed: RoundClosed) -> RoundCounts:
        return RoundCounts(
            rounds=self.rounds + 1,
            spans=self.spans + closed.num_spans,
            entries=self.entries + closed.num_entries,
            included=self.included + closed.num_included,
            # An entry may include a peer that was ready until a moment ago, so cap the share at 1.
            could_be_included=self.could_be_included + max(closed.num_ready * closed.num_spans, closed.num_included),
            entries_at=closed.round if closed.num_entries else self.entries_at,
        )


class EventFeed:
    """Passes events on, with the time, but few a minute of those that come span by span."""

    def __init__(self, observer: PeerObserver, unix_seconds: Callable[[], float]) -> None:
        self._observer, self._unix_seconds = observer, unix_seconds
        self._minutes: dict[str, tuple[float, int]] = {}
        """When the minute of a topic began, and its events since then."""

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


class StatusReporter:
    """A `SwarmObserver` that keeps counters and publishes the status.

    Attributes:
        latest: the latest status, with what the parts of this peer have noted since.

    Args:
        unix_seconds: this machine's wall clock, by which events are dated.
        steady: a clock that nobody sets, and that counts sleep where the system has one.
    """

    def __init__(
        self, *, observer: PeerObserver, unix_seconds: Callable[[], float], steady: Callable[[], float]
    ) -> None:
        self.latest = PeerStatus()
        self._reach = Standing(is_reachable=False), tuple[int, ...]()
        self._counts = RoundCounts()
        self._trouble, self._pace, self._length = TroubleWatch(steady), PaceWatch(), LengthWatch()
        self._observer, self._unix_seconds = observer, unix_seconds
        self._feed = EventFeed(observer, unix_seconds)
        self._engine: PeerEngine | None = None
        self._line: UplinkWatch | None = None
        self._failed_dials: Mapping[PeerId, str] = {}
        self._reported_reach: tuple[object, ...] = ()

    def follow(
        self, engine: PeerEngine, *, line: UplinkWatch | None = None, failed_dials: Mapping[PeerId, str] | None = None
    ) -> None:
        """Read from the engine and the line of a session, and from its failed dials, which go on changing."""
        self._engine, self._line, self._failed_dials = engine, line, {} if failed_dials is None else failed_dials

    def note(self, **facts: Any) -> None:
        """Replace some fields of the status."""
        self.latest = replace(self.latest, **facts)

    def note_reach(self, *, standing: Standing | None = None, ports: tuple[int, ...]) -> None:
        """Note on which ports this peer listens, and whether others have proved that they can dial it."""
        self._reach = self._reach[0] if standing is None else standing, ports

    def report(self, topic: str, text: str, **figures: Figure) -> None:
        """Forward an event, unless too many of its topic have occurred in the last minute.

        Peers that the status lists appear with their names.
        """
        self._feed.report(topic, _SHORT_ID.sub(self._with_name, text), **figures)

    def _with_name(self, found: re.Match[str]) -> str:
        ids = (line for line in self.latest.peers if line.peer.endswith(found[1]))
        return named(found[0], next((line.name for line in ids), ""))

    def round_closed(self, closed: RoundClosed) -> None:
        """Count a round if this peer is ready, and report it."""
        if self._engine is not None and self._engine.ready:
            self._counts = self._counts.plus(closed)
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
        if text := self._trouble.look(engine, self._failed_dials, self._counts.entries_at, now):
            self.report("trouble", text)
        if text := self._pace.look(engine, manifest, self.latest, now):
            self.report("pace", text, cycle_steps=self._pace.cycle_steps or 0.0)
        if text := self._length.look(engine, manifest, now):
            self.report("length", text)
        self.latest = self.status(engine, node, manifest, num_parameters, now)
        self._observer.status(self.latest)

    def publish_offline(self, run: Digest, peer: PeerId) -> None:
        """Publish the status of a peer that is not on the network at present: the last one, without the others."""
        self._trouble.pause()
        self.note(
            run=run.hex(),
            peer=format_peer_id(peer),
            pid=os.getpid(),
            updated=self._unix_seconds(),
            ready=False,
            leaving=False,
            peers=(),
            upload_rate=None,
            download_rate=None,
            tokens_per_second=0.0,
        )
        self._observer.status(self.latest)

    def report_reach(self, standing: Standing, ports: tuple[int, ...], *, trains: bool) -> None:
        """Record whether and where others can dial this peer; report changes."""
        self.note_reach(standing=standing, ports=ports)
        place = standing.proofs[0].place if standing.proofs else ""
        said = (standing.is_reachable, place, bool(standing.failures))
        if self._reported_reach[:2] != said[:2] or not (standing.is_reachable or self._reported_reach == said):
            self._reported_reach = said
            self.report("reach", reach_sentence(standing, ports, trains=trains))

    def status(
        self, engine: PeerEngine, node: SwarmNode, manifest: RunManifest, num_parameters: int, now: float
    ) -> PeerStatus:
        counts, (standing, ports) = self._counts, self._reach
        roster, grid, progress = engine.book.in_force, engine.book.grid(), engine.conditions.progress
        round_index = engine.rules.clock.round_at(now)
        limits = self._line.limits if self._line is not None else TransportLimits()
        up, down = self._line.rates(self._unix_seconds()) if self._line is not None else (None, None)
        share_done, seconds_left = _how_far(manifest, engine, now)
        heads = [head.digest for _, head in sorted(engine.chains.heads.items())]
        return replace(
            self.latest,
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
            share_done=share_done,
            seconds_left=seconds_left,
            ready=engine.ready,
            leaving=engine.membership.local.leaving,
            inner_steps=progress.steps,
            steps_undone=progress.undone,
            cycle_steps=self._pace.cycle_steps,
            planned_steps=manifest.rounds.planned_steps,
            tokens=progress.tokens,
            tokens_per_second=progress.tokens_per_second,
            loss=progress.loss if progress.steps else None,
            parameters=num_parameters,
            rounds_closed=counts.rounds,
            spans_closed=counts.spans,
            entries_absorbed=counts.entries,
            participation=counts.included / counts.could_be_included if counts.could_be_included else None,
            bytes_sent=_byte_counts(node.traffic.sent),
            bytes_received=_byte_counts(node.traffic.received),
            max_upload=_bits(limits.upload_bytes_per_second),
            max_download=_bits(limits.download_bytes_per_second),
            upload_rate=up,
            download_rate=down,
            vector_cycles=counts.rounds / engine.rules.clock.num_fragments,
            peers=_peer_lines(engine, now),
            log_digest=sha256(*heads).hex() if heads else "",
            reachable=standing.is_reachable,
            reachable_at=tuple(dict.fromkeys(proof.place for proof in standing.proofs)),
            proved_by=standing.num_proved,
            reach=clean_text(reach_sentence(standing, ports, trains=engine.me.trains)),
            trouble=clean_text(self._trouble.sentence),
            pace=self._pace.sentence,
            length_learnt=progress.length_learnt,
            length_sent=progress.length_sent,
            length_given_up=progress.length_given_up,
            clock=node.clocks.sentence,
            weight=engine.influence.shares.get(engine.me.peer),
            claimed_token_share=engine.influence.claimed_shares.get(engine.me.peer) if engine.me.trains else None,
            influence=engine.influence.named(),
            own_model=manifest.model.is_own_loop,
        )


def _how_far(manifest: RunManifest, engine: PeerEngine, now: float) -> tuple[float | None, float | None]:
    """Return the share of the run's planned length that has passed, and the seconds left; None if no end is planned."""
    if not manifest.plans_an_end:
        return None, None
    planned = manifest.rounds.planned_cycles * engine.rules.cycle_seconds
    passed = min(max(now - engine.rules.clock.start_seconds, 0.0), planned)
    return passed / planned, planned - passed


def _bits(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else 8 * bytes_per_second


def _byte_counts(counts: dict[Purpose, int]) -> ByteCounts:
    return ByteCounts(vectors=counts["vectors"], control=counts["control"], transfer=counts["transfer"])


def _peer_lines(engine: PeerEngine, now: float) -> tuple[PeerLine, ...]:
    grid = engine.book.grid()
    lines = []
    for peer, view in sorted(engine.membership.liveness.views.items()):
        beat = view.heartbeat
        step_tokens = beat.tokens / beat.steps if beat.steps and beat.tokens else None
        cycle_tokens = beat.tokens_per_second * engine.rules.cycle_seconds
        lines.append(
            PeerLine(
                peer=format_peer_id(peer),
                name=decode_name(beat.name),
                ready=beat.ready,
                reachable=beat.can_be_dialled,
                trains=beat.trains,
                steps=beat.steps,
                step_tokens=step_tokens,
                cycle_steps=cycle_tokens / step_tokens if step_tokens else None,
                tokens_per_second=beat.tokens_per_second,
                loss=beat.loss if beat.steps else None,
                seconds_since_heard=max(now - view.at, 0.0),
                row=grid.row_of.get(peer) if grid is not None else None,
                weight=engine.influence.shares.get(peer),
                claimed_token_share=engine.influence.claimed_shares.get(peer) if beat.trains else None,
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
