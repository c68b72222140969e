"""The peers whose answers about the state count here, and how many of them must agree.

A peer takes a tip (the log position of a span) or the bytes of a span from others only if a majority named them. The
claim of one peer is a reason to ask, never enough. A peer's *voices* are the peers whose answers count:

- In one row: the other voters of the roster in force. If all of them report that they hold nothing: all other members.
- In a grid: the members of its row and column. A newcomer may be unable to reach the row that it would be assigned to.
  So once it has listened for a while, its voices are the voters if it reaches at least two of them, else all members.
- If a peer cannot be dialled, only members that it can dial count.

Three more rules cover special cases:

- Before roster 1, the founder is the only member, so its answer is enough. Later, it is enough only for the initial
  state: spans at height 0.
- A member that has lost its state does not wait for others that have none either: of those that it reaches,
  only holders count.
- A peer that is not on the roster in force must begin somewhere, and may be unable to reach most members. Once it has
  listened for a while, more than half of those that it reaches are enough. A member always needs more than half of all.

A ready member counts itself too: of two members, neither can replace the other's state; of four, no two can replace
that of the others. One without a vote does not count itself beside the electorate once it cannot join its log to the
others'.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from p2p_diloco.ids import Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.log import GENESIS_ROUND, SpanHead
from p2p_diloco.protocol.wire.grid import Grid
from p2p_diloco.protocol.wire.messages import ContentReply
from p2p_diloco.protocol.wire.roster import Roster

ENOUGH_VOTERS = 2
"""Number of voters that must be reached for voters alone to count. One answer is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voices:
    """The peers that may name tips and bytes to this one.

    Attributes:
        near: all voices, linked or not.
        heard: voices that are linked and alive, and report that they hold the state.
        empty: voices that are linked and alive, and report that they hold nothing.
        needed: number of voices that must agree; may be more than there are.
        founder: the only member of roster 0. Its answer is enough for spans that have absorbed no entry.
        founder_holds: whether the founder is linked and alive, and reports that it holds the state; a voice or not.
        told: voices that are not linked, and have signed that they hold the state.
        far: voices that are not linked; they are asked through other peers.
        carriers: linked peers that may have links to `far`.
        half: half of the number of peers that count, including this one if it counts.
        is_strict: whether only more than half of the electorate is accepted.
        is_few: whether less is accepted, because most of the electorate cannot be asked or lacks the state itself.
    """

    near: frozenset[PeerId] = frozenset()
    heard: frozenset[PeerId] = frozenset()
    empty: frozenset[PeerId] = frozenset()
    needed: int = 1
    founder: PeerId | None = None
    founder_holds: bool = False
    told: frozenset[PeerId] = frozenset()
    far: frozenset[PeerId] = frozenset()
    carriers: tuple[PeerId, ...] = ()
    half: float = math.inf
    is_strict: bool = False
    is_few: bool = False

    @property
    def askable(self) -> list[PeerId]:
        """Return the peers that can be asked directly what they hold."""
        return sorted(self.heard | {self.founder} if self.founder is not None and self.founder_holds else self.heard)

    def are_enough(self, voters: Collection[PeerId]) -> bool:
        """Return whether `voters` are a majority."""
        return len((self.heard | self.told).intersection(voters)) >= self.needed

    def are_most(self, voters: Collection[PeerId]) -> bool:
        """Return whether `voters` are more than half of the voices, for a span of which this peer has no sound copy."""
        return 2 * len(self.near.intersection(voters)) > len(self.near)

    def may_name(self, head: SpanHead, voters: Collection[PeerId]) -> bool:
        """Return whether a span may be taken at `head`, where `voters` hold it."""
        return self.are_enough(voters) or (is_start(head) and self.founder in voters)

    def sentence(self) -> str:
        """Return a sentence that names the voices in contact, and how many are needed."""
        names = ", ".join(map(short_peer_id, sorted(self.heard | self.told))) or "none"
        return (
            f"in contact with {names} of the {len(self.near)} members whose answers count; {self.needed} must name the "
            "same state before it is accepted"
        )

    def sentence_of_few(self) -> str:
        """Return the warning that most voters could not be asked, with the peers whose answers count instead."""
        names = ", ".join(map(short_peer_id, sorted(self.heard | self.told))) or "nobody"
        return (
            f"most voters could not be reached, or lack the state themselves; relying on {names} instead; "
            f"{self.needed} of them must agree. If you do not trust them, leave and join again with a newer invite"
        )


