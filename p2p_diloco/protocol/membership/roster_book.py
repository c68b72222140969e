"""All certified rosters that this peer knows, and which of them is in force."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, short_peer_id
from p2p_diloco.protocol.grid import Grid, fold_roster
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry, places_in
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, Verify, check_certificate, check_founding

_NAMED_KEPT = 2
_TURNED_KEPT = 8
_RECENT = 8
_SPARSE = 40
_MOST_IN_ONE_REPLY = 24
LATELY_LISTED = 64
"""Number of the latest rosters whose members are not strangers."""
MOST_BRANCHES = 16
"""Maximum number of lines of rosters that are kept beside the one in force."""
MOST_BRANCH_BYTES = 4 << 20
"""Maximum bytes of those lines together, beside twice the bytes of the one in force."""
MOST_REPLY_BYTES = 240 * 1024
"""Maximum bytes of the rosters in one reply, and of any single roster: a control frame holds little more."""


MOST_NAMED = 4
_BEFORE_ALL_ROUNDS = -(1 << 63)


class Governance(enum.Enum):
    """Whether a roster governs a round on the chain in force, as far as this peer knows."""

    GOVERNS = "governs it"
    UNKNOWN = "is not known here"
    TOO_LATE_HERE = "governs it only if it was certified earlier than this peer knows"
    OTHER = "does not govern it"


def first_that_fit(rosters: Sequence[tuple[CertifiedRoster, int]]) -> tuple[CertifiedRoster, ...]:
    """Return the first of some rosters, as many as one message holds; the receiver asks for those that follow.

    Args:
        rosters: each with its number of bytes.
    """
    first = rosters[:_MOST_IN_ONE_REPLY]
    total = accumulate(num_bytes for _, num_bytes in first)
    return tuple(certified for (certified, _), so_far in zip(first, total, strict=True) if so_far <= MOST_REPLY_BYTES)


class RosterBook:
    """The chain of rosters, with branches. A state machine without I/O."""

    def __init__(self, *, rules: RunRules, verify: Verify) -> None:
        self._rules = rules
        self._verify = verify
        self._certified: dict[Digest, CertifiedRoster] = {}
        self._num_bytes: dict[Digest, int] = {}
        self._grids: dict[Digest, Grid] = {}
        """Grids of known rosters, folded when they are first needed: a branch that is given up needs none."""
        self._turned: dict[tuple[Digest, int], Grid] = {}
        self.in_force: Roster | None = None
        self.in_force_digest: Digest | None = None
        self._chain: list[Digest] = []
        self._agreed_in: list[int] = []
        """For each roster of the chain, the last round before it may govern, by its certifying ballot."""
        self._places: dict[Digest, int] = {}
        self._tips: dict[Digest, Roster] = {}
        self._in_common: Digest | None = None
        self._last_named: dict[tuple[Digest, bytes], frozenset[PeerId]] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._certified

    def add(self, certified: CertifiedRoster, *, wins: bool | None = None) -> bool:
        """Add a certified roster whose parent is known, or a founding one; put it in force if it wins.

        A roster that is proposed again may be certified twice, in different ballots. It was agreed on in the earlier
        one, so that certificate replaces a later one.

        Args:
            wins: whether to put it in force (`histories.py`); by default if it is the first, or follows the one in
                force.
        Returns:
            Whether it was new, or an earlier certificate of a known roster.
        Raises:
            PeerError: it is not valid, or its parent is not known here.
        """
        digest = certified.roster.digest()
        known = self._certified.get(digest)
        if known is not None and (known.ballot <= certified.ballot or certified.roster.k == 0):
            self._in_common = digest
            return False
        if certified.roster.k == 0:
            rules = self._rules
            check_founding(certified, rules.run, rules.organiser, self._verify, rules.founder)
        else:
            parent = self._certified.get(certified.roster.parent)
            if parent is None:
                raise PeerError(f"roster {certified.roster.k} follows one that is not known here")
            if certified.ballot < parent.ballot:
                # Otherwise a majority could make itself govern rounds that are over.
                raise PeerError(
                    f"roster {certified.roster.k} was certified in ballot {certified.ballot}, before its parent in "
                    f"ballot {parent.ballot}"
                )
            check_certificate(certified, parent.roster, self._verify, self._rules)
        num_bytes = certified.num_bytes()
        if num_bytes > MOST_REPLY_BYTES:
            raise PeerError(f"roster {certified.roster.k} takes {num_bytes} bytes; {MOST_REPLY_BYTES} fit one message")
        if certified.roster.k and not wins and certified.roster.parent != self.in_force_digest and known is None:
            self._make_room_for_branch(certified, num_bytes)
        self._certified[digest], self._num_bytes[digest] = certified, num_bytes
        if known is not None:
            if digest in self._places:
                self._agreed_in[self._places[digest]] = self._agreed(certified)
            return True
        self._tips.pop(certified.roster.parent, None)
        self._tips[digest] = certified.roster
        if wins is None:
            wins = self.in_force is None or certified.roster.parent == self.in_force_digest
        if wins:
            self.in_force, self.in_force_digest = certified.roster, digest
            self._extend_chain(certified.roster, digest)
        return True

    def _make_room_for_branch(self, certified: CertifiedRoster, num_bytes: int) -> None:
        """Drop the branches with the fewest votes until there is room for a roster of another one, or raise PeerError.

        One voter can make any number of branches, and each as long as it likes.
        """
        begins, votes = certified.roster.parent not in self._tips, self._first_of_branch(certified).votes
        while True:
            others = [tip for tip in self._tips if tip not in self._places and tip != certified.roster.parent]
            on_chain = sum(self._num_bytes[digest] for digest in self._chain)
            room = MOST_BRANCH_BYTES + 3 * on_chain - sum(self._num_bytes.values()) - num_bytes
            if room >= 0 and not (begins and len(others) >= MOST_BRANCHES):
                return
            ranked = {tip: (len(self._first_of_branch(self._certified[tip]).votes), tip) for tip in others}
            weakest = min(others, key=ranked.__getitem__, default=None)
            if weakest is None or ranked[weakest][0] >= len(votes):
                names = ", ".join(short_peer_id(peer) for peer, _ in votes[:MOST_NAMED])
                raise PeerError(
                    f"roster {certified.roster.k} of a branch that {names} began has no room beside {len(others)} "
                    "others"
                )
            self._drop_branch(weakest)

    def _drop_branch(self, tip: Digest) -> None:
        """Drop the rosters of a branch that no other branch or the chain has."""
        parents = Counter(certified.roster.parent for certified in self._certified.values())
        digest = tip
        while digest in self._certified and digest not in self._places and not parents[digest]:
            parent = self._certified[digest].roster.parent
            for kept in (self._certified, self._num_bytes, self._grids, self._tips):
                kept.pop(digest, None)
            parents[parent] -= 1
            digest = parent

    def _first_of_branch(self, certified: CertifiedRoster) -> CertifiedRoster:
        """Return the first roster of a branch; its votes count, because later ones may list invented members."""
        parent = certified.roster.parent
        while parent in self._certified and parent not in self._places:
            certified = self._certified[parent]
            parent = certified.roster.parent
        return certified

    def _extend_chain(self, roster: Roster, digest: Digest) -> None:
        """Make the chain end with the roster now in force, replacing its last part if another branch took over."""
        branch, parent = [digest], roster.parent
        while parent not in self._places and parent != ZERO_DIGEST:
            branch.append(parent)
            parent = self._certified[parent].roster.parent
        kept = self._places.get(parent, -1) + 1
        for dropped in self._chain[kept:]:
            del self._places[dropped]
        del self._chain[kept:], self._agreed_in[kept:]
        for link in reversed(branch):
            self._places[link] = len(self._chain)
            self._chain.append(link)
            self._agreed_in.append(self._agreed(self._certified[link]))

    @property
    def founder(self) -> PeerId:
        """Return the only member of roster 0, which the organiser has signed. Requires that a roster is known."""
        return self._certified[self._chain[0]].roster.members[0].peer

    def grid(self) -> Grid | None:
        """Return the grid of the roster in force. Owners of spans depend on the cycle; see `folded`."""
        return self._grid_of(self.in_force_digest) if self.in_force_digest is not None else None

    def _grid_of(self, digest: Digest) -> Grid:
        grid = self._grids.get(digest)
        if grid is None:
            grid = self._grids[digest] = fold_roster(self._certified[digest].roster, self._rules.group_size)
        return grid

    def folded(self, digest: Digest, round_index: int) -> tuple[Roster, Grid]:
        """Return a known roster, and its grid with the owners of a round."""
        roster, grid = self._certified[digest].roster, self._grid_of(digest)
        key = (digest, self._rules.clock.cycle(round_index))
        turned = self._turned.get(key)
        if turned is None:
            if len(self._turned) >= _TURNED_KEPT:
                self._turned.clear()
            turned = self._turned[key] = grid.turned(key[1])
        return roster, turned

    def roster(self, digest: Digest) -> Roster:
        """Return a known roster."""
        return self._certified[digest].roster

    def governing(self, round_index: int) -> tuple[Roster, Grid] | None:
        """Return the roster that governs a round, with its grid: the newest one agreed on before that round.

        A roster certified while a round begins would reach some members just before and others just after, and half of
        their contributions would name another roster. So it governs only rounds that begin two turns after its ballot.
        """
        place = bisect_left(self._agreed_in, round_index) - 1
        return self.folded(self._chain[place], round_index) if place >= 0 else None

    def last_before(self, digest: Digest) -> int:
        """Return the last round before a roster of the chain may govern."""
        return self._agreed_in[self._places[digest]]

    def governance(self, digest: Digest, round_index: int) -> Governance:
        """Return whether a roster governs a round. No other roster can make an entry of that round."""
        if digest not in self._certified:
            return Governance.UNKNOWN
        governing = self.governing(round_index)
        if governing is not None and governing[0].digest() == digest:
            return Governance.GOVERNS
        place = self._places.get(digest)
        if place is not None and self._agreed_in[place] >= round_index:
            return Governance.TOO_LATE_HERE
        return Governance.OTHER

    def lacks_earlier_certificate(self, certified: CertifiedRoster) -> bool:
        """Return whether a roster can be valid only if its parent was certified earlier than this peer knows."""
        parent = self._certified.get(certified.roster.parent)
        return parent is not None and certified.ballot < parent.ballot

    def included_in(self, entry: Entry) -> frozenset[PeerId]:
        """Return the peers whose contributions are in an entry of a known roster."""
        return self._named(entry.roster, entry.included)

    def present_at(self, entry: Entry) -> frozenset[PeerId]:
        """Return the peers that were present for an entry of a known roster."""
        return self._named(entry.roster, entry.present)

    def _named(self, digest: Digest, bitmap: bytes) -> frozenset[PeerId]:
        """Return the peers that a bitmap names; cached, because most spans of a round name the same ones."""
        found = self._last_named.get((digest, bitmap))
        if found is None:
            roster = self.roster(digest)
            found = frozenset(roster.members[place].peer for place in places_in(bitmap))
            if len(self._last_named) >= _NAMED_KEPT:
                self._last_named.clear()
            self._last_named[digest, bitmap] = found
        return found

    def parent_of(self, roster: Roster) -> Roster | None:
        """Return the parent of a known roster; None for the founding one."""
        parent = self._certified.get(roster.parent)
        return parent.roster if parent is not None else None

    def is_on_chain(self, digest: Digest) -> bool:
        """Return whether a roster is the one in force or one of its ancestors."""
        return digest in self._places

    def parting(self, parent: Digest) -> tuple[Roster, list[CertifiedRoster], list[CertifiedRoster]] | None:
        """Return the roster at which the line that ends in `parent` leaves our chain, then our line and its line since.

        None if `parent` is not known here.
        """
        theirs: list[CertifiedRoster] = []
        while parent in self._certified and parent not in self._places:
            theirs.append(self._certified[parent])
            parent = theirs[-1].roster.parent
        if parent not in self._places:
            return None
        ours = [self._certified[digest] for digest in self._chain[self._places[parent] + 1 :]]
        return self._certified[parent].roster, ours, theirs[::-1]

    def lists(self, peer: PeerId) -> bool:
        """Return whether the roster in force lists a peer."""
        return self.in_force is not None and self.in_force.member(peer) is not None

    def has_listed(self, peer: PeerId) -> bool:
        """Return whether one of the last rosters of the chain lists a peer."""
        return any(self.roster(digest).member(peer) is not None for digest in self._chain[-LATELY_LISTED:])

    def num_degraded(self) -> int:
        """Return how many rosters of the chain were certified without a majority."""
        return sum(self._certified[digest].roster.degraded for digest in self._chain)

    def chain(self) -> list[CertifiedRoster]:
        """Return the rosters from the founding one to the one in force."""
        return [self._certified[digest] for digest in self._chain]

    def landmarks(self) -> tuple[Digest, ...]:
        """Return digests by which another peer finds where our chains part.

        First come the tips of other branches: a long branch arrives in several replies, and is not in force before the
        last ones. Then comes our chain: the latest rosters, ever sparser earlier ones, and the last one that a reply
        had in common with it.
        """
        tips = sorted(self._tips.items(), key=lambda tip: (tip[1].height, tip[1].k, tip[0]), reverse=True)
        branches = [digest for digest, _ in tips if digest != self.in_force_digest][:_RECENT]
        last = len(self._chain) - 1
        places = {last - back for back in (*range(_RECENT), *(_RECENT << n for n in range(_SPARSE))) if back <= last}
        if self._in_common in self._places:
            places.add(self._places[self._in_common])
        return (*branches, *(self._chain[place] for place in sorted(places, reverse=True)))

    def after(self, known: Sequence[Digest]) -> tuple[CertifiedRoster, ...]:
        """Return the rosters after the first of `known` on the chain in force; if none is on it, from the founding one.

        As many as one message holds, and always at least one: the receiver asks for those that follow.
        """
        start = next((self._places[digest] + 1 for digest in known if digest in self._places), 0)
        digests = self._chain[start : start + _MOST_IN_ONE_REPLY]
        return first_that_fit([(self._certified[digest], self._num_bytes[digest]) for digest in digests])

    def _agreed(self, certified: CertifiedRoster) -> int:
        """Return the last round before a roster may govern: one before all rounds for the founding one, of ballot 0."""
        return self._rules.clock.agreed_in(certified.ballot) if certified.ballot else _BEFORE_ALL_ROUNDS
