"""A span that arrives in pieces ends as its bytes, in one piece of memory."""

from __future__ import annotations

from made import head_of, ids

from p2p_diloco.protocol.repair.fetcher import Transfer, Want

A, B = ids(2)


def test_pieces_are_assembled_in_order() -> None:
    transfer = Transfer(head_of(), 8, began=0.0)
    for piece, donor in ((b"12", A), (memoryview(b"345"), B), (b"678", A)):
        assert not transfer.is_whole
        transfer.add(piece, donor)
    assert transfer.is_whole
    assert transfer.donors == {A, B}
    assert transfer.state == b"12345678"


def test_changing_an_added_piece_does_not_change_the_span() -> None:
    transfer, piece = Transfer(head_of(), 4, began=0.0), bytearray(b"1234")
    transfer.add(memoryview(piece), A)
    piece[:] = b"xxxx"
    assert transfer.state == b"1234"


def test_wants_are_found_again() -> None:
    assert {Want.ENTRY: 1, Want.SPAN: 2}[Want("span")] == 2
