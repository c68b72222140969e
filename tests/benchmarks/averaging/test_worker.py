"""A worker does what it is told, line by line."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest

from benchmarks.averaging import worker


class FakePeer:
    def __init__(self) -> None:
        self.done: list[Any] = []

    def start(self) -> dict[str, Any]:
        return {"addresses": ["here"]}

    def meet(self, words: list[dict[str, Any]]) -> None:
        self.done.append(words)

    def prepare(self, turn: int) -> None:
        if turn == 13:
            raise ZeroDivisionError("thirteen")

    def play(self, turn: int, at: float, is_trial: bool) -> dict[str, Any]:
        return {"applied_at": at, "trouble": "", "trial": is_trial}

    def settle(self, turn: int, at: float) -> dict[str, Any]:
        return {"is_settled": True, "roster": ""}

    def digest(self) -> str:
        return "d1"

    def close(self) -> None:
        self.done.append("closed")


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> FakePeer:
    made = FakePeer()
    monkeypatch.setattr(worker, "make_peer", lambda order: made)
    return made


def said(*words: dict[str, Any]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    try:
        worker.obey(io.StringIO("\n".join(json.dumps(word) for word in ({"system": "x"}, *words)) + "\n"), answers)
    finally:
        lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    return lines


def test_each_word_is_answered_by_one_line_until_the_end(peer: FakePeer) -> None:
    assert said(
        {"do": "start"},
        {"do": "meet", "words": [{"addresses": ["here"]}]},
        {"do": "prepare", "turn": 0},
        {"do": "play", "turn": 0, "at": 1.5, "is_trial": True},
        {"do": "settle", "turn": 1, "at": 1.5},
        {"do": "digest"},
        {"do": "end"},
        {"do": "digest"},
    ) == [
        {"addresses": ["here"]},
        {},
        {},
        {"applied_at": 1.5, "trouble": "", "trial": True},
        {"is_settled": True, "roster": ""},
        {"digest": "d1"},
    ]
    assert peer.done == [[{"addresses": ["here"]}], "closed"]


def test_a_failure_is_the_last_answer(peer: FakePeer) -> None:
    answers = io.StringIO()
    words = io.StringIO('{"system": "x"}\n{"do": "prepare", "turn": 13}\n')
    with pytest.raises(ZeroDivisionError):
        worker.obey(words, answers)
    assert json.loads(answers.getvalue()) == {"error": "ZeroDivisionError: thirteen"}


def test_a_moment_that_has_passed_is_not_waited_for() -> None:
    worker.wait_for_moment(time.monotonic() - 1.0)


def test_each_system_has_its_class() -> None:
    order = {"system": "gloo_fp32", "place": 0, "num_peers": 2, "parameters": 64, "folder": "/nowhere/peer"}
    assert type(worker.make_peer(order)).__name__ == "GlooPeer"
