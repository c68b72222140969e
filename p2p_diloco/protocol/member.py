"""One member of a run as a roster lists it, and what a peer declares of itself to get there."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.wire import (
    DIGEST,
    FLAG,
    PEER,
    SIGNATURE,
    U32,
    U64,
    Layout,
    number,
    to_bytes,
)

FULL_SHARE = 8
EQUAL_SHARE = FULL_SHARE // 2
SHARE = number("B", FULL_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One peer on a roster; `incarnation` counts its starts.

    Attributes:
        since: the cycle in which this peer was listed. Another incarnation that comes before the peer is dropped
            keeps it; a peer that was dropped begins anew.
        counts: enough of its contributions have been in entries for it to be one of those who may vote.
        reduces: can be reached, and averages spans for others.
        trains: False for the bootstrap only, which reduces while it is needed and contributes nothing.
        share: of averaging that its line carries: 4 is what all have where all have the same, 8 as much again or
            more, 1 the least; full where it does not reduce.
    """

    peer: PeerId
    incarnation: int
    since: int = 0
    counts: bool = False
    reduces: bool = True
    trains: bool = True
    share: int = FULL_SHARE


MEMBER_LAYOUT: Layout = (
    ("peer", PEER),
    ("incarnation", U32),
    ("since", U64),
    ("counts", FLAG),
    ("reduces", FLAG),
    ("trains", FLAG),
    ("share", SHARE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a peer declares of itself, signed: that it wants to be a member, how it changed, or that it leaves.

    Peers pass it on to those who vote.

    Attributes:
        cycle: in which it was signed; an old application is worth nothing, so that nobody can replay it.
        reachable: others have proved that they can dial this peer.
        leaving: this incarnation leaves the run.
    """

    run: Digest
    peer: PeerId
    incarnation: int
    cycle: int
    reachable: bool
    trains: bool
    share: int
    leaving: bool
    signature: bytes

    def statement(self) -> bytes:
        """Return the bytes that are signed."""
        return b"declaration" + to_bytes(self, DECLARATION_LAYOUT[:-1])

    def age(self) -> tuple[int, bool, int]:
        """Return the key by which the newest of a peer's declarations is found: it leaves once and for all."""
        return (self.incarnation, self.leaving, self.cycle)


DECLARATION_LAYOUT: Layout = (
    ("run", DIGEST),
    ("peer", PEER),
    ("incarnation", U32),
    ("cycle", U64),
    ("reachable", FLAG),
    ("trains", FLAG),
    ("share", SHARE),
    ("leaving", FLAG),
    ("signature", SIGNATURE),
)