def is_start(head: SpanHead) -> bool:
    """Return whether a span has absorbed no entry."""
    return head.height == 0 and head.round == GENESIS_ROUND


def voices_for(
    *,
    me: PeerId,
    can_be_dialled: bool,
    is_ready: bool,
    has_listened: bool,
    roster: Roster,
    grid: Grid,
    founder: PeerId,
    gone: Collection[PeerId],
    holders: Collection[PeerId],
    empty: Collection[PeerId] = (),
) -> Voices:
    """Return the voices of `me`.

    Args:
        can_be_dialled: whether members that cannot be dialled can reach this peer.
        is_ready: whether this peer already holds the agreed state.
        has_listened: whether all peers that can be reached have had time to send a heartbeat.
        roster: the roster in force here.
        grid: the grid of `roster`.
        gone: members that have left.
        holders: peers that are linked, alive and on our chain of rosters, and report that they hold the state.
        empty: peers that are linked and alive, and report that they hold nothing.
    """
    others = frozenset(
        member.peer
        for member in roster.members
        if member.peer != me and member.peer not in gone and (can_be_dialled or member.reduces)
    )
    is_member, voters = roster.member(me) is not None, others & roster.voters
    if len(grid.rows) == 1:
        near = voters if voters.difference(empty) else others
    elif is_member or not has_listened:
        near = others & grid.neighbours(me)
    else:  # it may be unable to reach the row that it would be assigned to
        near = voters if len(voters.intersection(holders)) >= ENOUGH_VOTERS else others
    if not near.difference(empty) and founder in holders:
        near = frozenset((founder,))  # no member holds a state to fetch
    heard = near.intersection(holders)
    needed = len(near) // 2 + 1
    if is_member and is_ready:
        needed = (len(near) + 1) // 2 + 1  # it counts itself: of four, two against two are no majority
    elif has_listened:
        needed = len(near.difference(empty) if is_member else heard) // 2 + 1
    return Voices(
        near=near,
        heard=heard,
        empty=near.intersection(empty),
        needed=needed,
        founder=founder,
        founder_holds=founder in holders,
    )


