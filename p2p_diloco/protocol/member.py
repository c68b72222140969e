"""One member of a run, as it stands on a roster."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.wire import PEER, U32, Field, FrameReader, number

FULL_SHARE = 8
EQUAL_SHARE = FULL_SHARE // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One peer on a roster; `incarnation` counts its starts, so a restarted peer is a newcomer.

    Attributes:
        share: of averaging that its line carries: 4 is what all have where all have the same, 8 as much again or
            more, 1 the least; full where it cannot be dialled, and so averages nothing.
    """

    peer: PeerId
    incarnation: int
    can_be_dialled: bool
    share: int = FULL_SHARE


SHARE = number("B", FULL_SHARE)
_STANDING = number("B", FULL_SHARE)
"""0: cannot be dialled; 1: can, with a full share; from 2 on: can, with one less. Rosters from before there were shares
keep their names so, on disks and in entries."""


def _put_member(out: bytearray, member: Member) -> None:
    PEER.put(out, member.peer)
    U32.put(out, member.incarnation)
    _STANDING.put(out, 0 if not member.can_be_dialled else 1 + member.share % FULL_SHARE)


def _take_member(reader: FrameReader) -> Member:
    peer, incarnation, standing = PEER.take(reader), U32.take(reader), _STANDING.take(reader)
    share = standing - 1 if standing > 1 else FULL_SHARE
    return Member(peer=peer, incarnation=incarnation, can_be_dialled=standing > 0, share=share)


MEMBER = Field(put=_put_member, take=_take_member, smallest=PEER.smallest + U32.smallest + _STANDING.smallest)
