"""A joiner with a really thin line, in its own network namespace: 1.5 times the rate of entries is enough."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.swarm.process_swarm import FRAGMENTS, ROUND_SECONDS, SPANS, ProcessSwarm
from tests.swarm.test_faults import check_nobody_was_held, end_together
from tests.swarm.thin_network import HERE, THERE, thin_network

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

MODEL = {"layers": 2, "width": 128, "heads": 4, "feed_forward": 256, "context": 32}
OTHERS = ["ada", "ben", "cleo"]


def entry_bytes_per_second(swarm: ProcessSwarm) -> float:
    """Return the mean rate of entries, from the files on ada's disk."""
    folder: Path = swarm.peers["ada"].folder / swarm.manifest.digest().hex()[:16] / "entries"
    sizes = sorted(path.stat().st_size for path in folder.iterdir())
    return sizes[len(sizes) // 2] / (FRAGMENTS * ROUND_SECONDS)


def test_a_joiner_with_one_and_a_half_times_the_rate_of_entries_becomes_ready() -> None:
    with thin_network() as network, ProcessSwarm({"model": MODEL}) as swarm:
        for name in OTHERS:
            swarm.start(name, founds=name == "ada", within=network.here, host=HERE)
        swarm.wait_for_whole_round(OTHERS, 3, since=0.0, lasting=True)
        swarm.sleep_rounds(6)
        rate, state = entry_bytes_per_second(swarm), 8 * swarm.peers["ada"].status.parameters
        network.set_rate(1.5 * rate)
        joined = time.time()
        late = swarm.start("late", within=network.there, host=THERE)
        swarm.wait("late is ready", lambda: late.status.ready, 300.0)
        cycles = (time.time() - joined) / (FRAGMENTS * ROUND_SECONDS)
        print(
            f"{1.5 * rate / 1e3:.0f} kB/s: ready after {cycles:.0f} cycles, "
            f"{late.status.bytes_received.transfer / state:.2f} x state of {state / 1e6:.1f} MB in {SPANS} spans"
        )
        check_nobody_was_held(swarm, OTHERS, joined, time.time())
        network.set_rate(1e8)
        end_together(swarm, [*OTHERS, "late"])
