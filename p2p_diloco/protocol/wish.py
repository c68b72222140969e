"""The roster that a lead would like next: the living members and all ready listeners, in grid order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.ballot import Candidacy, ballot_turn
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.grid import REGRID_ROSTERS, grid_order, keep_places
from p2p_diloco.protocol.member import FULL_SHARE, Member
from p2p_diloco.protocol.roster import MOST_MEMBERS, MOST_QUOTED, Goodbye, Roster, is_quotable, most_included

FEWEST_NEWCOMERS, NEWCOMERS_SHARE = 2, 5
"""One roster lists so many peers that its parent does not, or this share of the parent's members, whichever is more.
Who only sends heartbeats is dropped after its first full cycle; until then so few void nobody's rounds, of six members
or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a lead sees when it proposes.

    Attributes:
        lead: the lead itself, which never finds that it sat out.
        present: all that train, are alive and ready, the lead among them if it is.
        took_part: round of the last entry for which each member was there.
        newcomers: members of the roster in force that its parent lacks: it is too early to say that they sat out.
        round: the round in progress; the roster in force has been so since `in_force_since`.
        included_total: contributions included in entries since founding, as seen here.
        lost: incarnations that have lost *reduces* because their spans got no entries.
        is_helper_here: whether the bootstrap is there to reduce when no member may.
        heard_since: since when each peer has been heard without a silence; now, where somebody else hears it.
    """

    lead: PeerId
    present: Mapping[PeerId, Member]
    took_part: Mapping[PeerId, int]
    newcomers: Collection[PeerId]
    goodbyes: Iterable[Goodbye]
    clock: RoundClock
    round: int
    in_force_since: int
    included_total: int
    heard_since: Mapping[PeerId, float]
    now: float
    lost: Collection[tuple[PeerId, int]] = ()
    is_helper_here: bool = True


def wish_roster(candidacy: Candidacy, view: View) -> Roster | None:
    """Return the next roster for the ballot of `candidacy`, or None while nobody could be on it."""
    parent = candidacy.parent
    members = _wished_members(parent, view)
    if not members:
        return None
    regrid = (parent.k + 1) // REGRID_ROSTERS
    cycle = max(parent.cycle, view.clock.cycle(ballot_turn(candidacy.ballot)[0]))
    included_total = max(view.included_total, parent.included_total)
    if candidacy.rules is not None:
        included_total = min(included_total, most_included(parent, cycle, candidacy.rules))
    words = sorted(view.goodbyes, key=lambda word: (word.peer, word.incarnation))
    return Roster(
        run=parent.run,
        genesis=parent.genesis,
        parent=parent.digest(),
        k=parent.k + 1,
        epoch=parent.epoch + (candidacy.level > 0),
        level=candidacy.level,
        cycle=cycle,
        regrid=regrid,
        members=_in_order(members, parent, regrid),
        helper=parent.helper,
        goodbyes=tuple(word for word in words if _is_quoted(word, candidacy))[:MOST_QUOTED],
        included_total=included_total,
    )


def _is_quoted(word: Goodbye, candidacy: Candidacy) -> bool:
    parent = candidacy.parent
    member = parent.member(word.peer)
    if candidacy.level or member is None or member.incarnation != word.incarnation:
        return False
    return is_quotable(word, parent, parent.digest(), candidacy.ballot)


def _wished_members(parent: Roster, view: View) -> tuple[Member, ...]:
    present = view.present
    staying = [present[m.peer] for m in parent.members if m.peer in present and not _sat_out(m, view)]
    coming = sorted(set(present) - parent.peers(), key=lambda peer: (view.heard_since.get(peer, view.now), peer))
    most = max(FEWEST_NEWCOMERS, len(parent.members) // NEWCOMERS_SHARE) if parent.k else MOST_MEMBERS
    room = max(min(MOST_MEMBERS - len(staying), most), 0)
    return _reducing((*staying, *(present[peer] for peer in coming[:room])), view)


def _reducing(members: tuple[Member, ...], view: View) -> tuple[Member, ...]:
    """Return the members with *reduces* taken from those who have lost it.

    Somebody must reduce: where no member may and no bootstrap is there, all do by their own word.
    """
    keeping = [m for m in members if m.can_be_dialled and (m.peer, m.incarnation) not in view.lost]
    if not keeping and not view.is_helper_here and len(members) > 1:  # who is alone reduces anyway
        return tuple(replace(member, can_be_dialled=True) for member in members)
    kept = {member.peer for member in keeping}
    return tuple(m if m.peer in kept else replace(m, can_be_dialled=False, share=FULL_SHARE) for m in members)


def _in_order(members: tuple[Member, ...], parent: Roster, regrid: int) -> tuple[Member, ...]:
    if regrid != parent.regrid:
        return grid_order(members, parent.run, regrid)
    return keep_places(parent.members, members, parent.run, regrid)


def _sat_out(member: Member, view: View) -> bool:
    """Tell whether a member was there for no entry of a whole cycle in which there were entries under this roster.

    Being there is enough: an entry may include a single one, and a roster must not shrink to that one for it.
    """
    num_fragments = view.clock.num_fragments
    if view.round - view.in_force_since < num_fragments or member.peer == view.lead or member.peer in view.newcomers:
        return False
    before = view.round - num_fragments
    return any(last > before for last in view.took_part.values()) and view.took_part.get(member.peer, -1) < before
