"""Variants of the attacks of test_hostility.py: `pytest -s -m long tests/processes/test_variants.py -k "…"`.

One identity on two machines at once, a newcomer that joins meanwhile, one or two honest trainers, and attacked peers
that are killed and started again, during the attack and after it.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from dataclasses import dataclass, replace

import psutil
import pytest

from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.ids import format_peer_id
from p2p_diloco.storage.identity import load_or_create_identity
from tests.processes.test_hostility import (
    ATTACK_SECONDS,
    FEW_FILES,
    HONEST,
    LIAR,
    MOST_DAEMON_GROWTH_BYTES,
    PLACE_SECONDS,
    Lie,
    Strangers,
    attacked_by,
    check_honest,
    keep_figures,
    last_words,
    lies_of,
    note_state,
    short_id,
    texts,
)
from tests.swarm.process_swarm import FRAGMENTS, ProcessSwarm

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

NEWCOMER, COPY = "late", "copy"
STARTS = ("manifest", "trust", "training", "catch-up", "clock", "continued", "restart", "trouble")
"""Topics of lines of a peer that starts."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An attack, and what is different from its scene.

    Attributes:
        honest: number of honest trainers.
        joins: whether a newcomer joins, whose address the attackers know before it starts.
        restarts: whether the bootstrap peer and a trainer are killed and started again, during the attack and after.
    """

    attack: Strangers | Lie
    honest: int = len(HONEST)
    is_twice: bool = False
    joins: bool = False
    restarts: bool = False

    def __str__(self) -> str:
        words = {"twice": self.is_twice, "join": self.joins, "restart": self.restarts}
        return "-".join([str(self.attack), f"n{self.honest}", *(word for word, is_so in words.items() if is_so)])

    @property
    def names(self) -> tuple[str, ...]:
        return HONEST[: self.honest]


def founded(swarm: ProcessSwarm, names: tuple[str, ...], lie: str | None = None) -> None:
    swarm.start("bootstrap", founds=True, trains=False)
    for name in names:
        swarm.start(name)
    trainers = names
    if lie is not None:
        swarm.start(LIAR, lie=lie)
        trainers = (*names, LIAR)
    swarm.wait_for_whole_round(trainers, len(trainers), time.time())


def newcomers_address(swarm: ProcessSwarm) -> tuple[int, str]:
    """Create the newcomer's identity; return a port for it, and its address there."""
    folder = swarm.text.parent / NEWCOMER
    folder.mkdir()
    key = load_or_create_identity(PeerSettings(state_directory=folder).identity_file)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    return port, f"/ip4/127.0.0.1/tcp/{port}/p2p/{format_peer_id(key.peer)}"


def join(swarm: ProcessSwarm, num_trainers: int, port: int = 0) -> None:
    """Start the newcomer; print after how many seconds it is ready, and in entries.

    Most of the time until it is ready it loads PyTorch.
    """
    began = time.time()
    swarm.start(NEWCOMER, port=port)
    swarm.wait("a ready newcomer", lambda: swarm.peers[NEWCOMER].status.ready)
    ready = time.time() - began

    def is_in_entries() -> bool:
        closed = swarm.peers[NEWCOMER].rounds(began)
        return any(each.num_included >= each.num_entries * num_trainers > 0 for each in closed)

    swarm.wait("a newcomer in entries", is_in_entries)
    print(f"\n  the newcomer was ready after {ready:.1f} s and in entries after {time.time() - began:.1f} s")
    keep_figures(join_ready=round(ready, 1), join_in_entries=round(time.time() - began, 1))


def restart(swarm: ProcessSwarm, names: tuple[str, ...], when: str) -> None:
    """Kill the bootstrap peer and the first trainer and start them again; print how many seconds that took."""
    for name in ("bootstrap", names[0]):
        swarm.kill(name)
    began = time.time()
    for name in ("bootstrap", names[0]):
        swarm.start(name, trains=name != "bootstrap")
    swarm.wait("a restarted trainer", lambda: swarm.peers[names[0]].events("ready", since=began))
    ready = time.time() - began

    def is_in_entries() -> bool:
        closed = swarm.peers[names[0]].rounds(began)
        return any(each.num_included >= each.num_spans * len(names) for each in closed)

    swarm.wait("a restarted trainer in entries", is_in_entries)
    seconds = [round(ready, 1), round(time.time() - began, 1)]
    print(f"\n  {when} the attack the restarted trainer was ready, and all in entries, after {seconds} s")
    keep_figures(**{f"restart_{when}": seconds})


