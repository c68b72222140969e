"""Contents are hashed span by span, once for all simultaneous requests, and never for peers that are gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.outer.state import SpanState
from p2p_diloco.span import serve
from p2p_diloco.span.serve import Contents, Pairs, content_digests
from p2p_diloco.span_log import SpanHead

ANN, BEN = PeerId(b"a" * 32), PeerId(b"b" * 32)


def state_of(name: bytes) -> SpanState:
    head = SpanHead(digest=sha256(name), height=1, round=0, roster=sha256(b"r"), radius=0.0, median_weight=0.0)
    return SpanState(head=head, anchor_N=np.ones(4, np.float32), momentum_N=np.zeros(4, np.float32))


STATES = [state_of(name) for name in (b"1", b"2", b"3")]


class Desk:
    """A worker that runs on demand and counts what it hashes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.now = 0.0
        self.num_hashed = 0
        self.linked = {ANN, BEN}
        self.heard: list[tuple[str, Pairs]] = []
        monkeypatch.setattr(serve, "content_digests", self.hash)
        self.contents = Contents(work=self.work, now=lambda: self.now, good_for_seconds=5.0, linked=self.linked)

    def hash(self, states: list[SpanState]) -> Pairs:
        self.num_hashed += len(states)
        return content_digests(states)

    def work(self, then: Callable[[Any], None], peer: PeerId, function: Callable[..., Any], *args: Any) -> None:
        self.waiting.append(lambda: then(function(*args)))

    def ask(self, peer: PeerId = ANN, question: str = "serve", states: list[SpanState] = STATES) -> None:
        self.contents.hash(peer, question, states, lambda pairs: self.heard.append((question, pairs)))

    def run(self, jobs: int = 1000) -> None:
        for _ in range(min(jobs, 1000)):
            if self.waiting:
                self.waiting.pop(0)()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_spans_are_hashed_one_at_a_time_so_that_other_work_can_run(desk: Desk) -> None:
    desk.ask()
    for done in range(3):
        assert (desk.num_hashed, len(desk.waiting)) == (done, 1)
        desk.run(1)
    assert desk.heard == [("serve", content_digests(STATES))]


def test_two_simultaneous_requests_share_one_hash(desk: Desk) -> None:
    desk.ask(ANN)
    desk.ask(BEN)
    desk.run()
    assert [pairs for _, pairs in desk.heard] == [content_digests(STATES)] * 2
    assert desk.num_hashed == 3


def test_a_repeated_request_is_dropped_while_the_first_is_being_answered(desk: Desk) -> None:
    desk.ask()
    desk.ask()
    desk.ask(question="compare")
    desk.run()
    assert [question for question, _ in desk.heard] == ["serve", "compare"]
    desk.ask()
    desk.run()
    assert len(desk.heard) == 3


def test_a_hash_is_reused_for_seconds_only(desk: Desk) -> None:
    desk.ask()
    desk.run()
    desk.now = 4.9
    desk.ask()
    desk.run()
    assert desk.num_hashed == 3
    desk.now = 5.1
    desk.ask()
    desk.run()
    assert desk.num_hashed == 6, "memory may have failed meanwhile"


def test_different_bytes_at_the_same_log_position_are_hashed_again(desk: Desk) -> None:
    desk.ask()
    desk.run()
    other = [replace(STATES[0], anchor_N=np.full(4, 2.0, np.float32)), *STATES[1:]]
    desk.ask(states=other)
    desk.run()
    assert desk.heard[1][1] == content_digests(other)
    assert desk.num_hashed == 4


def test_nothing_is_hashed_for_a_peer_that_is_gone(desk: Desk) -> None:
    desk.ask()
    desk.run(1)
    desk.linked.discard(ANN)
    desk.run()
    assert (desk.num_hashed, desk.heard) == (2, [])
    desk.linked.add(ANN)
    desk.ask()
    desk.run()
    assert len(desk.heard) == 1
