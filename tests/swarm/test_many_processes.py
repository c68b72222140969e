"""A grid of real processes: as many as this machine can run, all killed at once, all restarted."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from tests.swarm.process_swarm import FRAGMENTS, ProcessSwarm
from tests.swarm.test_faults import check_nobody_was_held, check_only_own_spans_were_void, end_together, most_owned

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(2400)]

NUM_PEERS = 24
GROUP_SIZE = 5
ROWS = 5
SPANS = 10
ROUND_SECONDS = 12.0
PATIENCE_SECONDS = 900.0


def test_two_dozen_in_five_rows_hold_the_same_bytes_and_lose_no_round_when_all_are_killed() -> None:
    values = {"membership": {"group_size": GROUP_SIZE}}
    names = [f"p{number:02}" for number in range(NUM_PEERS)]
    with ProcessSwarm(values, patience_seconds=PATIENCE_SECONDS, round_seconds=ROUND_SECONDS) as swarm:
        for place, name in enumerate(names):
            swarm.start(name, founds=place == 0)
        swarm.wait_for_whole_round(names, NUM_PEERS, since=0.0, lasting=True)
        wait_for_rows(swarm, names, ROWS)
        status = swarm.peers[names[0]].status
        print(f"members in each row: {status.grid}; round {status.round}")

        swarm.sleep_to(0.95)
        height = max(last_round(swarm, name) for name in names)
        for name in names:
            swarm.kill(name)
        killed = time.time()
        swarm.start(names[0], founds=True)
        swarm.wait("where the first one is", lambda: swarm.peers[names[0]].status.updated > killed)
        for name in names[1:]:
            swarm.start(name, via=names[:1])
        swarm.wait_for_whole_round(names, NUM_PEERS, since=killed, lasting=True)
        seconds = time.time() - killed
        heads = {swarm.peers[name].status.log_digest for name in names}
        print(f"whole again {seconds:.0f} s after the kill, rounds {height} and on; {len(heads)} heads in status files")
        end_together(swarm, names)


def test_a_frozen_peer_in_a_grid_delays_nobody_and_costs_only_its_column() -> None:
    values = {"membership": {"group_size": 3}}
    names = ["ada", "ben", "cleo", "dora", "emil", "fay"]
    with ProcessSwarm(values, patience_seconds=180.0, round_seconds=3.0) as swarm:
        for place, name in enumerate(names):
            swarm.start(name, founds=place == 0, dial_out_only=name == "fay")
        swarm.wait_for_whole_round(names, len(names), since=0.0, lasting=True)
        for place, victim in enumerate(names):
            # A reducer that was frozen for too long reduces nothing for 16 cycles, and four are needed for two rows.
            wait_for_rows(swarm, names, 2)
            others = [name for name in names if name != victim]
            swarm.sleep_to((0.05, 0.3, 0.55, 0.8)[place % 4])
            frozen = swarm.freeze(victim, with_daemon=place % 2 == 0)
            swarm.sleep_rounds(3.5)
            woken = swarm.wake(victim)
            # Half of the members is not a majority: without its reducer a row lacks its spans, and the other row alone
            # cannot make them entries. There are two columns, because one of six peers accepts no connection.
            for other in others:
                check_only_own_spans_were_void(swarm, other, frozen - 3.0, woken, most_owned(2))
            check_nobody_was_held(swarm, others, frozen - 3.0, woken)
            swarm.wait_for_whole_round(names, len(names), since=woken, lasting=True)
        end_together(swarm, names)


def wait_for_rows(swarm: ProcessSwarm, names: Sequence[str], num_rows: int) -> None:
    """Wait until all see that many rows. A member reduces 8 cycles after it was listed, and each row needs two."""
    began = time.time()
    swarm.wait(f"{num_rows} rows", lambda: all(len(swarm.peers[name].status.grid) == num_rows for name in names))
    print(f"{num_rows} rows after {time.time() - began:.0f} s")


def last_round(swarm: ProcessSwarm, name: str) -> int:
    """Return the last round with entries that a peer closed, after at least one cycle of such rounds."""
    rounds = [closed.round for closed in swarm.peers[name].rounds() if closed.num_entries]
    assert len(rounds) >= FRAGMENTS, swarm.story()
    return rounds[-1]
