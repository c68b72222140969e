"""Words in, answers out, one line each."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.averaging import comparison
from benchmarks.averaging.systems import GLOO
from benchmarks.footprint import play as footprint
from benchmarks.new_run import order_of_new_run
from benchmarks.training import play as training
from benchmarks.training.our_run import RunShape, run_values
from benchmarks.worker import obey

SMALL = footprint.FootprintPlan(num_peers=1, parameters=(200_000,))
SHAPE = RunShape(codec="int4", fragments=2, spans_per_fragment=2, model="tiny")


class Echo:
    def __init__(self, order: Mapping[str, Any], done: list[str]) -> None:
        self.name, self.done = order["name"], done

    def fail(self) -> None:
        raise ZeroDivisionError("nothing to divide by")

    def say(self, text: str) -> dict[str, Any]:
        self.done.append(text)
        return {"who": self.name, "said": text}

    def rest(self) -> None:
        self.done.append("rested")

    def close(self) -> None:
        self.done.append("closed")


def said(words: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    answers, done = io.StringIO(), list[str]()
    lines = [{"name": "echo"}, *words]
    try:
        obey(io.StringIO("\n".join(map(json.dumps, lines)) + "\n"), answers, lambda order: Echo(order, done))
    except (ZeroDivisionError, AttributeError):
        done.append("raised")
    return [json.loads(line) for line in answers.getvalue().splitlines()], done


@pytest.mark.parametrize("last", [[], [{"do": "end"}, {"do": "rest"}]])
def test_each_command_is_answered_by_one_line_until_the_end(last: list[dict[str, Any]]) -> None:
    answers, done = said([{"do": "say", "text": "one"}, {"do": "rest"}, *last])
    assert answers == [{"who": "echo", "said": "one"}, {}]
    assert done == ["one", "rested", "closed"]


@pytest.mark.parametrize(
    ("command", "error"),
    [("fail", "ZeroDivisionError: nothing to divide by"), ("dance", "AttributeError: 'Echo' object has no attribute")],
)
def test_a_failure_is_the_last_answer_and_ends_the_worker(command: str, error: str) -> None:
    answers, done = said([{"do": command}, {"do": "rest"}])
    assert [answer["error"].startswith(error) for answer in answers] == [True]
    assert done == ["raised"]


RUN: dict[str, Any] = {"num_peers": 2, "parameters": 64, "place": 0, "folder": "/nowhere/peer"}
ISLAND: dict[str, Any] = {"num_islands": 2, "address": "10.0.0.1", "sync_every": 3}
PATIENCE_SECONDS = 60.0
# In a process of its own, because other tests import these libraries into this one.
MADE_IN_A_PROCESS = """
import json, sys
from benchmarks.worker import make_worker
worker = make_worker(sys.argv[1], json.loads(sys.argv[2]))
print(type(worker).__name__, sorted({"torchft", "hivemind"} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (comparison.WORKERS[GLOO], RUN),
        (footprint.PEER, RUN),
        (footprint.ALONE, RUN | footprint.orders_of(SMALL, 200_000)[0]),
        (training.TORCHFT_ISLAND, RUN | ISLAND | order_of_new_run(run_values(SHAPE, 4.0))),
    ],
)
def test_each_worker_is_made_with_the_libraries_that_it_needs_alone(name: str, order: dict[str, Any]) -> None:
    command = [sys.executable, "-c", MADE_IN_A_PROCESS, name, json.dumps(order)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (made.stdout, made.stderr) == (name.split(":")[1] + " []\n", "")
