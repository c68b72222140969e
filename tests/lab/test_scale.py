"""What a round costs as a swarm grows: small sizes, exact claims."""

from __future__ import annotations

from collections import Counter

import pytest

from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.scale import ScaleRow, ScaleSwarm, measure, scale_swarm
from p2p_diloco.protocol.actions import Send
from p2p_diloco.protocol.messages import Message, encode_message, is_bulk
from p2p_diloco.protocol.roster_delta import CertifiedDelta, ProposalDelta


def bits(row: ScaleRow) -> float:
    return 8.0 * row.bytes_sent_per_parameter_per_cycle


def test_a_row_of_eight_sends_what_the_formula_says() -> None:
    row = measure(8, parameters=1_000_000_000)
    assert (row.peers, row.rows, row.streams) == (8, 1, 7)
    assert row.included == 1.0
    assert row.replicas_equal
    # int4 with a 16-bit scale per 64: 4.25 bits, both ways, all but the own share; headers next to nothing.
    assert bits(row) == pytest.approx(8.5 * (1 - 1 / 8), rel=0.01)
    assert row.round_seconds is not None
    assert 0 < row.round_seconds < 8


def test_a_grid_sends_a_little_more_and_has_few_streams() -> None:
    row = measure(18, parameters=1_000_000_000, dial_out_only=0.3)
    assert row.rows == 2
    assert row.included == 1.0
    assert row.replicas_equal
    assert row.streams <= 17
    assert bits(row) < 1.2 * 8.5 * (1 - 1 / 8)
    assert row.control_bytes_per_cycle > 0
    assert row.messages > 0


def test_rosters_are_counted_as_the_differences_that_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Counter[type[Message]] = Counter()
    sent: Counter[type[Message]] = Counter()
    send = ScaleSwarm._send

    def noted(swarm: ScaleSwarm, machine: Machine, action: Send) -> None:
        before = swarm.counters.control_bytes
        send(swarm, machine, action)
        if swarm.counters.control_bytes > before and not is_bulk(action.message):
            assert swarm.counters.control_bytes - before == len(encode_message(action.message))
            sizes[type(action.message)] += swarm.counters.control_bytes - before
            sent[type(action.message)] += 1

    monkeypatch.setattr(ScaleSwarm, "_send", noted)
    swarm = scale_swarm(18)
    swarm.run_to(swarm.rules.clock.begin(4))
    assert {machine.roster.k for machine in swarm.running()} == {2}
    assert sent[ProposalDelta] == sent[CertifiedDelta] == 17, "everybody but the lead hears each of them once"
    assert sizes[ProposalDelta] < 17 * 300, "18 members take 37 bytes each"
    assert sizes[CertifiedDelta] < 17 * (300 + 10 * 66)


def test_the_same_seed_is_the_same_swarm() -> None:
    assert measure(5) == measure(5)
    hidden = [machine.dialable for machine in scale_swarm(10, dial_out_only=0.3).machines.values()]
    assert hidden.count(False) == 3
