"""Find out why a peer is in no entry or trains alone, and whether its cycles have too many or too few steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.rate import counted, format_part
from p2p_diloco.status.status_file import PeerStatus

PACE_SECONDS = 10.0
"""Minimum time over which inner steps are counted; at least one cycle, too."""
MOST_OF_PLAN, FEWEST_IN_ROUND = 2.0, 2.0
"""A peer reports its pace above this multiple of the planned steps of a cycle, or below this many steps in a round."""
IDLE_CYCLES = 3
"""A ready peer reports a reason once it has been in no entry for this many cycles."""
STANDSTILL_SECONDS = 5.0
"""Time between two looks, about a second apart, beyond which this process did not run."""
MOST_FAILURES = 3
LENGTH_SECONDS, LEAST_GIVEN_UP = 3600.0, 0.01
"""A peer reports at most so often that it gives up what it has learnt, and only if it is such a share of it."""


class TroubleWatch:
    """Looks at a peer about once a second; `sentence` says why it is in no entry or alone, and is empty if all is well.

    Args:
        steady: a clock that nobody sets, and that counts sleep where the system has one.
    """

    def __init__(self, steady: Callable[[], float]) -> None:
        self.sentence = ""
        self._steady = steady
        self._looked_at: float | None = None
        self._standstill = (-math.inf, 0.0)
        """The end of the last standstill of this process, and its length."""
        self._last_heartbeat_at = -math.inf
        self._ready_since: int | None = None
        self._when_included = (0, 0)
        """Steps, and steps undone, when this peer was last in an entry."""
        self._included_before: int | None = None
        self._is_alone = False

    def pause(self) -> None:
        """Do not take the time until the next look for a standstill."""
        self._looked_at = None

    def look(self, engine: PeerEngine, failed_dials: Mapping[PeerId, str], entries_at: int | None, now: float) -> str:
        """Find out what is wrong; return what to report, if that begins or ends.

        Args:
            failed_dials: reason for each failed dial, by peer.
            entries_at: the newest round with an entry; None if there was none.
        """
        self._look_at_time(engine)
        round_index = max(engine.rules.clock.round_at(now), 0)
        if not engine.ready or engine.conditions.is_paused:
            self._ready_since = None
        elif self._ready_since is None:
            self._ready_since = round_index
        cycles = idle_cycles(engine, self._ready_since, now)
        if not cycles:
            self._when_included = (engine.conditions.progress.steps, engine.conditions.progress.undone)
        before, self.sentence = self.sentence, ""
        was_alone, self._is_alone = self._is_alone, self._ready_since is not None and was_cut_off(engine)
        if self._is_alone:
            self.sentence = explain_solitude(engine, now - self._last_heartbeat_at)
        elif cycles >= IDLE_CYCLES:
            self.sentence = explain_idleness(engine, self._idleness(engine, cycles, failed_dials, entries_at, now), now)
        begins = bool(self.sentence) and (not before or (self._is_alone and not was_alone))
        if begins or self._is_alone:  # the entries of a peer that is alone include nobody else
            self._included_before = engine.last_included
        if begins:
            return self.sentence
        if before and not self.sentence and engine.ready and engine.last_included != self._included_before:
            return f"contributions are included in entries{'' if self._included_before is None else ' again'}"
        return ""

    def _idleness(
        self,
        engine: PeerEngine,
        cycles: int,
        failed_dials: Mapping[PeerId, str],
        entries_at: int | None,
        now: float,
    ) -> Idleness:
        clock = engine.rules.clock
        woke, stood = self._standstill
        is_recent = self._steady() - woke < (IDLE_CYCLES + 1) * engine.rules.cycle_seconds
        steps, undone = self._when_included
        return Idleness(
            cycles=cycles,
            steps=engine.conditions.progress.steps - steps,
            undone=engine.conditions.progress.undone - undone,
            failures=failed_dials,
            others_learn=entries_at is not None
            and clock.round_at(now) - entries_at <= IDLE_CYCLES * clock.num_fragments,
            stood=stood if is_recent else 0.0,
            silent=now - self._last_heartbeat_at,
        )

    def _look_at_time(self, engine: PeerEngine) -> None:
        """Note whether this process has stood still for over a cycle, and when another peer was last heard."""
        steady = self._steady()
        stood = steady - self._looked_at if self._looked_at is not None else 0.0
        if stood > max(STANDSTILL_SECONDS, engine.rules.cycle_seconds):
            self._standstill = (steady, stood)
        self._looked_at = steady
        # The membership forgets who has been silent for long.
        received = (view.at for peer, view in engine.membership.liveness.views.items() if peer != engine.me.peer)
        self._last_heartbeat_at = max(self._last_heartbeat_at, *received, -math.inf)


class PaceWatch:
    """Counts the inner steps of this peer per cycle; `sentence` warns of too many or too few."""

    def __init__(self) -> None:
        self.sentence = ""
        self.cycle_steps: float | None = None
        self._counted: tuple[float, int] | None = None
        self._windows: int | None = None

    def look(self, engine: PeerEngine, manifest: RunManifest, status: PeerStatus, now: float) -> str:
        """Count; return what to report, if a warning begins. `status` has the windows of a step."""
        steps, cycle_seconds = engine.conditions.progress.steps, engine.rules.cycle_seconds
        is_same = self._windows == status.step_windows
        if self._counted is None or not engine.ready or not steps or engine.conditions.is_paused or not is_same:
            self._counted, self._windows = (now, steps), status.step_windows
            return ""
        since, before = self._counted
        if now - since < max(PACE_SECONDS, cycle_seconds):
            return ""
        self._counted = (now, steps)
        self.cycle_steps = (steps - before) * cycle_seconds / (now - since)
        had_warned, self.sentence = bool(self.sentence), ""
        if (planned := manifest.rounds.planned_steps) is not None:
            self.sentence = _explain_pace(self.cycle_steps, planned, engine.rules.clock, manifest, status)
        return "" if had_warned else self.sentence


class LengthWatch:
    """Tells the owner of a peer that gives up part of what it has learnt, because it was too long to be sent."""

    def __init__(self) -> None:
        self._reported_at, self._reported = -math.inf, (0.0, 0.0)

    def look(self, engine: PeerEngine, manifest: RunManifest, now: float) -> str:
        """Return what to report: nothing within an hour of the last time, or without a contribution since then."""
        progress = engine.conditions.progress
        lengths = sent, given_up = progress.length_sent, progress.length_given_up
        is_little = given_up <= LEAST_GIVEN_UP * (sent + given_up)
        if is_little or lengths == self._reported or now - self._reported_at < LENGTH_SECONDS:
            return ""
        self._reported_at, self._reported = now, lengths
        less = "use a lower learning rate or gpu_duty" if manifest.model.is_own_loop else "use a lower --gpu-duty"
        tokens = ', or ask for a run with trust.weights = "tokens"' if manifest.trust.weights == "equal" else ""
        return (
            f"this machine has given up {100 * given_up / (sent + given_up):.0f} % of what it could have contributed "
            f"lately: contributions have at most {engine.rules.contribution_limit:g} median lengths, and it learns "
            "more between two of them, or sends few (see participation and limits on upload); if this goes on, "
            f"{less}{tokens}"
        )


def _explain_pace(
    cycle_steps: float, planned_steps: int, clock: RoundClock, manifest: RunManifest, status: PeerStatus
) -> str:
    """Return what is wrong with the number of steps in a cycle, and what to do; empty if nothing is.

    While a larger or smaller batch may still help, the island tries it by itself.
    """
    own_model = manifest.model.is_own_loop
    windows, fewest, most = status.step_windows or 0, status.fewest_windows or 0, status.most_windows or 0
    is_fast, is_slow = cycle_steps > MOST_OF_PLAN * planned_steps, MOST_OF_PLAN * cycle_steps < planned_steps
    if (is_fast and windows < most) or (is_slow and windows > fewest):
        return ""
    found = f"a cycle has {cycle_steps:.2g} inner steps here, {planned_steps} were planned"
    if fewest < most and (is_fast or is_slow):
        limit = "most" if is_fast else "fewest"
        found += f", although a step takes {counted(windows, 'window')}, the {limit} that help here"
    step_seconds = clock.round_seconds * clock.num_fragments / max(cycle_steps, 0.1)
    if windows and status.planned_windows:  # `new` asks for a step of the planned batch
        step_seconds *= status.planned_windows / windows
    new = f"new_run(step_seconds={step_seconds:.2g})" if own_model else f"new --step-seconds {step_seconds:.2g}"
    remedy = f"if most islands are like this one, create the next run with {new}"
    if own_model:
        remedy = f"take swarm.batch_scale times the batch that the loop began with, or {remedy}"
    if is_fast:
        return f"{found}, and longer cycles learn less; {remedy}"
    if cycle_steps < FEWEST_IN_ROUND * clock.num_fragments:
        return f"{found}; contributions are due in the first half of a round, so many arrive late; {remedy}"
    return ""


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
    membership = engine.membership
    me = membership.local.me
    wait = membership.declarations.returns.wait_seconds(me.peer, me.incarnation, now)
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
