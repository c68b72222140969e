"""Modules on the ways of messages through the package, from the recorded calls of two peers that train together.

A way is a list of stages, each of which is what one thread does without a pause, from a root on: the root, all that it
calls, and its callers. So a module is on a way because a function of it was called, not because a page names it or a
module imports it. A stage may count only the calls of its root with an argument of some class, or those during which
another function gets one; this tells the frame of a contribution from that of a heartbeat. A stage without a call is an
error.

Not counted are: bodies of modules and classes, generated methods of data classes, loops that numba has compiled,
`p2p_diloco.testing.swarm`, and what another thread does next, unless it is a stage. The memory transport stands for
libp2p.

As a script, this file prints the ways of the package that Python finds, of this checkout or another.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple, Self

import torch
from torch import nn

import p2p_diloco
from p2p_diloco.span.known_answer import warm_up
from p2p_diloco.testing import local_swarm

SETTLING_ENTRIES, RECORDED_ENTRIES = 4, 8
"""Entries until others know the joiner as ready too, and entries from then on."""
PATIENCE_SECONDS = 180.0

Call = tuple[str, str]
"""A module below the package, such as `node/node`, and the qualified name of a function in it."""
Place = tuple[str, int]
"""A way and the number of a stage."""


class Stage(NamedTuple):
    """Calls of a root: all, those with an argument of class `of`, or those with a call of `through` that has one."""

    root: Call
    of: str = ""
    through: Call | None = None


def _posted(kind: str) -> Stage:
    return Stage(("node/node", "SwarmNode._post"), kind)


def _received(kind: str) -> Stage:
    return Stage(("node/node", "SwarmNode.frame_received"), kind, ("protocol/engine", "PeerEngine.receive"))


_CHECKED = ("protocol/engine", "PeerEngine._take_entry")
WAYS: Mapping[str, Sequence[Stage]] = {
    "pseudo-gradient": (
        Stage(("session/trained_state", "TrainedState._answer")),  # between two steps: φ − θ, clipped and encoded
        Stage(("node/node", "SwarmNode._contribute")),  # in the loop: to the reducers
        _posted("SpanVector"),
        _received("SpanVector"),
        Stage(("span/reduce", "reduce_parts")),  # on the vector thread
        Stage(("protocol/round/exchange", "Exchange.span_reduced")),  # a signed entry
    ),
    "entry": (
        Stage(
            ("node/vector_actions", "VectorActions._reduce.<locals>.reduced"), through=_CHECKED
        ),  # signed and followed by the owner
        _posted("Entry"),
        Stage(("node/node", "SwarmNode.frame_received"), through=("node/vector_actions", "VectorActions.check_entry")),
        Stage(("node/vector_actions", "VectorActions._norm_of")),  # on the vector thread
        Stage(("node/vector_actions", "VectorActions.check_entry.<locals>.checked")),
        Stage(("storage/archive", "Archive._write_all")),  # on the thread that writes
        Stage(("session/held_state", "HeldState._follow")),  # on the thread that follows: φ and m
        Stage(("island/local_spans", "LocalSpans.move")),  # between two steps: θ
    ),
    "heartbeat": (
        Stage(("protocol/engine", "PeerEngine._sign_of_life")),
        _posted("Heartbeat"),
        _received("Heartbeat"),
    ),
    "joiner": (
        Stage(("api", "joiner_plan")),
        Stage(("session/start", "run_peer")),
        _received("RosterReply"),
        Stage(("protocol/repair/repair", "Repair.pump")),
        _posted("SpanRequest"),
        _received("SpanRequest"),  # at a donor
        _posted("SpanReply"),
        _received("SpanReply"),
        Stage(("session/held_state", "HeldState._put")),
        Stage(("session/trained_state", "TrainedState.begin")),
    ),
}


@dataclass(slots=True)
class _Running:
    """A call of a root that has not returned: its callers and what it has called, its stages, and those that count."""

    frame: FrameType
    calls: dict[Call, None]
    places: set[Place]
    certain: set[Place] = field(default_factory=set)


class Recorder:
    """Notes the calls of a package's functions inside the block, and which of them are on a way.

    Args:
        package: the folder of the package.
    """

    def __init__(self, package: Path, ways: Mapping[str, Sequence[Stage]]) -> None:
        self.calls: list[Call] = []
        self._prefix = f"{package}/"
        self._stages = {(way, number): stage for way, stages in ways.items() for number, stage in enumerate(stages)}
        self._roots: dict[Call, set[Place]] = {}
        self._marks: dict[Call, set[Place]] = {}
        for place, stage in self._stages.items():
            self._roots.setdefault(stage.root, set()).add(place)
            self._marks.setdefault(stage.through or stage.root, set()).add(place)
        self._found: dict[Place, dict[Call, None]] = {}
        self._names: dict[CodeType, Call | None] = {}
        self._thread = threading.local()

    def __enter__(self) -> Self:
        threading.setprofile(self._note)  # for threads that start in the block
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def take(self, *ways: str) -> dict[str, list[list[str]]]:
        """Return the modules of these ways, stage by stage in the order of their first calls; begin all ways anew.

        A module is listed in the first stage that calls it.

        Raises:
            LookupError: a stage had no call.
        """
        places = [place for place in self._stages if place[0] in ways]
        missing = [f"{place[0]}: {self._stages[place]}" for place in places if place not in self._found]
        if missing:
            raise LookupError("\n".join(["stages without a call; name the functions that do this now:", *missing]))
        found: dict[str, list[list[str]]] = {way: [] for way in ways}
        for way, number in places:
            before = {module for stage in found[way] for module in stage}
            modules = dict.fromkeys(module for module, _ in self._found[way, number])
            found[way].append([module for module in modules if module not in before])
        self._found = {}
        return found

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        running: list[_Running] = self._thread.__dict__.setdefault("running", [])
        if event == "return":
            if running and running[-1].frame is frame:
                ended = running.pop()
                for place in ended.certain:
                    self._found.setdefault(place, {}).update(ended.calls)
        elif (call := self._name(frame.f_code)) is not None:
            self.calls.append(call)
            if call in self._roots:
                running.append(_Running(frame, self._callers(frame), self._roots[call]))
            marked = {place for place in self._marks.get(call, ()) if _has(frame, self._stages[place].of)}
            for root in running:
                root.calls[call] = None
                root.certain |= marked & root.places

    def _name(self, code: CodeType) -> Call | None:
        """Return the name of a function that counts; bodies of modules and classes do not."""
        if code not in self._names:
            module = code.co_filename.removeprefix(self._prefix).removesuffix(".py")
            is_in = code.co_filename.startswith(self._prefix) and module != "testing/swarm"
            self._names[code] = (module, code.co_qualname) if is_in and code.co_flags & inspect.CO_OPTIMIZED else None
        return self._names[code]

    def _callers(self, frame: FrameType) -> dict[Call, None]:
        callers, above = [], frame.f_back
        while above is not None:
            callers.append(self._name(above.f_code))
            above = above.f_back
        return dict.fromkeys(call for call in reversed(callers) if call is not None)


def _has(frame: FrameType, kind: str) -> bool:
    return not kind or any(type(value).__name__ == kind for value in frame.f_locals.values())


class _Loop:
    """A model and the loop that steps it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, swarm: p2p_diloco.Swarm) -> None:
        numbers = torch.rand(16, 8)
        nn.functional.mse_loss(self.model(numbers), numbers.sum(dim=1, keepdim=True)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        swarm.step(tokens=16)
        time.sleep(0.01)


class Recording(NamedTuple):
    """All calls in order, and the modules of each way, stage by stage."""

    calls: list[Call]
    ways: dict[str, list[list[str]]]


def record() -> Recording:
    """Record a second peer that joins the first, and trains with it.

    The joiner's way is what is called until it is ready. The other ways are what is called some entries later.

    Raises:
        LookupError: a stage had no call.
        TimeoutError: the peers have not made enough entries in time.
    """
    warm_up()  # compiles the loops
    recorder = Recorder(Path(p2p_diloco.__file__).parent, WAYS)
    ada, ben, give_up = _Loop(0), _Loop(1), time.monotonic() + PATIENCE_SECONDS
    with recorder, local_swarm() as local:
        first = local.found(ada.model, ada.optimizer)
        recorder.take()
        second = local.join(ben.model, ben.optimizer, wait=False)

        def train_until(is_over: Callable[[], bool]) -> None:
            while not is_over():
                if time.monotonic() > give_up:
                    raise TimeoutError(f"{second.status.entries_absorbed} entries within {PATIENCE_SECONDS:.0f} s")
                ada.step(first)
                ben.step(second)

        train_until(lambda: second.ready and second.status.ready)
        ways = recorder.take("joiner")
        enough = second.status.entries_absorbed + SETTLING_ENTRIES
        train_until(lambda: second.status.entries_absorbed >= enough)
        recorder.take()
        train_until(lambda: second.status.entries_absorbed >= enough + RECORDED_ENTRIES)
        ways |= recorder.take(*(way for way in WAYS if way not in ways))
    return Recording(recorder.calls, {way: ways[way] for way in WAYS})


if __name__ == "__main__":
    json.dump(record().ways, sys.stdout)
