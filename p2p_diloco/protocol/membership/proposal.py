"""The next roster, derived from the voters' promises: all peers derive the same one from the same promises.

Members are dropped, count or have lost *reduces* if more than half of the voters report it. A reducer can be reached by
all, so one voter that reports it absent is enough if no other voter receives its heartbeats. A peer that wants to join,
leaves or has changed signs that itself, so one voter that holds the declaration is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.membership.reach_proofs import ReachJudge
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.ballot import Promise
from p2p_diloco.protocol.wire.entry import places_in
from p2p_diloco.protocol.wire.member import FULL_SHARE, NO_PLACE, Declaration, Member
from p2p_diloco.protocol.wire.roster import FEWEST_COUNTING, MOST_MEMBERS, Roster, by_seniority, grid_order, keep_places

FEWEST_NEWCOMERS, NEWCOMERS_SHARE = 2, 5
"""Maximum number of newcomers on one roster: two, or a fifth of the members of its parent if that is more."""
REFRESH_CYCLES = 64
"""Interval, in cycles, at which the grid is drawn again and a roster certified, even if nothing changes."""
REDUCES_AFTER_CYCLES = 8
"""Cycles for which a member must have been listed before it starts to reduce, while two others reduce: a machine with
twenty identities must not own the spans at once."""
ENOUGH_REDUCERS = 2
FRESH_CYCLES = 2
"""Number of cycles for which an application is valid."""
SHARE_STEP = 2
"""Minimum change of a share that is worth a new roster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tally:
    """The promises, combined by peer."""

    absent: frozenset[PeerId]
    alive: frozenset[PeerId]
    counting: frozenset[PeerId]
    idle: frozenset[PeerId]
    doubted: frozenset[PeerId]
    height: int
    declared: dict[PeerId, Declaration]


def next_roster(
    parent: Roster,
    promises: tuple[Promise, ...],
    rules: RunRules,
    founder: PeerId,
    *,
    before: Roster | None,
    degraded: bool,
) -> Roster | None:
    """Return the child of `parent` that follows from promises for one ballot; None if nothing changes.

    The first entries since `before` are a change too. A line of rosters that shows no entries loses against another
    line (`histories.py`), although the members that make its entries would never leave it.

    Args:
        founder: the only peer that may be on a roster without training.
        before: the parent of `parent`; None if that is the founding roster.
    """
    if not promises:
        return None
    cycle = max(parent.cycle, rules.clock.cycle(rules.clock.ballot_round(promises[0].ballot)))
    tally = _tally(parent, promises, cycle)
    may_join = _admission(parent, rules, founder, cycle)
    judge = ReachJudge(parent=parent, rules=rules, founder=founder, cycle=cycle)
    staying = _staying(parent, promises, tally, judge, cycle - FRESH_CYCLES, degraded=degraded)
    arriving = [] if degraded else _arriving(parent, tally.declared.values(), may_join, judge, cycle)
    members = [*staying, *arriving]
    lost = _lost(members, tally, parent)
    if not (able := _able(members, lost, parent)):
        # Nobody else can be reached by all. Without reducers all members would average, and few would be linked.
        lost = set()
        able = _able(members, lost, parent)
    members = _without_superfluous_bootstrap(members, able)
    if not members or not (degraded or any(member.trains for member in members)):
        return None  # a bootstrap peer that is cut off from all trainers drops no members
    members = _reducing(members, able, lost, parent, cycle)
    ordered = _in_order(members, parent, cycle)
    is_due = cycle // REFRESH_CYCLES != parent.cycle // REFRESH_CYCLES
    has_first_entries = before is not None and before.height == parent.height < tally.height
    if not (degraded or ordered != parent.members or is_due or has_first_entries):
        return None
    possible = parent.height + (cycle - parent.cycle + 2) * rules.num_all_spans
    return Roster(
        run=parent.run,
        genesis=parent.genesis,
        parent=parent.digest(),
        k=parent.k + 1,
        cycle=cycle,
        degraded=degraded,
        members=ordered,
        height=min(max(tally.height, parent.height), possible),
    )


