"""Actions of the engine, played on lab machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lab_swarms import founded
from made_messages import BEAT

from p2p_diloco.lab import playing
from p2p_diloco.lab.stage import Violated
from p2p_diloco.protocol.messages import SpanReply


def test_every_action_has_its_player() -> None:
    swarm = founded(1)
    listed = str(playing.Action)
    assert all(action.__name__ in listed for action in swarm._players)
    assert len(swarm._players) == len(playing.Action.__args__)


def test_all_messages_may_go_through_their_wire_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "ENCODED_SHARE", 1.0)
    swarm = founded(3)
    swarm.kill("p1")
    swarm.run(40.0)
    swarm.start("p1")
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 120.0)


def test_a_wire_form_that_changes_a_message_is_caught() -> None:
    with pytest.raises(Violated, match="wire form"):
        playing._through_the_wire(replace(BEAT, loss=0.1))


def test_numbers_that_are_not_finite_are_caught() -> None:
    swarm = founded(2)
    ann, bob = swarm.machines["p0"], swarm.machines["p1"]
    span = swarm.spans[0]
    reply = SpanReply(span=span, head=ann.vectors.states[span].head, total_bytes=4, offset=0, piece=b"\xff" * 4)
    with pytest.raises(Violated, match="numbers that no sound state holds"):
        swarm._receive(ann, bob, reply)


def test_what_missed_its_deadline_or_its_link_is_not_delivered() -> None:
    swarm = founded(2)
    ann, bob = swarm.machines["p0"], swarm.machines["p1"]
    before = swarm.num_events
    swarm.perform(ann, [playing.Send(to=bob.peer, message=BEAT, deadline=swarm.now - 1.0)])
    swarm.perform(ann, [playing.Send(to=ann.peer, message=BEAT, deadline=swarm.now + 9.0)])
    assert swarm.num_events == before
