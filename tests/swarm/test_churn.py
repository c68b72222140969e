"""Peers come and go constantly: real processes, started and killed every twelve seconds; the bootstrap peer dies too.

`make churn` runs ten minutes. CHURN_SECONDS and CHURN_SEED set another length and another seed.
"""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass, field

import pytest

from p2p_diloco.config.invite import MOST_NAMED, parse_invite
from p2p_diloco.ids import parse_peer_id, short_peer_id
from tests.swarm.process_swarm import PeerProcess, ProcessSwarm

SECONDS = float(os.environ.get("CHURN_SECONDS", "600"))
SEED = int(os.environ.get("CHURN_SEED", "1"))
ROUND_SECONDS = 1.5
STEP_SECONDS = 12.0
BOOTSTRAP_DIES_AT = 90.0
READY_WITHIN_SECONDS = 60.0
LEAST, MOST = 2, 5
START_SHARE, RESTART_SHARE = 0.6, 0.5
GAP_SECONDS, GAP_WITHOUT_MAJORITY_SECONDS = 25.0, 45.0
AGREE_SECONDS = 60.0
ROSTER = re.compile(r"roster (?P<number>\d+): (?P<size>\d+) members?(?: \((?P<changes>[^)]+)\))?")

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(SECONDS + 900)]


@dataclass
class Life:
    """One start of one peer; times in Unix seconds."""

    name: str
    started: float
    ready: float | None = None
    ended: float | None = None


@dataclass
class Churn:
    """Chooses the next event at random, and records the events."""

    swarm: ProcessSwarm
    draw: random.Random
    lives: list[Life] = field(default_factory=list)
    begin: float = field(default_factory=time.time)

    def living(self) -> list[Life]:
        return [life for life in self.lives if life.ended is None]

    def dead(self) -> list[str]:
        living = {life.name for life in self.living()}
        return sorted({life.name for life in self.lives} - living)

    def start(self, name: str, invite: str | None = None) -> None:
        self.swarm.start(name, invite=invite)
        self.lives.append(Life(name=name, started=time.time()))
        self.say(f"{name} starts")

    def kill(self, life: Life) -> None:
        life.ended = self.swarm.kill(life.name)
        self.say(f"{life.name} is killed")

    def say(self, text: str) -> None:
        print(f"{time.time() - self.begin:6.1f} s  {text}")

    def look(self) -> None:
        """Record which peers have become ready; a peer that ended by itself fails the test."""
        for life in self.living():
            process = self.swarm.peers[life.name].process
            assert process is not None
            assert process.poll() is None, f"{life.name} ended with {process.poll()}\n{self.swarm.story()}"
            status = self.swarm.peers[life.name].status
            if life.ready is None and status.ready and status.pid == process.pid:
                life.ready = time.time()
                self.say(f"{life.name} is ready after {life.ready - life.started:.1f} s")

    def step(self) -> None:
        """Start or kill a peer, but never the only one that is ready: nobody could restore a run without it."""
        living = self.living()
        ready = [life for life in living if life.ready is not None]
        starts = len(living) <= LEAST or (len(living) < MOST and self.draw.random() < START_SHARE)
        if not starts:
            self.kill(self.draw.choice([life for life in living if len(ready) > 1 or life not in ready]))
        elif (dead := self.dead()) and self.draw.random() < RESTART_SHARE:
            self.start(self.draw.choice(dead))  # with the founder's first invite, which names only the bootstrap peer
        elif ready:
            invite = self.swarm.peers[self.draw.choice(ready).name].status.invite
            self.start(f"p{len({life.name for life in self.lives})}", invite)

    def watch_until(self, at: float) -> None:
        while time.time() < at:
            self.look()
            time.sleep(0.25)

    def late(self) -> list[Life]:
        """Return the lives that were long enough but did not become ready in time."""
        return [
            life
            for life in self.lives
            if (life.ended or time.time()) - life.started > READY_WITHIN_SECONDS
            and (life.ready is None or life.ready - life.started > READY_WITHIN_SECONDS)
        ]

    def first_ready(self) -> float:
        return min((life.ready for life in self.lives if life.ready is not None), default=self.begin)

    def gaps(self, begin: float, end: float) -> list[tuple[float, float, int, int]]:
        """Return pauses between two rounds with entries: length, time, trainers on the roster, how many lived.

        The roster is the newest one that any peer had when the pause began.
        """
        peers = self.swarm.peers.values()
        rounds = {closed.round for peer in peers for closed in peer.rounds() if closed.num_entries}
        statuses = {name: peer.status for name, peer in self.swarm.peers.items()}
        # One that was killed while it started has none.
        names = {short_peer_id(parse_peer_id(status.peer)): name for name, status in statuses.items() if status.peer}
        rosters = [
            roster
            for name, peer in self.swarm.peers.items()
            for roster in rosters_of(peer, {**names, "this peer": name})
        ]
        found, before = [], begin
        for number in sorted(rounds):
            at = self.swarm.begin(number + 1)
            if begin <= at <= end:
                _, members = max(
                    (roster[1:] for roster in rosters if roster[0] <= before), key=lambda roster: roster[0]
                )
                lived = sum(
                    life.name in members - {"boot"} and life.started <= before and (life.ended or end) >= at
                    for life in self.lives
                )
                found.append((at - before, before - self.begin, len(members - {"boot"}), lived))
                before = at
        return sorted(found, reverse=True)


