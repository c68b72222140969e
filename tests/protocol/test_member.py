"""The encoding of members and declarations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import verify
from hypothesis import given
from hypothesis import strategies as st
from made import NO_SIGNATURE, declaration, ids, member, proof_of

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import sha256
from p2p_diloco.protocol.wire.frames import FrameReader, take_value, to_bytes
from p2p_diloco.protocol.wire.member import (
    FULL_SHARE,
    PLACE_BYTES,
    Declaration,
    Member,
)

A, B = ids(2)


@given(st.booleans(), st.booleans(), st.booleans(), st.integers(0, FULL_SHARE), st.integers(0, (1 << 62) - 1))
def test_a_member_survives_encoding_and_decoding(
    reduces: bool, counts: bool, trains: bool, share: int, since: int
) -> None:
    written = member(A, reduces=reduces, counts=counts, trains=trains, share=share, since=since)
    frame = to_bytes(written)
    assert len(frame) <= 60, "2048 of them must fit one control frame"
    reader = FrameReader(frame)
    assert take_value(reader, Member) == written
    reader.expect_end()


@given(st.booleans(), st.booleans(), st.booleans(), st.integers(0, FULL_SHARE), st.integers(0, 1 << 40))
def test_a_declaration_survives_encoding_and_decoding(
    reachable: bool, trains: bool, leaving: bool, share: int, cycle: int
) -> None:
    written = declaration(A, reachable=reachable, trains=trains, leaving=leaving, share=share, cycle=cycle)
    reader = FrameReader(to_bytes(written))
    assert take_value(reader, Declaration) == written
    reader.expect_end()


def test_more_than_a_full_share_is_refused() -> None:
    frame = bytearray(to_bytes(member(A)))
    frame[-1 - PLACE_BYTES] = FULL_SHARE + 1
    with pytest.raises(FrameError, match="the number 9; at most 8"):
        take_value(FrameReader(bytes(frame)), Member)


@pytest.mark.parametrize(
    "change",
    [
        {"run": sha256(b"another run")},
        {"peer": B},
        {"incarnation": 2},
        {"cycle": 1},
        {"proofs": ()},
        {"trains": False},
        {"share": 4},
        {"leaving": True},
    ],
)
def test_every_declared_field_is_signed(change: dict[str, object]) -> None:
    word = declaration(A)
    assert replace(word, **change).statement() != word.statement()  # type: ignore[arg-type]
    assert replace(word, signature=b"\1" * 64).statement() == word.statement()


@pytest.mark.parametrize("change", [{"prover": B}, {"place": b"A" * PLACE_BYTES}, {"cycle": 1}])
def test_every_proved_field_is_signed_and_valid_for_one_peer_of_one_run(change: dict[str, object]) -> None:
    proof, word = proof_of(A), declaration(A)
    assert replace(proof, **change).statement(word.run, A) != proof.statement(word.run, A)  # type: ignore[arg-type]
    assert proof.statement(word.run, B) != proof.statement(word.run, A)
    assert proof.statement(sha256(b"another run"), A) != proof.statement(word.run, A)


def test_a_declaration_is_valid_if_its_peer_and_all_provers_signed() -> None:
    word = declaration(A, proofs=(proof_of(A), proof_of(A, B)))
    assert word.is_signed(verify)
    assert not replace(word, signature=NO_SIGNATURE).is_signed(verify)
    for proofs in ((word.proofs[0], replace(word.proofs[1], cycle=2)), (proof_of(B),)):
        assert not declaration(A, proofs=proofs).is_signed(verify)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"cycle": 3}, {"cycle": 4}),
        ({"cycle": 9}, {"cycle": 3, "leaving": True}),  # a peer that leaves does not return as the same incarnation
        ({"cycle": 9, "leaving": True}, {"cycle": 3, "incarnation": 2}),
    ],
)
def test_the_newer_of_two_declarations_is_found(older: dict[str, object], newer: dict[str, object]) -> None:
    assert declaration(A, **older).age() < declaration(A, **newer).age()
