"""A swarm of real processes replayed in one process: threads, daemons and sockets followed the rules exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from p2p_diloco.storage.corpus_files import list_corpus_files
from research.command import main
from tests.swarm.process_swarm import ProcessSwarm
from tests.swarm.test_faults import end_together

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(900)]

MOST_APART = 0.003


def source() -> bytes:
    """Return the source of Python's standard library."""
    return b"".join(file.read_bytes() for file in list_corpus_files(None))


def prose() -> bytes:
    """Return chapters of Python's reference manual: half a megabyte of English with examples."""
    return "\n".join(topics[name] for name in sorted(topics)).encode()


@pytest.mark.parametrize("text", [source, prose])
def test_a_replay_of_real_processes_equals_the_run(text: Callable[[], bytes], tmp_path: Path) -> None:
    """Run four islands over libp2p with 4-bit entries; one is killed and returns, one joins late."""
    values = {"rounds.retained_cycles": 1000}
    with ProcessSwarm(values, round_seconds=2.5, patience_seconds=120.0, keep_traces=True, text=text()) as swarm:
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

        folders = [str(peer.folder) for peer in swarm.peers.values()]
        figures = tmp_path / "figures.json"
        words = ["--data", str(swarm.text), "--json", str(figures)]
        assert main(["replay", *folders, *words, "--data-parallel"]) == 0
    result = json.loads(figures.read_text())
    assert result["islands"] == 5
    assert abs(result["gap"]) <= MOST_APART
    assert result["equal_entries"] == result["entries"] > 100
    assert result["real_loss"] < 4.0
    assert result["data_parallel_loss"] < 4.0
