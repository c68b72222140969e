"""Heads are asked of one donor at a time, and of each once while a fragment is replayed."""

from __future__ import annotations

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.heads_asked import HeadsAsked

A, B = PeerId(b"a" * 32), PeerId(b"b" * 32)


def test_one_is_asked_at_a_time_and_the_next_when_it_does_not_answer() -> None:
    heads = HeadsAsked()
    assert heads.may_ask(0, A, 0.0, is_replayed=False)
    heads.ask(0, A, until=1.0)
    assert not heads.may_ask(0, B, 0.5, is_replayed=False)
    assert heads.may_ask(1, B, 0.5, is_replayed=False), "another fragment"
    assert heads.may_ask(0, B, 1.0, is_replayed=False)


def test_a_reply_answers_the_question_that_was_asked_once() -> None:
    heads = HeadsAsked()
    assert not heads.take(0, A)
    heads.ask(0, A, until=1.0)
    assert not heads.take(0, B)
    assert not heads.take(1, A)
    assert heads.take(0, A)
    assert not heads.take(0, A)


def test_a_donor_that_was_heard_is_asked_again_when_the_replay_is_over() -> None:
    heads = HeadsAsked()
    heads.ask(0, A, until=1.0)
    assert heads.take(0, A)
    assert not heads.may_ask(0, A, 9.0, is_replayed=True)
    assert heads.may_ask(0, B, 9.0, is_replayed=True), "it may stand higher"
    assert heads.may_ask(0, A, 9.0, is_replayed=False)
    assert heads.may_ask(0, A, 9.0, is_replayed=True), "another replay"


def test_what_is_forgotten_may_be_asked_again() -> None:
    heads = HeadsAsked()
    heads.ask(0, A, until=9.0)
    assert heads.take(0, A)
    heads.ask(1, A, until=9.0)
    heads.clear()
    assert heads.may_ask(0, A, 0.0, is_replayed=True)
    assert heads.may_ask(1, A, 0.0, is_replayed=True)
