"""A council of members that exchange messages at once, and what they send each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from fake_run import CYCLE_SECONDS, ROUND_SECONDS, ballot_number, peer_id, run_rules, sign_as
from made import NO_SIGNATURE, certify, child_of, declaration, founding, heartbeat, ids, membership_of, roster_1

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import Action, Report, Send
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.membership.proposal import next_roster
from p2p_diloco.protocol.wire.ballot import Prepare, Promise, Promised, Proposal, View, Vote
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.messages import RosterReply
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, lead_order

A, B, C, D, E = ids(5)
BOOT, NEW = peer_id("boot"), peer_id("new")
ROSTER = roster_1(3).roster
VOTING = 3
"""The last round of cycle 1, the first cycle in which roster 1 can be followed."""
BEGIN = VOTING * ROUND_SECONDS
NOW = BEGIN + 0.1
TURN_SECONDS = run_rules().clock.turn_seconds
BALLOT = ballot_number(VOTING, 0)


def leader(round_index: int = VOTING, turn: int = 0, roster: Roster = ROSTER, *, degraded: bool = False) -> PeerId:
    return lead_order(roster, round_index, BOOT, degraded=degraded)[turn]


LEAD = leader()
OTHER, THIRD = sorted(set(ids(3)) - {LEAD})


def member_of_three(peer: PeerId = OTHER, **changes: object) -> Membership:
    here = membership_of(peer, founding(), roster_1(3), **changes)  # type: ignore[arg-type]
    here.local.set_ready(True)
    return here


def sent(actions: Iterable[Action], kind: type) -> list[Send]:
    return [action for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def topics(actions: Iterable[Action]) -> list[str]:
    return [action.topic for action in actions if isinstance(action, Report)]


class Council:
    """Members that exchange messages at once: each message arrives unless it is lost."""

    def __init__(self, certified: CertifiedRoster, *others: PeerId) -> None:
        roster = certified.roster
        self.here = {
            peer: membership_of(peer, founding(), certified, trains=peer != BOOT)
            for peer in (*sorted(roster.peers()), *others)
        }
        self.is_lost: Callable[[PeerId, PeerId, object], bool] = lambda sender, to, message: False
        self.sequence = 0
        self.actions: list[tuple[PeerId, Action]] = []
        for one in self.here.values():
            one.local.set_ready(True)

    def tick(self, now: float) -> list[Action]:
        """Let all members hear each other and act; return all their actions, including those that follow."""
        self.sequence += 1
        before = len(self.actions)
        for peer, one in self.here.items():
            for other in self.here.keys() - {peer}:
                one.liveness.take(heartbeat(other, sequence=self.sequence, trains=other != BOOT), now)
        for peer, one in self.here.items():
            self.do(peer, one.tick(now), now)
        return [action for _, action in self.actions[before:]]

    def do(self, peer: PeerId, actions: Iterable[Action], now: float) -> None:
        """Deliver what a member sends, and what follows from that."""
        for action in actions:
            self.actions.append((peer, action))
            if (
                isinstance(action, Send)
                and action.to in self.here
                and not self.is_lost(peer, action.to, action.message)
            ):
                self.do(action.to, self._taken(self.here[action.to], peer, action.message, now), now)

    def _taken(self, one: Membership, sender: PeerId, message: object, now: float) -> list[Action]:
        match message:
            case Promised():
                return one.balloting.take_promise(sender, message, now)
            case Proposal():
                return one.balloting.take_proposal(sender, message, now)
            case Vote():
                return one.balloting.take_vote(sender, message, now)
            case Prepare():
                return one.balloting.take_prepare(sender, message, now)
            case RosterReply():
                return one.rosters.take(message.rosters, now)
            case Declaration():
                return one.receive(sender, message, now)
        raise AssertionError(f"members do not send each other {message!r}")

    def declare(self, peer: PeerId, to: PeerId, now: float, **changes: object) -> None:
        """Deliver a peer's declaration to a member."""
        self.do(peer, self.here[to].receive(peer, declaration(peer, **changes), now), now)

    def in_force(self) -> Roster:
        """Return the roster in force at all members."""
        (roster,) = {one.book.in_force for one in self.here.values()}
        assert roster is not None
        return roster


def applicant(cycle: int = 1, **changes: object) -> Declaration:
    return declaration(NEW, cycle=cycle, **changes)


def promise_of(peer: PeerId, *declared: Declaration, parent: Roster = ROSTER, **changes: object) -> Promise:
    bitmap = bytes((len(parent.members) + 7) // 8)
    seen = View(absent=bitmap, heard=bitmap, counting=bitmap, idle=bitmap, height=0, declarations=declared)
    word = Promise(
        parent=parent.digest(),
        degraded=False,
        ballot=BALLOT,
        voted=None,
        view=seen,
        voter=peer,
        signature=NO_SIGNATURE,
    )
    word = replace(word, **changes)  # type: ignore[arg-type]
    return replace(word, signature=sign_as(peer, word.statement()))


def promised(peer: PeerId, *declared: Declaration, voted: Proposal | None = None, **changes: object) -> Promised:
    named = (voted.ballot, voted.roster.digest()) if voted is not None else None
    word = promise_of(peer, *declared, voted=named, **changes)  # type: ignore[arg-type]
    return Promised(promise=word, voted=voted)


def proposal(*promises: Promise, **changes: object) -> Proposal:
    """The proposal that follows from all promises, one of which shows an application; the promises may be changed."""
    promises = promises or (promise_of(LEAD, applicant()), promise_of(OTHER))
    roster = next_roster(ROSTER, promises, run_rules(), BOOT, before=None, degraded=False)
    assert roster is not None
    return replace(
        Proposal(ballot=promises[0].ballot, roster=roster, promises=promises, origin=()),
        **changes,  # type: ignore[arg-type]
    )


AFTER = VOTING + 1
AFTER_BEGIN = AFTER * ROUND_SECONDS
AFTER_LEAD = leader(AFTER)
NOT_AFTER_LEAD = next(peer for peer in ids(3) if peer != AFTER_LEAD)
LISTENED_CYCLES = 6
SEEN = LISTENED_CYCLES * CYCLE_SECONDS + 0.1
LAST_ROUNDS = range(2 * LISTENED_CYCLES - 8, 2 * LISTENED_CYCLES)
"""The rounds of the last four cycles, after which a member that was in none of their entries counts as gone."""


def listen(here: Membership, num_entries: int, present: Iterable[PeerId]) -> None:
    """Let a member listen for six cycles, and have `num_entries` in each of the last four."""
    for now in range(0, int(SEEN), 4):
        here.tick(float(now))
    for first in LAST_ROUNDS[::2]:
        for number in range(num_entries):
            here.presence.note_entry(present, (), first + number % 2)


def seeing(*rosters: CertifiedRoster, num_entries: int = 0, linked: Iterable[PeerId] = ()) -> Membership:
    """A member that has listened, and was the only one present in the entries."""
    here = membership_of(A, founding(), *(rosters or (roster_1(3),)), linked=linked)
    here.local.set_ready(True)
    listen(here, num_entries, {A})
    return here


STALL = 3 * CYCLE_SECONDS


def without(peer: PeerId) -> CertifiedRoster:
    return certify(child_of(ROSTER, [m for m in ROSTER.members if m.peer != peer], cycle=1), ids(3), BALLOT)


STRANGER = peer_id("stranger")
