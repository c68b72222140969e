"""A community whose first peer has a thin line grows, with real processes: later peers can join."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest

from tests.swarm.process_swarm import ProcessSwarm

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(420)]

ROUND_SECONDS = 5.0
LATE_ROUNDS = 5
MOST_SECONDS = 240.0
"""Three times the time that it took on two cores (docs/decisions/lines.md)."""
MOST_CONTROL_SHARE = 0.1


def test_two_newcomers_join_although_the_first_peer_has_a_thin_line() -> None:
    values = {
        "model": {"size": "tiny"},
        "rounds": {
            "clock_start": time.time(),
            "round_seconds": ROUND_SECONDS,
            "fragments": 4,
            "spans_per_fragment": 16,
        },
    }
    with ProcessSwarm(values, round_seconds=ROUND_SECONDS, patience_seconds=MOST_SECONDS) as swarm:
        swarm.start("bootstrap", founds=True, trains=False)
        swarm.start("thin", max_upload="300kbit")
        swarm.wait("the thin one to train", lambda: swarm.peers["thin"].status.phase == "training")
        swarm.sleep_rounds(LATE_ROUNDS)
        before = asdict(swarm.peers["thin"].status.bytes_sent)
        began = time.time()
        for name in ("ben", "cleo"):
            swarm.start(name)
        newcomers = [swarm.peers[name] for name in ("ben", "cleo")]
        swarm.wait("both newcomers to train", lambda: all(peer.status.phase == "training" for peer in newcomers))
        sent = {what: count - before[what] for what, count in asdict(swarm.peers["thin"].status.bytes_sent).items()}
        share = sent["control"] / sum(sent.values())
        print(f"ready after {time.time() - began:.0f} s; the thin line sent {sent}, {share:.0%} of it control words")
        assert share < MOST_CONTROL_SHARE
