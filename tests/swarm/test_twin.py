"""A swarm of real processes and its twin in one: threads, daemons and sockets did what the rules say, nothing else."""

from __future__ import annotations

import pytest

from p2p_diloco.island.data import open_corpus
from p2p_diloco.key_file import read_key_file
from p2p_diloco.lab.learning.recording import read_recording
from p2p_diloco.lab.learning.twin import Twin
from p2p_diloco.settings import IDENTITY_FILE
from tests.swarm.process_swarm import ProcessSwarm
from tests.swarm.test_faults import end_together

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

MOST_APART = 0.003


def test_a_run_of_real_processes_is_made_again_by_its_twin() -> None:
    """Four islands over libp2p with 4-bit entries; one is killed and comes again, one comes late."""
    values = {"membership": {"heartbeat_seconds": 0.5, "void_cycles": 2}, "limits": {"retained_cycles": 1000}}
    with ProcessSwarm(values, round_seconds=2.5, patience_seconds=120.0, keep_diaries=True) as swarm:
        swarm.start("ada", founds=True)
        for name in ("ben", "cleo"):
            swarm.start(name)
        swarm.wait_for_whole_round(["ada", "ben", "cleo"], 3, since=0.0, lasting=True)
        swarm.start("dora", dial_out_only=True)
        four = ["ada", "ben", "cleo", "dora"]
        swarm.wait_for_whole_round(four, 4, since=0.0, lasting=True)
        swarm.sleep_to(0.3)
        killed = swarm.kill("ben")
        swarm.wait_for_whole_round(["ada", "cleo", "dora"], 3, since=killed, lasting=True)
        swarm.start("ben", via=["ada"])
        swarm.wait_for_whole_round(four, 4, since=killed, lasting=True)
        swarm.sleep_rounds(8)
        end_together(swarm, four)

        folders = {read_key_file(peer.folder / IDENTITY_FILE).peer: peer.folder for peer in swarm.peers.values()}
        result = Twin(read_recording(folders), open_corpus(str(swarm.text))).play()
    print(result)
    assert result.islands == 5
    assert abs(result.gap) <= MOST_APART
    assert result.equal_entries == result.entries > 100
