"""What all peers agree on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import run_rules
from made import ids

from p2p_diloco.ids import format_peer_id
from p2p_diloco.protocol.messages import Refusal, decode_message, encode_message
from p2p_diloco.protocol.rules import explain_unlisted


@pytest.mark.parametrize(("heartbeat", "expected"), [(1.0, 8.0), (2.0, 8.0), (4.0, 12.0)])
def test_silence_is_three_heartbeats_and_at_least_a_round(heartbeat: float, expected: float) -> None:
    assert replace(run_rules(), heartbeat_seconds=heartbeat).silence_seconds == expected


def test_everybody_may_be_a_member_unless_the_run_lists_who() -> None:
    one, other = ids(2)
    assert run_rules().may_be_member(one)
    listed = replace(run_rules(), listed=frozenset({one}))
    assert (listed.may_be_member(one), listed.may_be_member(other)) == (True, False)


def test_an_unlisted_peer_reads_its_id_and_what_to_send_to_whom_in_one_refusal() -> None:
    (peer,) = ids(1)
    text = explain_unlisted(peer)
    assert text == (
        f"this run takes listed peers only, and {format_peer_id(peer)} is not one of them; send this peer id to "
        "whoever gave you the invite: the list is part of the run, so a new run.toml must name it under [trust] peers"
    )
    word = Refusal(round=0, newer_roster=False, reason=text.encode())
    assert decode_message(encode_message(word)) == word