def namers_for(
    *,
    me: PeerId,
    voices: Voices,
    is_ready: bool,
    has_waited: bool,
    is_parted: bool,
    roster: Roster,
    is_grid: bool,
    gone: Collection[PeerId],
    linked: Collection[PeerId],
    holders: Collection[PeerId],
    ready: Collection[PeerId],
    empty: Collection[PeerId],
    told: Collection[PeerId],
    told_empty: Collection[PeerId],
) -> Voices:
    """Return the peers whose answers count for the bytes of spans that `me` fetches: normally the electorate.

    A member of a grid uses its `voices`. So does a peer that is not ready, has waited as long as a stall takes and
    could not ask most of the electorate. A member counts voters as asked only if they are ready: if most came back with
    old disks, each would wait for the others for ever.

    Args:
        linked: members, and the founder, that are linked and alive.
        holders, empty: peers that are linked and alive, and report that they hold some state, or nothing.
        is_parted: whether a tip here cannot be joined to the others', and voters without a link can be asked.
        ready: holders that report that it is the agreed state.
        told, told_empty: peers that have recently signed that they hold some state, or nothing. They count if they are
            not linked.
    """
    is_member = roster.member(me) is not None
    voters = roster.voters - {me} - frozenset(gone)
    far = voters.difference(linked)
    empty = (voters.intersection(empty) | far.intersection(told_empty)).difference(holders)
    if voters == empty or (is_grid and is_member):
        return voices
    heard, told = voters.intersection(holders), far.intersection(told)
    carriers = tuple(sorted(linked, key=lambda peer: (peer not in voters, peer)))
    half = (len(voters) + (me in roster.voters)) / 2
    found = replace(voices, told=told, far=far, carriers=carriers, half=half)
    counts_itself = me in roster.voters or not is_parted
    num_counted = len(voters) + counts_itself if is_ready and is_member else len(voters) - len(empty)
    needed = num_counted // 2 + 1
    able = heard.intersection(ready) if is_member and ready else heard
    if not has_waited or is_ready or len(able | told) >= needed:
        return replace(found, near=voters, heard=heard, empty=empty, needed=needed, is_strict=not is_member)
    if not is_member and len(heard | told) >= ENOUGH_VOTERS:
        found = replace(found, near=voters, heard=heard, needed=len(heard | told) // 2 + 1)
    return replace(found, is_few=True)


ANSWERS_KEPT = 3
"""Number of each voice's last answers that are kept: voices answer at different times, and tips move meanwhile."""

_Answer = tuple[tuple[tuple[Digest, Digest], ...], float]
"""The digests of a fragment's spans, and when they were asked for."""


class NamedContents:
    """Chain and content digests of spans, as lately reported by each voice. A state machine without I/O.

    Args:
        answer_seconds: time that an answer may take.
        pause_seconds: time between two questions to the same voice about the same fragment.
    """

    def __init__(self, *, answer_seconds: float, pause_seconds: float) -> None:
        self._answer_seconds = answer_seconds
        self._pause_seconds = pause_seconds
        self._asked: dict[tuple[int, PeerId], float] = {}
        self._under_way: dict[tuple[int, PeerId], float] = {}
        self._said: dict[int, dict[PeerId, tuple[_Answer, ...]]] = {}

    def may_ask(self, fragment: int, voice: PeerId, now: float) -> bool:
        """Return whether to ask a voice for its digests of a fragment. If so, count the question as sent."""
        key = (fragment, voice)
        asked, until = self._asked.get(key, -math.inf), self._under_way.get(key, -math.inf)
        if now < max(asked + self._pause_seconds, until):
            return False
        self._asked[key], self._under_way[key] = now, now + self._answer_seconds
        return True

    def take(self, sender: PeerId, reply: ContentReply) -> bool:
        """Note an answer. Return False if it was not requested."""
        key = (reply.fragment, sender)
        if self._under_way.pop(key, None) is None:
            return False
        self._add(reply.fragment, sender, (reply.digests, self._asked[key]))
        return True

    def _add(self, fragment: int, voice: PeerId, answer: _Answer) -> None:
        said = self._said.setdefault(fragment, {})
        said[voice] = (*said.get(voice, ()), answer)[-ANSWERS_KEPT:]

    def note(self, voter: PeerId, fragment: int, digests: tuple[tuple[Digest, Digest], ...], asked_at: float) -> None:
        """Note the digests that a voter has signed, unless it has sent newer ones."""
        before = self._said.get(fragment, {}).get(voter)
        if before is None or before[-1][1] <= asked_at:
            self._add(fragment, voter, (digests, asked_at))

    def of(self, span: SpanId, since: float = -math.inf) -> dict[PeerId, tuple[Digest, Digest]]:
        """Return the latest digests of a span by voice, from voices that were asked no earlier than `since`."""
        said = self._said.get(span.fragment, {}).items()
        latest = ((voice, answers[-1]) for voice, answers in said)
        return {voice: pairs[span.index] for voice, (pairs, at) in latest if at >= since and span.index < len(pairs)}

    def lately(self, span: SpanId, since: float = -math.inf) -> dict[tuple[Digest, Digest], set[PeerId]]:
        """Return the voices by chain and content digest of a span. For each chain, a voice's last answer counts."""
        found: dict[tuple[Digest, Digest], set[PeerId]] = {}
        for voice, answers in self._said.get(span.fragment, {}).items():
            pairs = dict(pairs[span.index] for pairs, at in answers if at >= since and span.index < len(pairs))
            for pair in pairs.items():
                found.setdefault(pair, set()).add(voice)
        return found

    def forget(self, fragment: int) -> None:
        """Forget the answers about a fragment, so that all voices are asked again."""
        self._said.pop(fragment, None)

    def clear(self) -> None:
        """Forget all answers; nothing is being fetched."""
        self._said.clear()
