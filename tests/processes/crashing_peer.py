"""A peer that kills or stops itself at a step of a round, in its own process: `python crashing_peer.py ORDER.json`.

Its order names one of `CRASHES`. All peers of a swarm share the folder above their own. Once the file `armed` is there,
the first of them that reaches the step in the crash's role writes its name into the file `crashed`, and fails there. No
shipped code knows of this: functions are replaced from outside, as in simulator/failpoints.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from p2p_diloco.node.node import SwarmNode
from p2p_diloco.node.vector_actions import VectorActions
from p2p_diloco.protocol.actions import ReplaceSpan
from p2p_diloco.protocol.membership.balloting import Balloting
from p2p_diloco.protocol.round.exchange import Exchange
from p2p_diloco.protocol.wire.ballot import Proposal, Vote
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.messages import Opening, SpanReply, SpanVector
from p2p_diloco.storage import checkpoint
from p2p_diloco.storage.run_folder import RunFolder
from tests.swarm.swarm_peer import main

ARMED_FILE, CRASHED_FILE = "armed", "crashed"
Matches = Callable[[SwarmNode, tuple[Any, ...]], bool]


@dataclass(frozen=True, kw_only=True)
class Crash:
    """One cell of the matrix: where a peer fails, and how.

    Attributes:
        names: names of the peers that can have the role.
        owner, name: the class or module that holds the function, and the function's name.
        counts: whether a call, with its arguments, is the step in the role.
        nth: which of these calls of one round it is.
        is_after: whether the peer fails after the call instead of before it.
        is_torn: whether half of the file that the call has written is left.
        kills: whether the peer is killed; otherwise it is stopped.
    """

    names: tuple[str, ...]
    owner: Any
    name: str
    counts: Matches
    nth: int = 1
    is_after: bool = False
    is_torn: bool = False
    kills: bool = True


def sends(*kinds: type) -> Matches:
    return lambda node, arguments: isinstance(arguments[1], kinds)


def is_own_entry(node: SwarmNode, arguments: tuple[Any, ...]) -> bool:
    """Return whether a peer sends an entry of a span that it owns in the round in progress."""
    entry = arguments[1]
    if not isinstance(entry, Entry) or entry.round != node.engine.round:
        return False
    _, grid = node.engine.book.folded(entry.roster, entry.round)
    return grid.owner(entry.span) == node.engine.me.peer


def always(node: SwarmNode, arguments: tuple[Any, ...]) -> bool:
    return True


REDUCERS, DONORS = ("ann", "boot"), ("ann", "bob", "boot")
CRASHES = {
    "contributor killed middle contribute": Crash(
        names=("bob",), owner=SwarmNode, name="_post", counts=sends(Opening, SpanVector), nth=2
    ),
    "contributor stopped before vote": Crash(
        names=("bob",), owner=SwarmNode, name="_post", counts=sends(Vote), kills=False
    ),
    "owner killed before finish": Crash(names=("ann",), owner=Exchange, name="span_reduced", counts=always),
    "owner killed middle hand down": Crash(names=("ann",), owner=SwarmNode, name="_post", counts=is_own_entry, nth=2),
    "owner stopped before hand down": Crash(
        names=("ann",), owner=SwarmNode, name="_post", counts=is_own_entry, kills=False
    ),
    "owner killed middle checkpoint": Crash(
        names=("ann",), owner=checkpoint, name="write_tensors", counts=always, is_torn=True
    ),
    "leader killed middle vote": Crash(names=REDUCERS, owner=SwarmNode, name="_post", counts=sends(Proposal), nth=2),
    "leader stopped before roster": Crash(names=REDUCERS, owner=Balloting, name="spread", counts=always, kills=False),
    "joiner killed after transfer": Crash(
        names=("cleo",),
        owner=VectorActions,
        name="play",
        counts=lambda node, arguments: isinstance(arguments[0], ReplaceSpan),
        is_after=True,
    ),
    "donor killed before transfer": Crash(names=DONORS, owner=SwarmNode, name="_post", counts=sends(SpanReply)),
    "bootstrap killed middle hand down": Crash(
        names=("boot",), owner=SwarmNode, name="_post", counts=is_own_entry, nth=2
    ),
    "bootstrap stopped before promise": Crash(
        names=("boot",), owner=RunFolder, name="keep_ballots", counts=always, kills=False
    ),
}


def install(crash: Crash, name: str, shared: Path) -> None:
    """Replace the function of a crash by one that fails there, once."""
    nodes: list[SwarmNode] = []
    counted = {"round": -1, "calls": 0}
    begin, right = SwarmNode.__init__, getattr(crash.owner, crash.name)

    def noted(node: SwarmNode, **arguments: Any) -> None:
        begin(node, **arguments)
        nodes.append(node)

    def is_it(arguments: tuple[Any, ...]) -> bool:
        if not nodes or not (shared / ARMED_FILE).exists() or not crash.counts(nodes[0], arguments):
            return False
        if counted["round"] != nodes[0].engine.round:
            counted.update(round=nodes[0].engine.round, calls=0)
        counted["calls"] += 1
        return counted["calls"] == crash.nth

    def fail() -> None:
        try:
            descriptor = os.open(shared / CRASHED_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return  # another peer was first
        os.write(descriptor, name.encode())
        os.close(descriptor)
        os.kill(os.getpid(), signal.SIGKILL if crash.kills else signal.SIGSTOP)

    def call(*arguments: Any, **more: Any) -> Any:
        seen = arguments[1:] if isinstance(crash.owner, type) else arguments
        if not is_it(seen):
            return right(*arguments, **more)
        if not crash.is_after and not crash.is_torn:
            fail()
        result = right(*arguments, **more)
        if crash.is_torn:
            os.truncate(seen[0], os.path.getsize(seen[0]) // 2)
        if crash.is_after or crash.is_torn:
            fail()
        return result

    SwarmNode.__init__ = noted  # type: ignore[assignment, method-assign]
    setattr(crash.owner, crash.name, call)


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    order = json.loads(Path(sys.argv[1]).read_text())
    folder, crash = Path(order["folder"]), CRASHES[order["crash"]]
    if folder.name in crash.names:
        install(crash, folder.name, folder.parent)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(order))
