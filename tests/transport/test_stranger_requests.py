"""Bounds on the requests and records of others, and the addresses in answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.ids import PeerId, format_peer_id, sha256
from p2p_diloco.transport.directory import ADDRESSES_FIELD, MOST_ADDRESSES_SENT, decode_addresses, encode_addresses
from p2p_diloco.transport.protobuf import encode_field
from p2p_diloco.transport.strangers import (
    BYTES_OF_A_RECORD,
    MEMBER_CALLS,
    MOST_IN_SHARD,
    STRANGER_CALLS,
    STRANGER_RECORDS,
    STRANGERS_CALLS,
    STRANGERS_RECORDS,
    CallBudgets,
    choose_peers,
)

MEMBER = PeerId(sha256(b"member"))
STRANGER = PeerId(sha256(b"stranger"))
CROWD = [PeerId(sha256(b"peer %d" % number)) for number in range(2000)]


def is_member(peer: PeerId) -> bool:
    return peer == MEMBER


def budgets() -> CallBudgets:
    return CallBudgets(is_member)


# -- requests


def test_a_newcomer_that_looks_up_everything_once_a_second_is_answered() -> None:
    budget = budgets()
    assert all(budget.admits_call(STRANGER, 0.5 * half) for half in range(600))


def test_a_flood_of_one_stranger_is_cut_to_its_rate_and_takes_nothing_from_a_member() -> None:
    budget = budgets()
    admitted = sum(budget.admits_call(STRANGER, 0.001 * at) for at in range(10_000))
    assert admitted == pytest.approx(STRANGER_CALLS.burst + 10 * STRANGER_CALLS.per_second, abs=2)
    assert not all(budget.admits_call(STRANGER, 10.0) for _ in range(2))
    assert budget.is_used_up(STRANGER, 10.0)
    assert sum(budget.admits_call(MEMBER, 10.0) for _ in range(1000)) == MEMBER_CALLS.burst


def test_strangers_together_have_one_budget() -> None:
    budget = budgets()
    admitted = sum(budget.admits_call(peer, 0.0) for peer in CROWD for _ in range(10))
    assert admitted == STRANGERS_CALLS.burst
    assert budget.admits_call(MEMBER, 0.0)
    newcomer = PeerId(sha256(b"newcomer"))
    assert not budget.admits_call(newcomer, 0.0)
    assert not budget.is_used_up(newcomer, 0.0), "it is not its fault"


# -- records


def test_a_stranger_may_announce_itself_every_two_minutes_but_not_store_a_crowd() -> None:
    budget = budgets()
    assert all(budget.admits_record(STRANGER, 300, 120.0 * at) for at in range(50))
    other = CROWD[0]
    assert sum(budget.admits_record(other, 200, 6000.0) for _ in range(10_000)) == STRANGER_RECORDS.burst


def test_strangers_together_store_a_bounded_number_and_long_records_count_more() -> None:
    budget = budgets()
    assert sum(budget.admits_record(peer, BYTES_OF_A_RECORD, 0.0) for peer in CROWD) == STRANGERS_RECORDS.burst
    budget, num_bytes = budgets(), 8 * BYTES_OF_A_RECORD
    assert sum(budget.admits_record(STRANGER, num_bytes, 0.0) for _ in range(99)) == STRANGER_RECORDS.burst / 8


# -- the choice of records


@given(st.sets(st.sampled_from(CROWD), max_size=64), st.binary(max_size=8))
def test_few_peers_are_all_chosen(peers: set[PeerId], draw: bytes) -> None:
    assert choose_peers(peers, is_member=is_member, most_strangers=64, draw=draw) == peers


def test_members_are_always_chosen_and_of_a_crowd_another_sample_each_time() -> None:
    peers = [*CROWD, MEMBER]
    samples = [choose_peers(peers, is_member=is_member, most_strangers=64, draw=bytes([draw])) for draw in range(32)]
    assert {len(sample) for sample in samples} == {65}
    assert all(MEMBER in sample for sample in samples)
    assert len(set().union(*samples)) > 1000, "a peer that was omitted may be chosen the next time"


def test_even_a_shard_of_members_alone_is_bounded() -> None:
    chosen = choose_peers(CROWD, is_member=lambda peer: True, most_strangers=64, draw=b"")
    assert len(chosen) == MOST_IN_SHARD


# -- addresses


ANSWER = b"\x0a\x02hi\x12\x00"
"""Other fields with a length."""
NUMBERS = b"\x21" + bytes(8) + b"\x28\x01"
"""Fields without a length, as in an answer to a ping."""


def address(peer: PeerId, port: int = 4001) -> str:
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{format_peer_id(peer)}"


def test_addresses_are_read_as_they_were_told_by_peer() -> None:
    told = [address(MEMBER), address(STRANGER), address(STRANGER, 4002)]
    answer = ANSWER + encode_addresses(told) + ANSWER
    assert decode_addresses(answer) == {MEMBER: (told[0],), STRANGER: (told[1], told[2])}


def test_an_answer_without_addresses_is_as_before() -> None:
    assert encode_addresses(()) == b""


def test_addresses_are_few() -> None:
    value = encode_addresses(map(address, CROWD))
    assert len(decode_addresses(value)) == MOST_ADDRESSES_SENT
    flood = encode_field(ADDRESSES_FIELD, "\n".join(map(address, CROWD)).encode())
    assert len(decode_addresses(flood)) <= MOST_ADDRESSES_SENT
    many = encode_field(ADDRESSES_FIELD, "\n".join(address(MEMBER, port) for port in range(99)).encode())
    assert len(decode_addresses(many)[MEMBER]) == 4


@given(st.binary(max_size=400))
def test_garbage_is_omitted(value: bytes) -> None:
    decode_addresses(value)
    assert decode_addresses(encode_field(ADDRESSES_FIELD, value)).keys() <= {MEMBER}
    assert decode_addresses(NUMBERS + encode_addresses([address(MEMBER)])) == {}
