"""What proofs of reachability are worth: a claim alone makes nobody an owner of spans.

A fresh identity costs nothing, so what fresh identities prove of each other is worth nothing. What counts is the word
of those who have contributed for long enough to vote, and of the founder.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.protocol.member import MOST_PROOFS, NO_PLACE, PLACE_BYTES, Declaration, ReachProof
from p2p_diloco.protocol.reach import PROOF_SECONDS
from p2p_diloco.protocol.roster import Roster
from p2p_diloco.protocol.rules import RunRules

ENOUGH_TO_DOUBT_ONE = 3
"""Where so many others may prove it, one liar among them is not enough: it takes two proofs."""
IPV6_SITE_BYTES = 8
"""Whoever has one IPv6 address has all of its /64 network."""


def place_of(run: Digest, host: str) -> bytes:
    """Return the place of a public IP address as rosters name it; zeros for any other address.

    Raises:
        ValueError: it is no address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not address.is_global:
        return NO_PLACE
    return sha256(b"place", run, address.packed[:IPV6_SITE_BYTES])[:PLACE_BYTES]


def provers_for(peer: PeerId, parent: Roster, founder: PeerId) -> frozenset[PeerId]:
    """Return whose proofs count for `peer` where the next roster follows `parent`: the founder and members that count.

    Where there are none besides `peer` itself, it is the founder or counts: then all other members, since somebody
    must be able to tell.
    """
    trusted = {member.peer for member in parent.members if member.counts} | {founder}
    return frozenset(trusted - {peer}) or parent.peers() - {peer}


def most_telling(proofs: Iterable[ReachProof], peer: PeerId, parent: Roster, founder: PeerId) -> tuple[ReachProof, ...]:
    """Return the proofs that `peer` declares, of those that it holds, newest first: no more than are needed."""
    trusted = provers_for(peer, parent, founder)
    ranked = sorted(proofs, key=lambda proof: (proof.prover != founder, proof.prover not in trusted))
    return tuple(ranked[: 1 if ranked and ranked[0].prover == founder else MOST_PROOFS])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachJudge:
    """What the declarations that lead to one child of `parent` prove; the same for everybody."""

    parent: Roster
    rules: RunRules
    founder: PeerId
    cycle: int

    def is_reachable(self, word: Declaration) -> bool:
        """Tell whether the next roster takes the peer of a declaration for one that others can reach.

        A member that reduces goes on by its own word, and needs no better proofs: the entries of its spans are the
        evidence. The only member needs nobody to reach it.
        """
        member = self.parent.member(word.peer)
        if member is not None and member.reduces and (word.reachable or len(self.parent.members) == 1):
            return True
        return self.is_proved(word)

    def is_proved(self, word: Declaration) -> bool:
        """Tell whether the proofs of a declaration are enough for its peer to begin to reduce.

        One fresh proof of the founder is. Else it takes two, or one where fewer than three others may give any.
        """
        provers = {proof.prover for proof in self._counted(word)}
        if not provers:
            return False
        num_able = len(provers_for(word.peer, self.parent, self.founder) & self.parent.peers())
        return self.founder in provers or len(provers) >= (MOST_PROOFS if num_able >= ENOUGH_TO_DOUBT_ONE else 1)

    def place(self, word: Declaration) -> bytes:
        """Return the public place at which the peer of a declaration was reached; zeros where it was at none."""
        return max((proof.place for proof in self._counted(word)), default=NO_PLACE)

    def _counted(self, word: Declaration) -> list[ReachProof]:
        if not word.proofs:
            return []
        trusted = provers_for(word.peer, self.parent, self.founder)
        oldest = self.cycle - math.ceil(PROOF_SECONDS / self.rules.cycle_seconds) - 2
        return [each for each in word.proofs if each.prover in trusted and oldest <= each.cycle <= self.cycle + 1]
