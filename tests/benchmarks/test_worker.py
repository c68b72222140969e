"""Words in, answers out, one line each."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.worker import obey


class Echo:
    def __init__(self, order: Mapping[str, Any], done: list[str]) -> None:
        self.name, self.done = order["name"], done

    def do(self, word: Mapping[str, Any]) -> dict[str, Any]:
        if word["do"] == "fail":
            raise ZeroDivisionError("nothing to divide by")
        self.done.append(word["do"])
        return {"who": self.name, "did": word["do"]}

    def close(self) -> None:
        self.done.append("closed")


def said(words: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    answers, done = io.StringIO(), list[str]()
    lines = [{"name": "echo"}, *({"do": word} for word in words)]
    try:
        obey(io.StringIO("\n".join(map(json.dumps, lines)) + "\n"), answers, lambda order: Echo(order, done))
    except ZeroDivisionError:
        done.append("raised")
    return [json.loads(line) for line in answers.getvalue().splitlines()], done


@pytest.mark.parametrize("last", [[], ["end", "more"]])
def test_each_word_is_answered_by_one_line_until_the_end(last: list[str]) -> None:
    answers, done = said(["one", "two", *last])
    assert answers == [{"who": "echo", "did": "one"}, {"who": "echo", "did": "two"}]
    assert done == ["one", "two", "closed"]


def test_a_failure_is_the_last_answer_and_ends_the_worker() -> None:
    answers, done = said(["fail", "one"])
    assert answers == [{"error": "ZeroDivisionError: nothing to divide by"}]
    assert done == ["raised"]
