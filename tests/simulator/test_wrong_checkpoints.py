"""Flipped bits that reached a checkpoint before others noticed: the right bytes come back, and stay."""

from __future__ import annotations

import pytest

from simulator.run import run_rules
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

RULES = run_rules(num_spans=(2, 2), heartbeat_seconds=2.0, scrub_cycles=2)
SCRUB_SECONDS = RULES.scrub_cycles * RULES.cycle_seconds


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_checkpoint_with_a_flipped_bit_does_not_undo_the_correction(seed: int) -> None:
    """Whenever a peer differed, the wrong bytes were taken from the checkpoint again, and then fetched again.

    Checkpoints are written every 8 to 32 s, a different time for each seed.
    """
    async with Simulation(seed=seed, rules=RULES, as_bytes=False) as swarm:
        for place in range(5):
            swarm.add(f"p{place}", founds=place == 0)
        await swarm.until(swarm.all_settled, within=300.0)
        first, second, span = swarm.machines["p1"], swarm.machines["p2"], swarm.spans[1]
        assert swarm.flip_bit("p1", span, 0, 20)
        await swarm.until(lambda: not swarm.inspector.differing, within=SCRUB_SECONDS + RULES.cycle_seconds)
        assert swarm.flip_bit("p2", span, 1, 20)
        for _ in range(int(2 * SCRUB_SECONDS)):
            await swarm.run(1.0)
            assert ("p1", span) not in swarm.inspector.differing
        assert not swarm.inspector.differing
        for machine in (first, second):
            fetched = [text for text in machine.texts("content") if "fetching it again" in text]
            assert len(fetched) <= 1, machine.texts("content")
        await swarm.until(swarm.agreed, within=2 * RULES.cycle_seconds)
