"""The heap of virtual time: what happens when, to which machine, in which of its lives.

A machine that is paused gets what happened meanwhile when it goes on; one that was killed never does.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from p2p_diloco.errors import StateError
from p2p_diloco.lab.machine import Machine
from p2p_diloco.lab.network import Network, Pair, pair_of
from p2p_diloco.lab.trace import Trace
from p2p_diloco.protocol.routes import FEW_LINKS

TOLD_SECONDS = (0.2, 3.0)
"""How long an end of a broken link takes to hear of it."""
DIAL_SECONDS = (0.1, 2.0)

Happening = Callable[..., None]


class Violated(Exception):
    """A promise of the protocol is broken.

    Attributes:
        invariant: its name in `protocol.md`, section 7.
        machine: the peer concerned, or empty.
    """

    def __init__(self, invariant: str, text: str, machine: str = "") -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.machine = machine


class Stage:
    """One clock, one heap, one network, and the machines on it.

    Args:
        seed: everything that is drawn follows from it.
        start: virtual seconds at which it begins; round 0 begins at 0.
    """

    def __init__(self, seed: int, *, start: float, trace: Trace | None = None) -> None:
        self.now = start
        self.rng = random.Random(seed)
        self.network = Network(self.rng)
        self.machines: dict[str, Machine] = {}
        self.by_peer: dict[bytes, Machine] = {}
        self.num_events = 0
        self.trace = trace
        self._heap: list[tuple[float, int, Happening, tuple[Any, ...]]] = []
        self._sequence = 0

    # -- time

    def at(self, time: float, happening: Happening, *arguments: Any) -> None:
        """Let something happen at a moment, whatever becomes of any machine."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, happening, arguments))

    def later(self, machine: Machine, seconds: float, happening: Happening, *arguments: Any) -> None:
        """Let something happen at a machine if it still lives this life then; when paused, once it goes on."""
        self.at(self.now + seconds, self._happen, machine, machine.life, happening, arguments)

    def _happen(self, machine: Machine, life: int, happening: Happening, arguments: tuple[Any, ...]) -> None:
        if machine.life != life:
            return
        if machine.paused:
            machine.backlog.append((happening, arguments))
            return
        self.act(machine, happening, *arguments)

    def act(self, machine: Machine, happening: Happening, *arguments: Any) -> None:
        """Let a machine do something; its process ends when its disk refuses, and nothing else may make it fail."""
        try:
            happening(*arguments)
        except Exception as error:
            self.failed(machine, error)

    def failed(self, machine: Machine, error: Exception) -> None:
        """End a process whose disk is full.

        Raises:
            Violated: it is `error`, or the process failed for any other reason.
        """
        if isinstance(error, Violated):
            raise error
        if not (isinstance(error, StateError) and machine.disk.is_full):
            raise Violated("I9", f"{machine} crashed: {error!r}", machine.name) from error
        self.note(machine, "ends", "its disk is full")
        self.end(machine)

    def run_to(self, time: float) -> None:
        """Let everything happen up to a moment.

        Raises:
            Violated: a promise is broken.
        """
        heap = self._heap
        while heap and heap[0][0] <= time:
            self.now, _, happening, arguments = heapq.heappop(heap)
            self.num_events += 1
            happening(*arguments)
        self.now = time

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        self.run_to(self.now + seconds)

    def note(self, machine: Machine | None, word: str, text: str) -> None:
        """Write a line into the trace, when there is one."""
        if self.trace is not None:
            self.trace.add(self.now, machine.name if machine is not None else "", word, text)

    def end(self, machine: Machine) -> None:
        """End a machine's process; overridden by the swarm."""
        raise NotImplementedError

    # -- links

    def meet(self, machine: Machine) -> None:
        """Let a machine look for links to all others, each after a while; to those it needs, if it knows them."""
        self.look_around(machine)

    def look_around(self, machine: Machine, *, to_anybody: bool = False) -> None:
        """Let a machine work out anew whom it needs a link to; dial those, hang up on whom neither end needs."""
        announced = [other.peer for other in self.machines.values() if other.runs]
        machine.wanted = None if to_anybody else machine.running.wanted_links(announced)
        for pair in self.network.links_of(machine):
            other = self.machines[next(name for name in pair if name != machine.name)]
            is_needed = machine.wants(other) or other.wants(machine)
            if self.network.links[pair].is_up and not is_needed and len(machine.links) > FEW_LINKS:
                self.cut(pair)
        for other in self.machines.values():
            is_lacking = other is not machine and other.peer not in machine.links and machine.wants(other)
            if is_lacking and (machine.dialable or other.dialable):
                self.at(self.now + self.rng.uniform(*DIAL_SECONDS), self._dial, pair_of(machine, other))

    def _dial(self, pair: Pair) -> None:
        a, b = (self.machines[name] for name in pair)
        if not self.network.can_meet(a, b) or not (a.wants(b) or b.wants(a)):
            return  # whoever comes back looks for links again
        if pair in self.network.links:
            if not self.network.links[pair].is_up:
                self.at(self.now + 1.0, self._dial, pair)
            return
        self.network.connect(a, b)
        for here, there in ((a, b), (b, a)):
            self.note(here, "link up", there.name)
            here.running.link_up(there.peer)
            self.hasten(here)

    def hasten(self, machine: Machine) -> None:
        """Have a machine tick at once; overridden by the swarm."""
        raise NotImplementedError

    def cut(self, pair: Pair) -> None:
        """Break a link; both ends hear of it a little later, unless they are dead."""
        link = self.network.break_link(pair)
        if link is None:
            return
        for half in link.halves:
            machine = half.sender
            if machine.runs:
                seconds = self.rng.uniform(*TOLD_SECONDS)
                self.later(machine, seconds, self._hear_of_cut, machine, half.target, pair)
            else:
                self._told(pair, machine)

    def _hear_of_cut(self, machine: Machine, lost: Machine, pair: Pair) -> None:
        self.note(machine, "link lost", lost.name)
        machine.running.link_lost(lost.peer)
        self._told(pair, machine)

    def _told(self, pair: Pair, machine: Machine) -> None:
        if self.network.told(pair, machine.name):
            self.at(self.now + self.rng.uniform(*DIAL_SECONDS), self._dial, pair)

    def forget_links(self, machine: Machine) -> None:
        """Break all links of a machine that has just died; it hears of none of them."""
        for pair in self.network.links_of(machine):
            if self.network.links[pair].is_up:
                self.cut(pair)
            else:
                self._told(pair, machine)
