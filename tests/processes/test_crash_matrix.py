"""Twelve cells of the crash matrix on real processes: a peer is killed or stopped exactly at a step of a round.

The simulator plays all cells (tests/simulator/test_crashes.py). `make crash-matrix` plays these ten times in a row and
prints how soon the others and the failed peer were back.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.processes.crashing_peer import CRASHES
from tests.processes.test_losses import three
from tests.swarm.process_swarm import FRAGMENTS, ProcessSwarm
from tests.swarm.test_faults import end_together

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

REPEATS = int(os.environ.get("P2P_DILOCO_CRASH_REPEATS", "1"))
ROUND_SECONDS = 1.5
PATIENCE_SECONDS = 180.0
DOWN_ROUNDS = 4
MOST_CYCLES_WITHOUT = 6
"""As in simulator/liveness.py."""
FROZEN_ROUNDS = (MOST_CYCLES_WITHOUT + 1) * FRAGMENTS
REACHED_SECONDS = 180.0
"""The newcomer is listed, comes to count, and then may average; checkpoints are written every minute."""


def most_rounds_without(swarm: ProcessSwarm, name: str, begin: float, end: float) -> int:
    """Return the most rounds in a row between two moments that got no entry at a peer."""
    most = row = 0
    for closed in swarm.rounds_between(name, begin, end):
        row = 0 if closed.num_entries else row + 1
        most = max(most, row)
    return most


@pytest.mark.parametrize("turn", range(REPEATS))
@pytest.mark.parametrize("cell", CRASHES)
def test_others_go_on_and_the_failed_peer_returns(cell: str, turn: int) -> None:
    crash = CRASHES[cell]
    with ProcessSwarm(round_seconds=ROUND_SECONDS, patience_seconds=PATIENCE_SECONDS) as swarm:
        three(swarm, crash=cell, dial_out_only=("bob",))
        swarm.arm()
        swarm.start("cleo", crash=cell)
        swarm.wait(f"a {cell}", lambda: swarm.crashed(), REACHED_SECONDS)
        failed, failed_at = swarm.crashed(), time.time()
        assert failed in crash.names
        if crash.kills:
            swarm.wait("its end", lambda: not swarm.peers[failed].family())
        swarm.sleep_rounds(DOWN_ROUNDS if crash.kills else FROZEN_ROUNDS)
        back = time.time()
        others = [name for name in ("ann", "bob", "cleo") if name != failed]
        if crash.kills:
            founds = failed == "boot"
            swarm.start(failed, founds=founds, trains=not founds, dial_out_only=failed == "bob")
        else:
            swarm.wake(failed)
        swarm.wait_for_whole_round(["ann", "bob", "cleo"], 3, since=back, lasting=True)
        whole = time.time()
        # A bootstrap peer that is not needed any more is in no entry.
        swarm.wait(f"rounds of {failed}", lambda: swarm.peers[failed].rounds(since=back))
        watched = next(name for name in others if name != "cleo")
        without = most_rounds_without(swarm, watched, failed_at, whole)
        print(
            f"{cell}: {failed} at {swarm.round_at(failed_at)}; {without} rounds without an entry, all were in every "
            f"entry {whole - back:.1f} s after its return"
        )
        assert without <= MOST_CYCLES_WITHOUT * FRAGMENTS, swarm.story()
        end_together(swarm, ["ann", "bob", "cleo"])
