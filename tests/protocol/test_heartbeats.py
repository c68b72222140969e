"""Heartbeats and closed boundaries."""

from __future__ import annotations

import math

import pytest
from fake_run import ALL_SPANS, peer_id, run_rules, verify
from made import change, founding, head_of, membership_of, roster_1

from p2p_diloco.protocol.heartbeats import HeartbeatBuilder
from p2p_diloco.protocol.membership.local import Progress
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.frames import MOST_COUNTED
from p2p_diloco.protocol.wire.messages import decode_message, encode_message


def heartbeats() -> tuple[HeartbeatBuilder, ChainBook]:
    rules = run_rules()
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    return HeartbeatBuilder(rules=rules, membership=membership_of(peer_id("ann")), chains=chains), chains


def test_heartbeats_are_sent_at_their_interval() -> None:
    lamp, _ = heartbeats()
    assert lamp.is_due(-5.0)
    assert not lamp.is_due(-4.5)
    assert lamp.next_at == -4.0


def test_the_fragment_in_progress_is_reported_as_it_was_when_its_round_began() -> None:
    lamp, chains = heartbeats()
    lamp.freeze(0)
    assert lamp.closed_heads(1.0) == ()
    for span in ALL_SPANS:
        chains.set_head(span, head_of())
    lamp.freeze(0)
    before = lamp.closed_heads(1.0)
    chains.set_head(ALL_SPANS[0], head_of(height=1, digest=b"moved"))
    chains.set_head(ALL_SPANS[-1], head_of(height=1, digest=b"moved"))
    after = lamp.closed_heads(1.0)
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_after_giving_up_a_branch_the_fragment_in_progress_is_reported_as_it_is() -> None:
    lamp, chains = heartbeats()
    for span in ALL_SPANS:
        chains.set_head(span, head_of())
    lamp.freeze(0)
    chains.set_head(ALL_SPANS[0], head_of(height=1, digest=b"moved"))
    before = lamp.boundary_digest(0)
    lamp.thaw()
    assert lamp.boundary_digest(0) != before


@pytest.mark.parametrize(
    ("ready", "is_nearly_level", "is_paused", "takes_entries"),
    [
        (True, True, False, True),
        (True, False, False, True),
        (False, True, False, True),
        (False, False, False, False),
        (True, True, True, False),
        (False, True, True, False),
    ],
)
def test_a_peer_asks_for_entries_if_it_is_ready_or_nearly_level_and_not_paused(
    ready: bool, is_nearly_level: bool, is_paused: bool, takes_entries: bool
) -> None:
    membership = membership_of(peer_id("ann"))
    membership.local.set_ready(ready)
    change(membership, is_paused=is_paused)
    _, chains = heartbeats()
    lamp = HeartbeatBuilder(rules=run_rules(), membership=membership, chains=chains)
    beat = lamp.heartbeat((), is_nearly_level=is_nearly_level)
    assert beat.takes_entries == takes_entries
    assert beat.ready == (ready and not is_paused)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e300, 2.5])
def test_a_diverged_loss_does_not_stop_heartbeats(loss: float) -> None:
    membership = membership_of(peer_id("ann"))
    change(membership, progress=Progress(tokens=1 << 70, steps=1, loss=loss, tokens_per_second=loss))
    _, chains = heartbeats()
    beat = HeartbeatBuilder(rules=run_rules(), membership=membership, chains=chains).heartbeat(())
    assert decode_message(encode_message(beat)) == beat
    assert beat.tokens == MOST_COUNTED


def test_a_heartbeat_names_the_roster_in_force_and_counts_up() -> None:
    lamp, _ = heartbeats()
    assert lamp.heartbeat(()).roster == bytes(32)
    membership = membership_of(peer_id("ann"))
    membership.rosters.take((founding(), roster_1(2)), 0.0)
    _, chains = heartbeats()
    lamp = HeartbeatBuilder(rules=run_rules(), membership=membership, chains=chains)
    first, second = lamp.heartbeat(()), lamp.heartbeat(())
    assert (first.roster, first.roster_k) == (roster_1(2).roster.digest(), 1)
    assert second.sequence == first.sequence + 1
    assert verify(second.peer, second.statement(), second.signature)


def test_a_heartbeat_is_due_after_time_was_set_back() -> None:
    lamp, _ = heartbeats()
    every = run_rules().heartbeat_seconds
    assert lamp.is_due(1_000_000.0)
    assert not lamp.is_due(1_000_000.0 + every / 2)
    assert lamp.is_due(5.0), "a joiner that takes the swarm's time must not be silent until its old one comes again"
    assert not lamp.is_due(5.0 + every / 2)