def rosters_of(peer: PeerProcess, names: dict[str, str]) -> list[tuple[float, int, frozenset[str]]]:
    """Return when a peer adopted each roster, with its number and members.

    The first event names all members, later ones only the changes, with the reason why each member is gone.
    """
    found: list[tuple[float, int, frozenset[str]]] = []
    members: frozenset[str] = frozenset()
    for event in peer.events("roster"):
        match = ROSTER.search(event.text)
        if match is None:
            continue
        changes = (match["changes"] or "").split("; ") if match["changes"] else []
        kind = ""
        for change in changes:
            first, _, listed = change.rpartition(": ")
            kind = first or kind  # further members that are gone follow after a semicolon
            changed = {names[word] for word in listed.split(", ") if word in names}
            members = {"new": members | changed, "gone": members - changed}.get(kind, frozenset(changed))
        assert len(members) == int(match["size"]), event.text
        found.append((event.time, int(match["number"]), members))
    return found


def test_a_peer_that_lives_a_minute_becomes_ready_although_peers_and_their_bootstrap_peer_die() -> None:
    with ProcessSwarm(round_seconds=ROUND_SECONDS, patience_seconds=180.0) as swarm:
        churn = Churn(swarm, random.Random(SEED))
        swarm.start("boot", founds=True, trains=False)
        for number in range(LEAST):
            churn.start(f"p{number}")
        churn.watch_until(churn.begin + 2 * STEP_SECONDS)
        end = churn.begin + SECONDS
        while (now := time.time()) < end:
            if now - churn.begin >= BOOTSTRAP_DIES_AT and swarm.peers["boot"].family():
                swarm.kill("boot")
                churn.say("boot is killed")
            churn.step()
            churn.watch_until(now + STEP_SECONDS)

        while not all(life.ready for life in churn.living()) and time.time() < end + READY_WITHIN_SECONDS:
            churn.watch_until(time.time() + 1.0)
        names = [life.name for life in churn.living()]
        print_figures(churn, end)
        assert not churn.late(), f"{[life.name for life in churn.late()]} were not ready in time\n{swarm.story()}"
        paused = [gap for gap in churn.gaps(churn.first_ready(), end) if too_long(gap)]
        assert not paused, f"no entries for too long: {paused}\n{swarm.story()}"
        for name in names:
            assert len(parse_invite(swarm.peers[name].status.invite).bootstraps) <= MOST_NAMED
        last_round = swarm.round_at(time.time() + AGREE_SECONDS)
        digests = swarm.end_all_after(last_round)
        assert set(digests) == set(names)
        assert len(set(digests.values())) == 1, f"{digests}\n{swarm.story()}"
        print(f"{len(names)} peers ended with the same bytes, {next(iter(digests.values()))[:16]}")


def print_figures(churn: Churn, end: float) -> None:
    """Print the results of the run."""
    waits = sorted(life.ready - life.started for life in churn.lives if life.ready is not None)
    names = {life.name for life in churn.lives}
    num_kills = sum(life.ended is not None for life in churn.lives)
    print(f"\nseed {SEED}: {len(churn.lives)} starts of {len(names)} peers, {num_kills} kills")
    if waits:
        middle = waits[len(waits) // 2]
        print(f"ready after {waits[0]:.1f} s at least, {middle:.1f} s in the middle, {waits[-1]:.1f} s at most")
    print("longest pauses between two rounds with entries (length, when, members of the roster, of them alive):")
    for length, at, members, lived in churn.gaps(churn.first_ready(), end)[:8]:
        print(f"  {length:5.1f} s at {at:6.1f} s, {members} members, {lived} alive")


def too_long(gap: tuple[float, float, int, int]) -> bool:
    """Return whether a pause was longer than allowed, with or without a majority alive."""
    length, _, members, lived = gap
    return length > (GAP_SECONDS if 2 * lived > members else GAP_WITHOUT_MAJORITY_SECONDS)
