"""The rules that all peers agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ALL_SPANS, CYCLE_SECONDS, run_rules
from made import ids

from p2p_diloco.ids import format_peer_id
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.rules import explain_unlisted
from p2p_diloco.protocol.wire.messages import Refusal, decode_message, encode_message


@pytest.mark.parametrize(("heartbeat", "expected"), [(1.0, 8.0), (2.0, 8.0), (4.0, 12.0)])
def test_silence_is_three_heartbeats_and_at_least_a_round(heartbeat: float, expected: float) -> None:
    assert replace(run_rules(), heartbeat_seconds=heartbeat).silence_seconds == expected


@pytest.mark.parametrize(("heartbeat", "expected"), [(1.0, 15.0), (4.0, 15.0), (7.0, 21.0)])
def test_a_donor_has_fifteen_seconds_for_an_answer_or_until_it_is_silent(heartbeat: float, expected: float) -> None:
    assert replace(run_rules(), heartbeat_seconds=heartbeat).piece_seconds == expected


def test_any_peer_may_be_a_member_unless_the_run_lists_its_members() -> None:
    one, other = ids(2)
    assert run_rules().may_be_member(one)
    listed = replace(run_rules(), listed=frozenset({one}))
    assert (listed.may_be_member(one), listed.may_be_member(other)) == (True, False)


def test_the_founder_of_a_run_with_a_list_may_be_a_member() -> None:
    one, founder, other = ids(3)
    rules = replace(run_rules(), listed=frozenset({one}), founder=founder)
    assert [rules.may_be_member(peer) for peer in (one, founder, other)] == [True, True, False]


def test_a_cycle_has_a_round_of_each_fragment_and_an_entry_of_each_span() -> None:
    assert run_rules().cycle_seconds == CYCLE_SECONDS == 16.0
    assert run_rules().num_all_spans == len(ALL_SPANS) == 5


@pytest.mark.parametrize(
    ("least_stalled_cycles", "round_seconds", "expected"),
    [(3, 8.0, 3), (1, 8.0, 2), (3, 1.0, 10), (3, 0.5, 20), (12, 1.0, 12), (3, 3600.0, 3)],
)
def test_a_run_is_stalled_after_some_cycles_and_at_least_twenty_seconds(
    least_stalled_cycles: int, round_seconds: float, expected: int
) -> None:
    clock = RoundClock(start_seconds=0.0, round_seconds=round_seconds, num_fragments=2)
    assert replace(run_rules(stalled_cycles=least_stalled_cycles), clock=clock).stalled_cycles == expected


def test_a_refusal_tells_an_unlisted_peer_its_id_and_what_to_send_to_whom() -> None:
    (peer,) = ids(1)
    text = explain_unlisted(peer)
    assert text == (
        f"this run accepts listed peers only, and {format_peer_id(peer)} is not one of them; send this peer id to "
        "whoever gave you the invite: the list is part of the run, so a new run.toml must name it under [trust] peers"
    )
    word = Refusal(round=0, newer_roster=False, reason=text.encode())
    assert decode_message(encode_message(word)) == word
