"""A swarm in one heap of virtual time: the real `PeerEngine`s, fake vectors, links that break, machines that fail.

Everything follows from the seed. The driver checks invariants at every moment: entries reach an island in parent order,
and equal chain digests mean equal bytes (I1, I3); no contribution is counted twice (I2); at most one child of a roster
is certified by a majority (I8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fake_run import (
    ALL_SPANS,
    Disk,
    Machine,
    found_run,
    genesis_bytes,
    genesis_heads,
    peer_id,
    sign_as,
    verify,
)
from stage import Stage

from p2p_diloco.protocol.engine import PeerEngine, SavedState
from p2p_diloco.protocol.membership.local import LocalPeer


class Swarm(Stage):
    """All machines: start, kill, suspend and partition them, and check claims about them."""

    def run_until(self, claim: Callable[[], bool], within: float, step: float = 0.5) -> float:
        begin = self.now
        while not claim():
            assert self.now - begin <= within, f"not within {within} s; {self.describe()}"
            self.run(step)
        return self.now - begin

    # -- machines

    def add(
        self, name: str, *, dialable: bool = True, trains: bool = True, offset: float = 0.0, found: bool = False
    ) -> Machine:
        machine = Machine(name=name, peer=peer_id(name), dialable=dialable, trains=trains, offset=offset)
        self.machines[name] = machine
        self.by_id[machine.peer] = machine
        self.start(name, found=found)
        return machine

    def start(self, name: str, *, found: bool = False, keep_disk: bool = True) -> Machine:
        machine = self.machines[name]
        assert machine.engine is None
        incarnation = machine.disk.incarnation + 1
        if not keep_disk:
            machine.disk = Disk()
        machine.disk.incarnation = incarnation
        me = LocalPeer(
            peer=machine.peer,
            incarnation=incarnation,
            can_be_dialled=machine.dialable,
            trains=machine.trains,
            sign=lambda statement: sign_as(machine.peer, statement),
        )
        machine.vectors = machine.disk.replayed()
        heads = {span: head for span, (head, _) in machine.vectors.items()}
        recalled = SavedState(
            rosters=tuple(machine.disk.rosters),
            ballots=machine.disk.ballots,
            heads=heads or None,
            activity=machine.disk.activity,
        )
        machine.engine = PeerEngine(me=me, rules=self.rules, verify=verify, recalled=recalled)
        machine.life += 1
        machine.paused = False
        machine.backlog.clear()
        if found:
            founding = found_run(machine.peer, incarnation, trains=machine.trains)
            heads = genesis_heads(founding.roster)
            machine.vectors = {span: (head, genesis_bytes(span)) for span, head in heads.items()}
            machine.engine.hold_state(heads)
            self.perform(machine, machine.engine.found(founding, self._local(machine)))
        self._tick(machine)
        self._checkpoint_later(machine)
        return machine

    def kill(self, name: str) -> None:
        machine = self.machines[name]
        machine.engine = None
        machine.life += 1
        for link in [link for link in self.links if name in link]:
            self._cut(link)

    def pause(self, name: str) -> None:
        self.machines[name].paused = True

    def resume(self, name: str) -> None:
        machine = self.machines[name]
        machine.paused = False
        backlog, machine.backlog = machine.backlog, []
        for event in backlog:
            event()
        self._tick(machine)

    def leave(self, name: str) -> None:
        machine = self.machines[name]
        self.perform(machine, machine.rules_engine.leave(self._local(machine)))

    def partition(self, *islands: Iterable[str]) -> None:
        self.islands = {name: place for place, names in enumerate(islands) for name in names}
        for link in [link for link in self.links if not self._reachable(*sorted(link))]:
            self._cut(link)

    def heal(self) -> None:
        self.islands = {}

    def running(self, *, trains: bool = True) -> list[Machine]:
        return [m for m in self.machines.values() if m.engine is not None and (m.trains or not trains)]

    # -- claims

    def agreed(self, names: Iterable[str] | None = None) -> bool:
        """Return whether these machines hold the same bytes of every span at the same heads."""
        machines = [self.machines[name] for name in names] if names is not None else self.running()
        first = machines[0].vectors
        return len(first) == len(ALL_SPANS) and all(machine.vectors == first for machine in machines)

    def members(self, name: str) -> set[str]:
        return {self.by_id[peer].name for peer in self.machines[name].roster.peers()}

    def all_members(self) -> bool:
        """Return whether each roster in force lists exactly the trainers, at their incarnations."""
        running = self.running()
        wanted = {(m.peer, m.rules_engine.me.incarnation) for m in running}
        return all(
            m.rules_engine.book.in_force is not None
            and {(x.peer, x.incarnation) for x in m.roster.members if x.trains} == wanted
            for m in running
        )

    def height(self, name: str) -> int:
        return sum(head.height for head, _ in self.machines[name].vectors.values())

    def describe(self) -> str:
        lines = [f"t={self.now:.1f} round {self.rules.clock.round_at(self.now)}"]
        for machine in self.machines.values():
            engine = machine.engine
            if engine is None:
                lines.append(f"  {machine.name}: not running")
                continue
            roster = engine.book.in_force
            names = sorted(self.by_id[m.peer].name for m in roster.members) if roster is not None else []
            k = roster.k if roster is not None else None
            lines.append(
                f"  {machine.name}: k={k} {names} ready={engine.ready} height={self.height(machine.name)} "
                f"void={engine.membership.stall.cycles_without_entries} stalled={engine.membership.stall.continues()} "
                f"last={[f'{t:.0f} {r.topic}: {r.text}' for t, r in machine.reports[-4:]]}"
            )
        return "\n".join(lines)
