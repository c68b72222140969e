"""Real peers, one with a thin line: it averages less, contributes the spans that fit, and nobody waits for it."""

from __future__ import annotations

from collections import Counter

import pytest

from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.ids import format_peer_id
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.storage.run_folder import RunFolder
from tests.swarm.process_swarm import ProcessSwarm
from tests.swarm.test_faults import end_together
from tests.swarm.test_repair_processes import entries_on_disk, started

pytestmark = [pytest.mark.wall_clock, pytest.mark.long]

NAMES = ["ada", "ben", "cleo"]
ROUNDS = 24


def test_a_peer_with_a_thin_line_averages_fewer_spans_and_all_end_with_the_same_bytes() -> None:
    values = {"model": {"layers": 2, "width": 128, "heads": 2, "feed_forward": 384, "context": 32}}
    with ProcessSwarm(values, round_seconds=3.0) as swarm:
        started(swarm, *NAMES)
        swarm.start("thin", max_upload="400kbit")
        thin = swarm.peers["thin"]
        # It starts to average once it has been listed for eight cycles.
        swarm.wait("thin on a roster with a smaller share", lambda: is_thin_on_roster(swarm), patience_seconds=120.0)
        swarm.sleep_rounds(ROUNDS)
        end_together(swarm, [*NAMES, "thin"])

        share = thin.status.averaging_share
        assert 0.0 < share < 1.0, swarm.story()
        assert [event.figures["averaging_share"] for event in thin.events("share")][-1] == share
        owned, first = owners(swarm), swarm.round_at(thin.events("share")[0].time) + 4
        late = [owner for round_index, owner in owned if round_index >= first]
        counts = Counter(late)
        print(f"thin has {share} of a share and owned {counts['thin']} of {len(late)} entries; {dict(counts)}")
        assert counts["thin"] < 0.6 * len(late) / 4
        closed = [one for one in swarm.peers["ada"].rounds() if one.round >= first]
        entries = sum(one.num_entries for one in closed) / sum(one.num_spans for one in closed)
        assert entries > 0.95, swarm.story()


def is_thin_on_roster(swarm: ProcessSwarm) -> bool:
    run = plan_run(swarm.manifest).rules.run
    rosters = RunFolder(swarm.peers["ada"].folder, run).recall_rosters()
    newest = max((certified.roster for certified in rosters), key=lambda roster: roster.k)
    return len(newest.members) == 4 and any(member.share < 8 for member in newest.members)


def owners(swarm: ProcessSwarm) -> list[tuple[int, str]]:
    """Return the round and the owner of each entry on ada's disk."""
    rules = plan_run(swarm.manifest).rules
    rosters = {}
    names = {}
    for name, peer in swarm.peers.items():
        names[peer.status.peer] = name
        for certified in RunFolder(peer.folder, rules.run).recall_rosters():
            rosters[certified.roster.digest()] = certified.roster
    found = []
    for entry in entries_on_disk(swarm, "ada").values():
        owner = fold_roster(rosters[entry.roster], rules.group_size).owner(entry.span)
        assert owner is not None
        found.append((entry.round, names[format_peer_id(owner)]))
    return found