def few_files(swarm: ProcessSwarm) -> None:
    for peer in swarm.peers.values():
        if peer.process is not None and peer.process.poll() is None:
            psutil.Process(peer.process.pid).rlimit(psutil.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))


VARIANTS = [
    # The control: a join and a restart without an attack to speak of.
    Variant(attack=Strangers("only-links"), joins=True),
    Variant(attack=Strangers("only-links"), restarts=True),
    Variant(attack=Strangers("only-links"), honest=1, restarts=True),
    Variant(attack=Strangers("silent-streams", passes_by=True), is_twice=True),
    Variant(attack=Strangers("silent-streams", passes_by=True), joins=True),
    Variant(attack=Strangers("silent-streams", passes_by=True), honest=1, restarts=True),
    Variant(attack=Strangers("directory-records", passes_by=True, identities=8), joins=True),
    Variant(attack=Strangers("directory-records", passes_by=True), honest=1, is_twice=True, restarts=True),
    Variant(attack=Strangers("unfinished-frames"), is_twice=True),
    Variant(attack=Strangers("cheap-frames"), is_twice=True),
    Variant(attack=Strangers("cheap-frames", identities=2), joins=True),
    Variant(attack=Strangers("later-incarnations", identities=8), joins=True),
    Variant(attack=Strangers("invented-rosters"), joins=True),
    Variant(attack=Strangers("invented-rosters"), honest=1, restarts=True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_strangers(variant: Variant) -> None:
    strangers, names = variant.attack, variant.names
    assert isinstance(strangers, Strangers)
    with ProcessSwarm(patience_seconds=80.0) as swarm, contextlib.ExitStack() as exits:
        founded(swarm, names)
        before = note_state(swarm, names)
        if strangers.passes_by:
            few_files(swarm)
        attacked = ("bootstrap", *names) if strangers.passes_by or variant.restarts else names
        exits.enter_context(attacked_by(swarm, strangers, attacked, is_twice=variant.is_twice))
        if variant.joins:
            port, address = newcomers_address(swarm)
            late = replace(strangers, passes_by=True)
            exits.enter_context(attacked_by(swarm, late, addresses=(address,), is_twice=variant.is_twice))
            join(swarm, len(names) + 1, port)
            names = (*names, NEWCOMER)
            before.losses[NEWCOMER] = 99.0
        time.sleep(ATTACK_SECONDS / 2)
        if variant.restarts:
            before = replace(before, at=time.time())  # a new process has a new budget of lines
            restart(swarm, names, "during")
        time.sleep(ATTACK_SECONDS / 2)
        words = last_words(swarm.text.parent / "stranger.log")
        print("\n  attackers:", {name: said["sent"] for name, said in list(words.items())[:4]})
        exits.close()
        if variant.restarts:
            restart(swarm, names, "after")
        check_honest(swarm, before, list(words), names, most_daemon_growth=MOST_DAEMON_GROWTH_BYTES, expected=STARTS)


LYING = [
    Variant(attack=Lie("self-voted-past", place="is_member"), honest=1, restarts=True),
    Variant(attack=Lie("self-voted-past", place="is_member"), honest=2, restarts=True),
    Variant(attack=Lie("self-voted-past", place="is_member"), joins=True),
    Variant(attack=Lie("self-voted-past", place="is_member"), is_twice=True),
    Variant(attack=Lie("opposite-entries", place="reduces"), honest=1, joins=True),
]


@pytest.mark.parametrize("variant", LYING, ids=str)
def test_members(variant: Variant) -> None:
    lie, names = variant.attack, variant.names
    assert isinstance(lie, Lie)
    with ProcessSwarm(patience_seconds=80.0) as swarm:
        founded(swarm, names, lie.name)
        liars = [LIAR]
        if variant.is_twice:
            swarm.kill(LIAR)
            shutil.copytree(swarm.peers[LIAR].folder, swarm.text.parent / COPY)
            liars = [LIAR, COPY]
            for name in liars:
                swarm.start(name, lie=lie.name)
        swarm.wait(f"a liar that {lie.place}", lambda: lies_of(swarm).get(lie.place), PLACE_SECONDS)
        swarm.sleep_rounds(FRAGMENTS)
        liar, before = short_id(swarm.peers[LIAR]), note_state(swarm, names)
        for name in liars:
            (swarm.peers[name].folder / "lie").touch()
        swarm.wait("the first lie", lambda: lies_of(swarm)["told"], PLACE_SECONDS)
        if variant.joins:
            join(swarm, len(names) + 2)
            names = (*names, NEWCOMER)
            before.losses[NEWCOMER] = 99.0
        time.sleep(ATTACK_SECONDS / 2)
        if variant.restarts:
            restart_under_liar(swarm, names)
        time.sleep(ATTACK_SECONDS / 2)
        told = lies_of(swarm)["told"]
        for name in liars:
            swarm.kill(name)
        lines = {name: [text for text in texts(swarm, name, before.at) if liar in text][:2] for name in names}
        print(f"\n  {liar} told {told}; lines {lines}")
        if variant.restarts:
            swarm.sleep_rounds(3 * FRAGMENTS)  # until the liar is dropped
            restart(swarm, names, "after")
        check_honest(swarm, before, [liar], names, expected=("identity", *STARTS))


def restart_under_liar(swarm: ProcessSwarm, names: tuple[str, ...]) -> None:
    began = swarm.kill(names[0])
    swarm.start(names[0])
    swarm.wait("a restarted trainer", lambda: swarm.peers[names[0]].events("ready", since=began))
    print(f"\n  {names[0]} was ready {time.time() - began:.1f} s after it was killed")
    keep_figures(restart_during=round(time.time() - began, 1))


@pytest.mark.parametrize(("honest", "restarts"), [(1, False), (2, False), (2, True), (3, True)])
def test_signs_alone_while_others_sleep(honest: int, restarts: bool) -> None:
    """The honest trainers are frozen for longer than a stall takes; then they wake up, or are killed and started."""
    names = HONEST[:honest]
    with ProcessSwarm(patience_seconds=80.0) as swarm:
        founded(swarm, names, "self-voted")
        swarm.wait("a liar that counts", lambda: lies_of(swarm).get("counts"), PLACE_SECONDS)
        swarm.sleep_rounds(2 * FRAGMENTS)
        liar, before = short_id(swarm.peers[LIAR]), note_state(swarm, names)
        for name in names:
            swarm.freeze(name)
        (swarm.peers[LIAR].folder / "lie").touch()
        began = time.monotonic()
        while not lies_of(swarm)["told"] and time.monotonic() < began + 45.0:
            time.sleep(0.1)
        print(f"\n  {liar} told after {time.monotonic() - began:.1f} s")
        swarm.sleep_rounds(2 * FRAGMENTS)
        woken = time.time()
        for name in names:
            swarm.wake(name)
            if restarts:
                swarm.kill(name)
                swarm.start(name)
        swarm.wait("rounds", lambda: all(swarm.peers[name].events("round", since=woken + 5.0) for name in names))
        swarm.wait("ready trainers", lambda: all(swarm.peers[name].status.ready for name in names))
        print(f"  ready after {time.time() - woken:.1f} s")
        swarm.sleep_rounds(6 * FRAGMENTS)
        told = lies_of(swarm)["told"]
        swarm.kill(LIAR)
        swarm.sleep_rounds(4 * FRAGMENTS)
        print(f"  told {told}")
        check_honest(swarm, before, [liar], names, expected=(*STARTS, "branch", "trouble", "adoption", "split"))
