"""Which proofs of reachability count. Without them no peer becomes an owner of spans.

A fresh identity costs nothing, so proofs by fresh identities are ignored. Proofs count if they come from the founder or
from members that have contributed for long enough to vote.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.protocol.membership.reach import PROOF_SECONDS
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.member import MOST_PROOFS, NO_PLACE, PLACE_BYTES, Declaration, ReachProof
from p2p_diloco.protocol.wire.roster import Roster

ENOUGH_TO_DOUBT_ONE = 3
"""Number of possible provers from which two proofs are needed, so that one liar among them is not enough."""
IPV6_SITE_BYTES = 8
"""Bytes of an IPv6 address that name its place: a host with one address usually controls its whole /64 network."""


def place_of(run: Digest, host: str) -> bytes:
    """Return the place of a public IP address as rosters name it; zeros for any other address.

    Raises:
        ValueError: `host` is not an IP address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not address.is_global:
        return NO_PLACE
    return sha256(b"place", run, address.packed[:IPV6_SITE_BYTES])[:PLACE_BYTES]


def provers_for(peer: PeerId, parent: Roster, founder: PeerId) -> frozenset[PeerId]:
    """Return the peers whose proofs count for `peer` in the next roster: the founder and the members that count.

    If `peer` itself is the only one of these, proofs by all other members count, since some peer must be able to give
    one.
    """
    trusted = {member.peer for member in parent.members if member.counts} | {founder}
    return frozenset(trusted - {peer}) or parent.peers() - {peer}


def proofs_to_declare(
    proofs: Iterable[ReachProof], peer: PeerId, parent: Roster, founder: PeerId
) -> tuple[ReachProof, ...]:
    """Choose the proofs that `peer` declares from those that it holds (newest first): as few as are needed."""
    trusted = provers_for(peer, parent, founder)
    ranked = sorted(proofs, key=lambda proof: (proof.prover != founder, proof.prover not in trusted))
    return tuple(ranked[: 1 if ranked and ranked[0].prover == founder else MOST_PROOFS])


def is_recent(proved_in: int, cycle: int, rules: RunRules) -> bool:
    """Return whether a proof that names the cycle `proved_in` counts in another cycle."""
    return cycle - math.ceil(PROOF_SECONDS / rules.cycle_seconds) - 2 <= proved_in <= cycle + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachJudge:
    """Decides which declared peers count as reachable for one child of `parent`. All peers decide alike."""

    parent: Roster
    rules: RunRules
    founder: PeerId
    cycle: int

    def is_reachable(self, declaration: Declaration) -> bool:
        """Return whether the next roster treats the declaring peer as reachable.

        A member that already reduces needs no new proofs: the entries of its spans are the evidence. The only member
        of a run needs none either.
        """
        member = self.parent.member(declaration.peer)
        if member is not None and member.reduces and (declaration.reachable or len(self.parent.members) == 1):
            return True
        return self.is_proved(declaration)

    def is_proved(self, declaration: Declaration) -> bool:
        """Return whether the proofs are enough for the declaring peer to start reducing.

        One fresh proof by the founder is enough. Otherwise two are needed, or one if fewer than three others may give
        any.
        """
        provers = {proof.prover for proof in self._counted(declaration)}
        if not provers:
            return False
        num_able = len(provers_for(declaration.peer, self.parent, self.founder) & self.parent.peers())
        return self.founder in provers or len(provers) >= (MOST_PROOFS if num_able >= ENOUGH_TO_DOUBT_ONE else 1)

    def place(self, declaration: Declaration) -> bytes:
        """Return the public place at which the declaring peer was reached, or zeros if there is none."""
        return max((proof.place for proof in self._counted(declaration)), default=NO_PLACE)

    def _counted(self, declaration: Declaration) -> list[ReachProof]:
        if not declaration.proofs:
            return []
        trusted = provers_for(declaration.peer, self.parent, self.founder)
        proofs = (proof for proof in declaration.proofs if proof.prover in trusted)
        return [proof for proof in proofs if is_recent(proof.cycle, self.cycle, self.rules)]
