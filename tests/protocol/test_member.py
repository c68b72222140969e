"""A member in bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import ids, member

from p2p_diloco.errors import FrameError
from p2p_diloco.protocol.member import FULL_SHARE, MEMBER
from p2p_diloco.protocol.wire import FLAG, PEER, U32, FrameReader, to_bytes

(A,) = ids(1)


@given(st.booleans(), st.integers(1, FULL_SHARE))
def test_a_member_is_the_same_in_bytes_and_back(dialable: bool, share: int) -> None:
    written = replace(member(A, dialable=dialable), share=share if dialable else FULL_SHARE)
    out = bytearray()
    MEMBER.put(out, written)
    assert len(out) == MEMBER.smallest
    reader = FrameReader(bytes(out))
    assert MEMBER.take(reader) == written
    reader.expect_end()


@pytest.mark.parametrize("dialable", [True, False])
def test_with_a_full_share_its_bytes_are_those_from_before_there_were_shares(dialable: bool) -> None:
    """Rosters on disks, and the entries that name them, must stay what they are."""
    before = to_bytes(member(A, dialable=dialable), (("peer", PEER), ("incarnation", U32), ("can_be_dialled", FLAG)))
    out = bytearray()
    MEMBER.put(out, member(A, dialable=dialable))
    assert bytes(out) == before
    assert MEMBER.take(FrameReader(before)) == member(A, dialable=dialable)


def test_more_than_a_share_is_refused() -> None:
    with pytest.raises(FrameError, match="the number 9; at most 8"):
        MEMBER.take(FrameReader(bytes(A) + (1).to_bytes(4, "little") + b"\x09"))
