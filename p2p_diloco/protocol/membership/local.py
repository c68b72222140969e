"""This peer: its identity, whether it is ready or leaves, and the conditions under which it takes part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Report
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.member import FULL_SHARE, Member, ReachProof
from p2p_diloco.protocol.wire.roster import Roster, Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPeer:
    """This peer, as the rules see it.

    Attributes:
        can_be_dialled: what is known at its start.
        sign: signs with its key.
        name: what its owner calls it; empty if nothing.
        archives: whether it follows the logs although it does not train, to keep what the run has learnt.
    """

    peer: PeerId
    incarnation: int
    can_be_dialled: bool
    trains: bool
    sign: Callable[[bytes], bytes]
    archives: bool = False
    name: bytes = b""

    def member(self, share: int = FULL_SHARE) -> Member:
        """Return this incarnation as the member that founds a run."""
        return Member(peer=self.peer, incarnation=self.incarnation, trains=self.trains, share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Training figures of an island; heartbeats publish the first four.

    Attributes:
        undone: steps that were undone, or not made, because something was not finite.
        undone_why: the last of them, for people.
        length_learnt, length_sent, length_given_up: sums of norms over the contributions of the last cycles.
    """

    tokens: int = 0
    steps: int = 0
    tokens_per_second: float = 0.0
    loss: float = 0.0
    undone: int = 0
    undone_why: str = ""
    length_learnt: float = 0.0
    length_sent: float = 0.0
    length_given_up: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions that the shell knows and the rules do not.

    Attributes:
        share: the share of averaging that its line can carry.
        upload_bytes_per_second: the upload cap of contributions; None: no cap.
        upload_backlog_bytes: bytes of earlier messages that are still queued.
        can_be_dialled: whether others have proved it reachable.
        proofs: what they signed about that, newest first.
        is_paused: whether its owner has paused it. It follows the run and votes, but trains, averages and serves
            nothing; heartbeats and declarations tell the others.
        progress: the figures of its training.
        clock_behind_seconds: by how much this machine's wall clock is behind swarm time.
        is_time_uncertain: whether swarm time is uncertain. This peer then begins no first round, and does not
            contribute or vote.
        last_round: the last round to contribute to; None: no limit.
    """

    share: int = FULL_SHARE
    upload_bytes_per_second: float | None = None
    upload_backlog_bytes: float = 0.0
    can_be_dialled: bool = False
    proofs: tuple[ReachProof, ...] = ()
    is_paused: bool = False
    progress: Progress = Progress()
    clock_behind_seconds: float = 0.0
    is_time_uncertain: bool = False
    last_round: int | None = None


class LocalState:
    """State of this peer, and what all parts of membership share: the rules of the run and the book of rosters."""

    def __init__(self, me: LocalPeer, rules: RunRules, book: RosterBook, verify: Verify) -> None:
        self.rules = rules
        self.book = book
        self.verify = verify
        self.me = me
        """This peer; a roster that lists a later start of it changes the incarnation, see `renumber`."""
        self.conditions = Conditions(can_be_dialled=me.can_be_dialled)
        self.ready = False
        """Whether it holds the agreed state and may be a member."""
        self.leaving = False
        self._leaves_at: float | None = None
        self._is_renumbered = False

    @property
    def peer(self) -> PeerId:
        """Return the name of this peer."""
        return self.me.peer

    def set_conditions(self, conditions: Conditions) -> None:
        """Take the present conditions."""
        self.conditions = conditions

    def set_ready(self, is_ready: bool) -> None:
        """Note whether this peer holds the agreed state."""
        self.ready = is_ready

    def leave(self, leaves_at: float | None) -> None:
        """Leave: from now on this peer names no parents, and stays only to vote for a roster without it."""
        self.ready, self.leaving, self._leaves_at = False, True, leaves_at

    def has_stayed(self, now: float) -> bool:
        """Return whether a leaving peer has stayed for long enough."""
        return self._leaves_at is None or now >= self._leaves_at

    def renumber(self, roster: Roster) -> list[Action]:
        """Take the next number if a roster lists a later start of this peer, so that the others accept what it sends.

        Starts on a new or restored disk are numbered by the clock, which may have been ahead at the listed one. Only
        once, because the later start may also be a process with a copy of the disk, which does the same.
        """
        member = roster.member(self.peer)
        if self._is_renumbered or member is None or member.incarnation <= self.me.incarnation:
            return []
        text = (
            f"roster {roster.k} lists start {member.incarnation} of this peer, but this is start "
            f"{self.me.incarnation}: either its clock was ahead then (nothing to do), or another process uses a copy "
            "of its state directory (stop one of them, and give it its own state directory)"
        )
        self._is_renumbered = True
        self.me = replace(self.me, incarnation=member.incarnation + 1)
        return [Report(topic="identity", text=text)]
