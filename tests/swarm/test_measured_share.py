"""An uncapped line between two networks whose uplink turns thin: its rate is measured and used.

Its peer contributes the spans that fit and averages less, nobody loses a link, and the others continue. Once the line
is wide again, everything is as before.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.swarm.process_swarm import ProcessSwarm
from tests.swarm.test_faults import end_together
from tests.swarm.test_shares import is_thin_on_roster, owners
from tests.swarm.thin_network import HERE, THERE, thin_network

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(900)]

OTHERS = ["ada", "ben", "cleo"]
RUN = {
    "model": {"layers": 4, "width": 320, "heads": 5, "feed_forward": 864, "context": 16},
    "inner": {"optimizer": "adamw", "step_tokens": 16},
}
"""Vectors too long for a queue to hold, and steps that leave the cores to them."""
ROUND_SECONDS = 4.0
THIN = 0.25e6
"""Bytes per second; the run needs twice that of each member."""
WIDE = 12.5e6
SETTLING_ROUNDS, JUDGED_ROUNDS = 6, 8


def test_a_peer_sends_at_the_rate_that_its_thin_line_showed() -> None:
    with thin_network() as network, ProcessSwarm(RUN, round_seconds=ROUND_SECONDS, patience_seconds=180.0) as swarm:
        network.set_rate(WIDE)
        for name in OTHERS:
            swarm.start(name, founds=name == "ada", within=network.here, host=HERE)
        thin = swarm.start("thin", within=network.there, host=THERE)
        swarm.wait_for_whole_round([*OTHERS, "thin"], 4, since=0.0, lasting=True)

        network.set_rate(WIDE, back=THIN)
        turned_at = time.time()
        swarm.wait("thin knows its line", lambda: bool(thin.events("line")))
        swarm.wait("thin is on a roster with a smaller share", lambda: is_thin_on_roster(swarm))
        known_at = thin.events("line")[0].time
        swarm.sleep_rounds(SETTLING_ROUNDS + JUDGED_ROUNDS)
        network.set_rate(WIDE)
        swarm.wait("thin sends all that it has again", lambda: "upload_shown" not in thin.events("line")[-1].figures)
        swarm.wait_for_whole_round([*OTHERS, "thin"], 4, since=thin.events("line")[-1].time, lasting=True)
        lost = [event for name in (*OTHERS, "thin") for event in swarm.peers[name].events("link")]
        end_together(swarm, [*OTHERS, "thin"])

        first = swarm.round_at(known_at) + SETTLING_ROUNDS
        judged = range(first, first + JUDGED_ROUNDS)
        rounds = [one for one in swarm.peers["ada"].rounds() if one.round in judged]
        entries = sum(one.num_entries for one in rounds) / sum(one.num_spans for one in rounds)
        contributed = sum(one.num_included - 3 * one.num_entries for one in rounds) / sum(
            one.num_spans for one in rounds
        )
        shown = [float(event.figures["upload_shown"]) for event in thin.events("line") if event.figures]
        counts = Counter(owner for round_index, owner in owners(swarm) if round_index in judged)
        took = (known_at - turned_at) / ROUND_SECONDS
        print(
            f"after {took:.1f} rounds it says {shown[0] / 8e6:.2f} MB/s; the line carries {THIN / 1e6} with all headers"
        )
        print(f"then {entries:.0%} of spans get entries, {contributed:.0%} with what it contributes, and it averages")
        print(f"{counts['thin']} of {counts.total()}: {dict(counts)}")
        assert 0.6 * THIN < shown[0] / 8 < 1.2 * THIN
        assert entries > 0.9, swarm.story()
        assert 0.1 < contributed < 0.6, swarm.story()
        assert 0 < counts["thin"] < 0.6 * counts.total() / 4
        assert lost == [], swarm.story()
