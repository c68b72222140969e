"""Keeps this peer's swarm time with the members', and reports clocks that differ: swarm clocks and wall clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.node.clock_sync import SwarmClock
from p2p_diloco.node.reports import Report
from p2p_diloco.node.vector_actions import Post
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.wire.messages import Ping, Pong
from p2p_diloco.rate import counted
from p2p_diloco.transport.link import Transport
from p2p_diloco.wording import format_seconds

PATIENT_SILENCES = 2
"""Multiple of `silence_seconds` that a started peer waits for the swarm's time before it uses its own clock."""
REPORTED_AFTER_BEATS = 2
"""Heartbeats for which clocks may differ without a report: a peer that woke up sets its clock within one."""
PONG_SECONDS = 5.0
MISSET_SECONDS = 60.0
MOST_SHOWN = 3


class ClockKeeper:
    """Asks members for their clocks, and answers peers that ask for this one.

    Args:
        corrected: called when this machine's wall clock was found to be wrong, or right again.
    """

    def __init__(
        self,
        clock: SwarmClock,
        watch: ClockWatch,
        *,
        engine: PeerEngine,
        transport: Transport,
        post: Post,
        report: Report,
        corrected: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._clock = clock
        self._engine = engine
        self._transport = transport
        self._post = post
        self._report = report
        self._corrected = corrected
        self._sources: frozenset[PeerId] = frozenset()
        self._requested_at = float("-inf")
        self._agreed_at = asyncio.get_running_loop().time()
        self._has_reported_apart = False

    @property
    def sentence(self) -> str:
        """The wall clocks that are wrong at present; empty if none is."""
        return self._watch.sentence

    def begin(self) -> None:
        """Listen for the swarm's time."""
        rules = self._engine.rules
        patience_seconds = PATIENT_SILENCES * rules.silence_seconds
        self._clock.begin(rules.clock, latest_round=self._engine.latest_round(), patience_seconds=patience_seconds)
        self.choose_sources()

    def choose_sources(self) -> None:
        """Follow the clocks of the members that this peer can have a link to."""
        roster, me = self._engine.book.in_force, self._engine.membership.local.me
        if roster is None:
            return
        member = roster.member(me.peer)
        contact = self._engine.membership.liveness
        sources = self._sources = contact.clocks(self._clock.now())
        takes_part = member is not None and member.incarnation == me.incarnation
        depends_on_hub = contact.depends_on_hub(sources)
        self._clock.follow(sources, is_source=member is not None, takes_part=takes_part, depends_on_hub=depends_on_hub)
        self._requested_at = float("-inf")  # ask new sources at once

    def tick(self, now: float) -> None:
        """Ask members for their clocks once per heartbeat, and only listen while the time is uncertain."""
        beat, moment = self._engine.rules.heartbeat_seconds, asyncio.get_running_loop().time()
        if moment - self._requested_at >= beat:
            # They change when this peer becomes reachable, or heartbeats of other members arrive.
            if self._sources != self._engine.membership.liveness.clocks(now):
                self.choose_sources()
            self._requested_at = moment
            rounds, heads = self._engine.rules.clock, self._engine.chains.heads.values()
            self._clock.poll(rounds.begin(max((head.round for head in heads), default=0) - 1))
            for peer in sorted(self._transport.linked_peers()):
                if self._clock.counts(peer) and self._clock.is_due(peer, beat):
                    self._post(peer, Ping(nonce=self._clock.new_request(peer)), now + beat)
            self._look_at_wall_clocks(now)
        disagreement = self._clock.disagreement_seconds
        is_uncertain = disagreement > 0.0 or not self._clock.is_settled
        self._engine.set_conditions(replace(self._engine.conditions, is_time_uncertain=is_uncertain))
        if not disagreement:
            self._agreed_at = moment
            if self._has_reported_apart:
                self._report("clock", "the members' clocks and this peer's agree again", None)
                self._has_reported_apart = False
        elif not self._has_reported_apart and moment - self._agreed_at > REPORTED_AFTER_BEATS * beat:
            text = (
                f"the members' clocks and this peer's are {disagreement:.1f} s apart; "
                "this peer only listens until they agree"
            )
            self._report("clock", text, None)
            self._has_reported_apart = True

    def receive(self, peer: PeerId, message: Ping | Pong, now: float) -> None:
        """Answer a peer that asks for this clock, or take the answer of a source."""
        if isinstance(message, Pong):
            self._clock.take_answer(peer, message.nonce, message.clock_seconds, is_settled=message.is_settled)
            return
        self._clock.poll()  # a machine that has just woken up does not know the time
        settled = self._clock.is_settled
        pong = Pong(nonce=message.nonce, clock_seconds=self._clock.own(), is_settled=settled)
        self._post(peer, pong, now + PONG_SECONDS)

    def _look_at_wall_clocks(self, now: float) -> None:
        """Note how far this machine's clock is off, and report clocks that differ from most others."""
        roster, me = self._engine.book.in_force, self._engine.me.peer
        if roster is None or not self._clock.is_settled:
            return
        behind_seconds = self._clock.wall_offset_seconds
        self._engine.set_conditions(replace(self._engine.conditions, clock_behind_seconds=behind_seconds))
        founder, before = self._engine.book.founder, self._watch.correction_seconds
        behind = {peer: beat.clock_behind for peer, beat in self._engine.membership.liveness.alive(now).items()}
        behind[me] = behind_seconds
        for peer, sentence in self._watch.look(behind, roster.peers() | {founder}, yields=me != founder):
            self._report("clock", sentence, None if peer == me else peer)
        if self._watch.correction_seconds != before:
            self._corrected()


class ClockWatch:
    """Names the wall clocks that differ from those of more than half of the others, with the amount.

    A run keeps a time of its own, so a wrong wall clock costs nothing there. But records of addresses carry wall times,
    and the owner of the machine should know. Of two clocks nobody can tell which is right. A state machine without I/O.

    Args:
        me: this peer.
    """

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._reported: dict[PeerId, float] = {}
        self.sentence = ""
        """The clocks that are wrong at present; empty if none is."""
        self.correction_seconds = 0.0
        """Seconds to add to this machine's clock before a comparison with times of others; 0 if it is right."""

    def look(
        self, behind_seconds: Mapping[PeerId, float], members: Collection[PeerId], *, yields: bool = True
    ) -> list[tuple[PeerId, str]]:
        """Return sentences about clocks that were not known to be this far off, each with its peer.

        Args:
            behind_seconds: by how much each peer's clock is behind the run's time; negative: ahead.
            members: the peers to compare with. Others may be named, but any number of strangers proves nothing.
            yields: whether this peer takes the other's clock for right if there is only one to compare with.
        """
        behind = {peer: seconds for peer, seconds in behind_seconds.items() if peer in members or peer == self._me}
        off = {peer: self._off_by(peer, seconds, behind) for peer, seconds in behind_seconds.items()}
        misset = {peer: seconds for peer, seconds in off.items() if abs(seconds) > MISSET_SECONDS}
        sentences = {peer: self._sentence(peer, seconds, behind) for peer, seconds in sorted(misset.items())}
        shown = sorted(sentences, key=lambda peer: (peer != self._me, peer not in behind, peer))[:MOST_SHOWN]
        self.sentence = "; ".join(dict.fromkeys(sentences[peer] for peer in shown))
        news = [peer for peer in misset if abs(misset[peer] - self._reported.get(peer, 0.0)) > MISSET_SECONDS]
        self._reported = misset
        correction = misset.get(self._me, 0.0) if yields or len(behind) > 2 else 0.0
        if abs(correction - self.correction_seconds) > MISSET_SECONDS / 2:
            self.correction_seconds = correction
        return list({sentences[peer]: (peer, sentences[peer]) for peer in news}.values())

    @staticmethod
    def _off_by(peer: PeerId, seconds: float, behind: Mapping[PeerId, float]) -> float:
        """Return the difference from the nearest clock, if the clock differs from most others, and 0 otherwise."""
        differences = [seconds - others for other, others in behind.items() if other != peer]
        num_far = sum(abs(difference) > MISSET_SECONDS for difference in differences)
        return min(differences, key=abs) if 2 * num_far > len(differences) else 0.0

    def _sentence(self, peer: PeerId, off_seconds: float, behind: Mapping[PeerId, float]) -> str:
        span = format_seconds(round(abs(off_seconds), -1))
        others = [other for other in behind if other != peer]
        if len(others) == 1:
            names = " and ".join(map(self._name, sorted((peer, *others), key=lambda one: (one != self._me, one))))
            return f"the clocks of {names} are {span} apart; one of them is wrong"
        how = "behind" if off_seconds > 0 else "ahead of"
        advice = "; set it right" if peer == self._me else ""
        return f"the clock of {self._name(peer)} is {span} {how} those of {counted(len(others), 'other')}{advice}"

    def _name(self, peer: PeerId) -> str:
        return "this machine" if peer == self._me else short_peer_id(peer)
