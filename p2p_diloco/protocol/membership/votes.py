"""Votes: what this peer has promised and voted for, and the rounds in which it names no parents because of that."""

from __future__ import annotations

from p2p_diloco.ids import Digest
from p2p_diloco.protocol.membership.local import LocalState
from p2p_diloco.protocol.wire.ballot import Ballots, Bond, Proposal, promise, vote
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster

MOST_VOTES = 64
"""Number of parents for which a peer remembers that it voted for a child: many more than a few rounds can have."""


class Votes:
    """This peer as a voter. Of a round it either votes on the roster or names parents under the old one, never both.

    Args:
        remembers: whether this peer still knows the votes of its earlier incarnations. A peer that lost its disk does
            not, so it has no vote on the child of a roster that lists an earlier incarnation.
    """

    def __init__(self, local: LocalState, ballots: Ballots, *, remembers: bool) -> None:
        self._local = local
        self._clock = local.rules.clock
        self._ballots = ballots
        self._remembers = remembers
        self._last_rounds: dict[Digest, int] = {}
        """For each of the last parents for whose child this peer voted, the last round before the child may govern, by
        the first vote."""
        self._started_in: int | None = None
        self._named_in: int | None = None

    # -- ballots

    def bond(self, parent: Roster, *, degraded: bool) -> Bond:
        """Return what this peer has promised and voted for about a child of `parent`."""
        return self._ballots.bond(parent.digest(), degraded=degraded)

    def has_voted(self, parent: Roster) -> bool:
        """Return whether this peer has voted for an ordinary child of `parent`."""
        return self.bond(parent, degraded=False).voted is not None

    def knows_its_own(self, parent: Roster) -> bool:
        """Return whether this peer is on a roster, and knows what the incarnation listed there has voted for."""
        member = parent.member(self._local.peer)
        return member is not None and (self._remembers or member.incarnation == self._local.me.incarnation)

    def has_forgotten(self, certified: CertifiedRoster) -> bool:
        """Return whether a roster carries a vote of this peer that is not on its disk.

        Votes are written to disk before they are sent. A peer that lost its disk already knows that votes are missing.
        """
        voted = self._ballots.bond(certified.roster.parent, degraded=certified.roster.degraded).voted
        is_kept = voted is not None and voted.ballot >= certified.ballot
        return self._remembers and not is_kept and any(peer == self._local.peer for peer, _ in certified.votes)

    def promised_round(self) -> int:
        """Return the round of the latest ballot that this peer has promised; -1 if there is none."""
        promised = max((bond.promised for bond in self._ballots.bonds), default=0)
        return self._clock.ballot_round(promised) if promised else -1

    def promise(self, parent: Roster, ballot: int, *, degraded: bool) -> Ballots:
        """Promise a ballot that is higher than all before; return what to write to disk."""
        bound = promise(self._ballots, parent.digest(), ballot, degraded=degraded)
        assert bound is not None, "a higher ballot can be promised"
        self._ballots = bound
        return bound

    def vote(self, proposal: Proposal) -> Ballots | None:
        """Vote for a proposal; return what to write to disk, or None if earlier promises or votes forbid it."""
        bound = vote(self._ballots, proposal)
        if bound is not None:
            self._ballots = bound
            self._last_rounds.setdefault(proposal.roster.parent, self._clock.agreed_in(proposal.ballot))
            self._last_rounds = dict(list(self._last_rounds.items())[-MOST_VOTES:])
        return bound

    # -- rounds

    @property
    def named_round(self) -> int:
        """The last round in which this peer named parents; until it does, the round in which it was started."""
        started_in = self._started_in if self._started_in is not None else -1
        return self._named_in if self._named_in is not None else started_in

    def round_begun(self, round_index: int) -> None:
        """Note the round in progress.

        Before a restart, this peer may have named parents in it. Its clock may be set back before it names any.
        """
        if self._named_in is None:
            self._started_in = round_index if self._started_in is None else min(self._started_in, round_index)

    def parents_named(self, round_index: int) -> None:
        """Note that this peer names parents in a round."""
        self._named_in = max(self.named_round, round_index)

    def may_name_parents(self, roster: Digest, round_index: int) -> bool:
        """Return whether this peer may name parents under a roster: not in the rounds after it voted for a child."""
        return not self._local.leaving and round_index <= self._last_rounds.get(roster, round_index)

    def may_vote_in(self, ballot: int) -> bool:
        """Return whether a ballot is late enough: its roster must not govern a round in which parents were named."""
        return self._clock.agreed_in(ballot) >= self.named_round
