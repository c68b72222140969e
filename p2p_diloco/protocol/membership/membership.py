"""Membership: one peer's view of the swarm, and its part in agreeing on the members of a run.

Each question has a module of its own: who this peer is (`local.py`), what peers declare (`declarations.py`), who is
alive and in contact (`liveness.py`), whom entries name (`presence.py`), whether the run has stalled (`stall.py`), what
this peer has voted for (`votes.py`), which rosters it takes (`rosters.py`), and how the next one is certified
(`balloting.py`).
"""

from __future__ import annotations

from collections.abc import Collection

from p2p_diloco.ids import Digest, PeerId, short_peer_id
from p2p_diloco.protocol.actions import Action, Report, Send, sends
from p2p_diloco.protocol.membership.balloting import Balloting
from p2p_diloco.protocol.membership.declarations import Declarations
from p2p_diloco.protocol.membership.liveness import Liveness
from p2p_diloco.protocol.membership.local import LocalPeer, LocalState
from p2p_diloco.protocol.membership.presence import Presence
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.membership.rosters import Observations, Rosters
from p2p_diloco.protocol.membership.stall import Stall
from p2p_diloco.protocol.membership.votes import Votes
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import Ballots, Prepare, Promised, Proposal, Vote
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.messages import RosterRequest
from p2p_diloco.protocol.wire.roster import Verify

LEAVE_SECONDS = 8.0
"""Maximum time that a leaving peer stays until a roster without it governs."""


class Membership:
    """The parts of membership, joined. A state machine without I/O.

    Call `tick` at each tick of the engine, `receive` for each message of a ballot and each declaration, and the parts
    for all else.

    Args:
        remembers: whether this peer still knows the votes of its earlier incarnations; see `Votes`.
        linked: peers to which messages can be sent now; shared with the engine, which updates it.
    """

    def __init__(
        self,
        *,
        me: LocalPeer,
        rules: RunRules,
        book: RosterBook,
        ballots: Ballots,
        verify: Verify,
        remembers: bool,
        linked: Collection[PeerId] = frozenset(),
    ) -> None:
        self.rules = rules
        self.book = book
        self.local = local = LocalState(me, rules, book, verify)
        self.declarations = declarations = Declarations(local)
        self.liveness = liveness = Liveness(local, declarations, linked)
        self.presence = presence = Presence(local, declarations, liveness)
        self.stall = stall = Stall(local, declarations, liveness)
        self.votes = votes = Votes(local, ballots, remembers=remembers)
        seen = Observations(
            local=local, declarations=declarations, liveness=liveness, presence=presence, stall=stall, votes=votes
        )
        self.rosters = Rosters(seen)
        self.balloting = Balloting(seen, self.rosters)

    # -- what happens

    def entry_absorbed(self, round_index: int) -> None:
        """Note that the line in force got an entry."""
        self.stall.entry_absorbed()
        self.rosters.entry_absorbed(round_index)

    def receive(
        self, sender: PeerId, message: Declaration | Prepare | Promised | Proposal | Vote, now: float
    ) -> list[Action]:
        """Receive a declaration, or a message of a ballot."""
        match message:
            case Declaration():
                return self._take_declaration(sender, message, now)
            case Prepare():
                return self.balloting.take_prepare(sender, message, now)
            case Promised():
                return self.balloting.take_promise(sender, message, now)
            case Proposal():
                return self.balloting.take_proposal(sender, message, now)
            case Vote():
                return self.balloting.take_vote(sender, message, now)

    def _take_declaration(self, sender: PeerId, declaration: Declaration, now: float) -> list[Action]:
        """Note a peer's declaration, and forward it to the voters if the peer sent it itself.

        Declarations of third peers are accepted only from members and the founder. Otherwise a stranger could invent
        any number of applicants, and a genuine one would hardly ever be among the few that are listed in a cycle.
        """
        roster, declarations, peer, clock = self.book.in_force, self.declarations, declaration.peer, self.rules.clock
        if roster is None or not (sender in (peer, self.book.founder) or self.book.lists(sender)):
            return []
        if not declarations.take(declaration, clock.cycle_at(now)):
            return []
        actions: list[Action] = []
        if (
            sender == peer
            and declarations.is_news(declaration, roster, now)
            and declarations.may_forward(declaration, now)
        ):
            actions += sends(roster.voters - {self.local.peer, peer}, declaration, clock.soon(now))
        if declaration.leaving and roster.member(peer) is not None:
            actions.append(Report(topic="good-bye", text=f"{short_peer_id(peer)} leaves"))
            actions += self.balloting.prepare_if_leader(roster, now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Do what is due: forget what is outdated, and promise or lead in the ballot whose turn it is."""
        if self.liveness.tick(now):
            self.rosters.end_doubt()
        cycle = self.rules.clock.cycle_at(now)
        if self.book.in_force is not None and cycle >= 0:
            self.declarations.forget_old(cycle)
        return self.balloting.tick(now)

    def set_back(self, now: float) -> None:
        """Remove all times that are in the future, because the clock was far ahead."""
        self.liveness.set_back(now)
        self.declarations.set_back()
        self.stall.set_back(now)
        self.rosters.end_doubt()

    # -- rosters to request

    def request_rosters(self, to: PeerId, now: float) -> Send:
        """Return a request to a peer, whose roster is not known here, for the rosters that this peer lacks."""
        return Send(to=to, message=RosterRequest(known=self.book.landmarks()), deadline=self.rules.clock.soon(now))

    def request_certificate(self, to: PeerId, digest: Digest, now: float) -> Send:
        """Return a request for a peer's certificate of a roster that is known here: it may hold an earlier one."""
        parent = self.book.roster(digest).parent
        return Send(to=to, message=RosterRequest(known=(parent,)), deadline=self.rules.clock.soon(now))

    # -- leaving

    def leave(self, now: float) -> Declaration:
        """Leave: from now on this peer names no parents, and stays only to vote for a roster without it."""
        self.local.leave(now + LEAVE_SECONDS)
        return self.declarations.declare(now)

    def may_go(self, now: float) -> bool:
        """Return whether the others no longer need this leaving peer: its vote, and the spans that it averages."""
        governing = self.book.governing(self.rules.clock.round_at(now))
        rosters = (self.book.in_force, governing[0] if governing is not None else None)
        is_listed = any(roster is not None and roster.member(self.local.peer) is not None for roster in rosters)
        return not is_listed or self.local.has_stayed(now)
