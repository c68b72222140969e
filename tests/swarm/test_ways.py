"""Three ways through the code, as listed in docs/how-it-works.md: of a pseudo-gradient, a heartbeat and a joiner."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

from p2p_diloco import Swarm
from p2p_diloco.testing import local_swarm

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = f"{PROJECT / 'p2p_diloco'}/"
PATIENCE_SECONDS = 60.0
MOST_MODULES = 24

pytestmark = pytest.mark.timeout(240)

Way = list[tuple[str, str]]


def ways() -> dict[str, Way]:
    """Return the lists of the page, by their first words."""
    text = (PROJECT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split("## The way through the code")[1]
    blocks = re.findall(r"\n\n(A [\w-]+)[^`]*?\n```\n(.*?)```", text, re.DOTALL)
    return {name: [tuple(line.split()[:2]) for line in lines.splitlines()] for name, lines in blocks}  # type: ignore[misc]


WAYS = ways()


class Loop:
    """A model and the loop that steps it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, swarm: Swarm) -> None:
        numbers = torch.rand(16, 8)
        nn.functional.mse_loss(self.model(numbers), numbers.sum(dim=1, keepdim=True)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        swarm.step(tokens=16)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def calls() -> Way:
    """Return the calls in this package, in order, while a second peer joins the first and trains with it."""
    called: Way = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            called.append((code.co_filename.removeprefix(PACKAGE).removesuffix(".py"), code.co_qualname))

    ada, ben, give_up = Loop(0), Loop(1), time.monotonic() + PATIENCE_SECONDS
    threading.setprofile(note)  # for the threads of the swarm
    sys.setprofile(note)
    try:
        with local_swarm() as local:
            first = local.found(ada.model, ada.optimizer)
            second = local.join(ben.model, ben.optimizer, wait=False)
            absorbed = 0
            while time.monotonic() < give_up and absorbed < 8:
                ada.step(first)
                ben.step(second)
                absorbed = second.status.entries_absorbed
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert absorbed >= 8, "the second peer trained with the first"
    return called


def test_the_page_lists_three_ways() -> None:
    assert list(WAYS) == ["A pseudo-gradient", "A heartbeat", "A joiner"]
    assert len({module for module, _ in WAYS["A pseudo-gradient"]}) <= MOST_MODULES


@pytest.mark.parametrize("name", WAYS)
def test_a_way_goes_through_these_functions_in_this_order(calls: Way, name: str) -> None:
    at = 0
    for place, function in enumerate(WAYS[name]):
        try:
            at = calls.index(function, at) + 1
        except ValueError:
            known = function in calls
            pytest.fail(
                f"{function} is {'not called after' if known else 'never called, nor after'} {WAYS[name][:place]}"
            )