def is_outdated(one: Declaration, parent: Roster, cycle: int) -> bool:
    """Return whether a declaration no longer counts: applications expire, and a listing ends earlier declarations.

    Without the second rule, a member whose clock was ahead before it lost its disk could be removed for ever with
    what it signed then, because that start has the greater incarnation.
    """
    member = parent.member(one.peer)
    return one.cycle < (member.since if member is not None else cycle - FRESH_CYCLES)


def is_bootstrap_needed(others: Iterable[Member]) -> bool:
    """Return whether the bootstrap peer belongs on a roster with these others: too few count, or reduce for everybody.

    Reducers without a public place may all be on one LAN. Then whoever comes from outside reaches the bootstrap peer
    only, and needs it to hold the state and to average.
    """
    members = tuple(others)
    num_counting = sum(member.counts for member in members)
    num_public = sum(member.reduces and member.place != NO_PLACE for member in members)
    return num_counting < FEWEST_COUNTING or num_public < ENOUGH_REDUCERS


def _tally(parent: Roster, promises: tuple[Promise, ...], cycle: int) -> _Tally:
    peers = [member.peer for member in parent.members]

    def named(bitmap: Callable[[Promise], bytes], more_than: int) -> frozenset[PeerId]:
        votes = Counter(place for promise in promises for place in places_in(bitmap(promise)) if place < len(peers))
        return frozenset(peers[place] for place, num in votes.items() if num > more_than)

    declared: dict[PeerId, Declaration] = {}
    for promise in promises:
        for one in promise.view.declarations:
            if is_outdated(one, parent, cycle):
                continue
            known = declared.get(one.peer)
            if known is None or (one.age(), one.signature) > (known.age(), known.signature):
                declared[one.peer] = one
    heights = sorted(promise.view.height for promise in promises)
    alive = named(lambda promise: promise.view.heard, 0)
    silent = frozenset(member.peer for member in parent.members if member.reduces) - alive
    return _Tally(
        absent=named(lambda promise: promise.view.absent, len(parent.voters) // 2)
        | (named(lambda promise: promise.view.absent, 0) & silent),
        alive=alive,
        counting=named(lambda promise: promise.view.counting, len(promises) // 2),
        idle=named(lambda promise: promise.view.idle, len(promises) // 2),
        doubted=named(lambda promise: promise.view.idle, len(promises) // 3),
        height=heights[(len(heights) - 1) // 2],
        declared=declared,
    )


def _admission(parent: Roster, rules: RunRules, founder: PeerId, cycle: int) -> Callable[[Declaration], bool]:
    """Return a function that decides whether the peer of a declaration may become a member."""

    def may_join(one: Declaration) -> bool:
        is_new = parent.member(one.peer) is None and one.cycle <= cycle + 1
        may_be = rules.may_be_member(one.peer) or one.peer == founder
        return is_new and not one.leaving and may_be and one.incarnation > 0

    return lambda one: may_join(one) and (one.trains or one.peer == founder)


def _staying(
    parent: Roster,
    promises: tuple[Promise, ...],
    tally: _Tally,
    judge: ReachJudge,
    fresh: int,
    *,
    degraded: bool,
) -> list[Member]:
    """Return the members that stay on the next roster, updated by their declarations since cycle `fresh`.

    On a degraded roster, these are exactly the voters that promised and the members whose heartbeats they receive.
    """
    present = tally.alive | {promise.voter for promise in promises}
    members = []
    for member in parent.members:
        one = tally.declared.get(member.peer)
        is_gone = member.peer not in present if degraded else member.peer in tally.absent
        if one is not None and (one.incarnation < member.incarnation or not (one.leaving or one.cycle >= fresh)):
            one = None
        if is_gone or (one is not None and one.leaving):
            continue
        if one is not None and abs(one.share - member.share) < SHARE_STEP:
            one = replace(one, share=member.share)
        counts = member.counts or (not degraded and member.trains and member.peer in tally.counting)
        members.append(
            replace(
                member,
                incarnation=one.incarnation if one is not None else member.incarnation,
                share=max(one.share, 1) if one is not None else member.share,
                reduces=judge.is_reachable(one) if one is not None else member.reduces,
                counts=counts,
                place=member.place if one is None or member.place != NO_PLACE else judge.place(one),
            )
        )
    return members


def _arriving(
    parent: Roster,
    declared: Iterable[Declaration],
    may_join: Callable[[Declaration], bool],
    judge: ReachJudge,
    cycle: int,
) -> list[Member]:
    """Return the new members, chosen from reachable applicants first, in an order that no peer can choose."""

    def rank(one: Declaration) -> tuple[bool, bytes]:
        return (not judge.is_reachable(one), sha256(parent.digest(), one.peer))

    applicants = sorted(filter(may_join, declared), key=rank)
    most = max(FEWEST_NEWCOMERS, len(parent.members) // NEWCOMERS_SHARE) if parent.k else MOST_MEMBERS
    room = max(min(most, MOST_MEMBERS - len(parent.members) - 1), 0)
    chosen = [one for one in applicants if one.trains][:room] + [one for one in applicants if not one.trains]
    return [
        Member(
            peer=one.peer,
            incarnation=one.incarnation,
            since=cycle,
            counts=False,
            reduces=judge.is_reachable(one),
            trains=one.trains,
            share=max(one.share, 1),
            place=judge.place(one),
        )
        for one in chosen
    ]


def _able(members: list[Member], lost: Collection[PeerId], parent: Roster) -> list[Member]:
    """Return the members that can reduce: present reducers first, then others, the longest-listed first.

    The bootstrap peer needs no proof: all have reached it. At most one member of a public place reduces, so that a
    machine with twenty identities does so once. A member that has lost *reduces* keeps its place, so that no other
    identity of the same machine replaces it, but it displaces no present reducer.
    """
    had = {member.peer for member in parent.members if member.reduces}
    able = [m for m in by_seniority(members, parent.run) if (m.reduces or not m.trains) and m.peer not in lost]
    before = _one_of_each_place((member for member in able if member.peer in had), ())
    others = [*before, *(member for member in members if member.peer in lost)]
    return before + _one_of_each_place((member for member in able if member.peer not in had), others)


def _lost(members: Iterable[Member], tally: _Tally, parent: Roster) -> set[PeerId]:
    """Return the members whose spans got no entries.

    Voters do not forget an idle owner all at once: a member that has lost *reduces* needs more of them to get it back.
    """
    had = {member.peer for member in parent.members if member.reduces}
    return {m.peer for m in members if m.peer in (tally.idle if m.peer in had else tally.doubted)}


def _one_of_each_place(members: Iterable[Member], others: Iterable[Member]) -> list[Member]:
    """Return the first member of each public place without any of `others`, and all members without a public place."""
    taken = {member.place for member in others}
    chosen: list[Member] = []
    for member in members:
        if member.place == NO_PLACE or member.place not in taken:
            chosen.append(member)
            taken.add(member.place)
    return chosen


def _without_superfluous_bootstrap(members: list[Member], able: Iterable[Member]) -> list[Member]:
    can_reduce = {member.peer for member in able}
    others = [member for member in members if member.trains]
    is_needed = is_bootstrap_needed(replace(member, reduces=member.peer in can_reduce) for member in others)
    return members if is_needed else others


def _reducing(
    members: list[Member], able: Iterable[Member], lost: Collection[PeerId], parent: Roster, cycle: int
) -> list[Member]:
    """Return the members, with *reduces* set for those that may reduce.

    Present reducers continue; others start once they have been listed for long enough, or while there are few reducers.
    """
    here = {member.peer for member in members}
    had = {member.peer for member in parent.members if member.reduces}
    chosen: set[PeerId] = set()
    for member in able:
        may_now = len(chosen) < ENOUGH_REDUCERS or cycle - member.since >= REDUCES_AFTER_CYCLES
        if member.peer in here and (may_now or member.peer in had or not member.trains):
            chosen.add(member.peer)
    return [
        replace(
            member,
            reduces=member.peer in chosen,
            share=member.share if member.peer in chosen else FULL_SHARE,
            place=member.place if member.peer in chosen or member.peer in lost else NO_PLACE,
        )
        for member in members
    ]


def _in_order(members: Collection[Member], parent: Roster, cycle: int) -> tuple[Member, ...]:
    drawing = cycle // REFRESH_CYCLES
    if drawing != parent.cycle // REFRESH_CYCLES or parent.k == 0:
        return grid_order(members, parent.run, drawing)
    return keep_places(parent.members, members, parent.run, drawing)
