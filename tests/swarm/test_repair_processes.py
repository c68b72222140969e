"""Repairs with real processes, disks and sockets: all killed at once, damaged memory, a donor that dies half-way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p_diloco.ids import Digest, SpanId, sha256
from p2p_diloco.protocol.rules import SCRUB_CYCLES
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.storage.entry_log import EntryLog
from tests.swarm.process_swarm import FRAGMENTS, ROUND_SECONDS, ProcessSwarm
from tests.swarm.test_faults import end_together

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(240)]

SCRUB_SECONDS = SCRUB_CYCLES * FRAGMENTS * ROUND_SECONDS


def run_folder(swarm: ProcessSwarm, name: str) -> Path:
    return swarm.peers[name].folder / swarm.manifest.digest().hex()[:16]


def entries_on_disk(swarm: ProcessSwarm, name: str, folder: Path | None = None) -> dict[tuple[SpanId, Digest], Entry]:
    """Return a peer's stored entries, by span and parent."""
    path = folder if folder is not None else run_folder(swarm, name) / "entries"
    copy = swarm.peers[name].folder / "copy of entries"
    shutil.copytree(path, copy)
    try:
        return {(entry.span, entry.parent): entry for entry in EntryLog(copy, keep_cycles=1000).kept()}
    finally:
        shutil.rmtree(copy)


def started(swarm: ProcessSwarm, *names: str) -> None:
    for name in names:
        swarm.start(name, founds=name == "ada")
    swarm.wait_for_whole_round(names, len(names), since=0.0, lasting=True)


def last_entries(entries: dict[tuple[SpanId, Digest], Entry]) -> dict[SpanId, Entry]:
    newest: dict[SpanId, Entry] = {}
    for (span, _), entry in sorted(entries.items(), key=lambda each: each[1].height):
        newest[span] = entry
    return newest


def test_killing_all_peers_at_once_loses_no_round() -> None:
    names = ["ada", "ben", "cleo"]
    with ProcessSwarm() as swarm:
        started(swarm, *names)
        swarm.sleep_rounds(2)
        swarm.sleep_to(0.9)
        killed = [swarm.kill(name) for name in names][-1]
        before: dict[tuple[SpanId, Digest], Entry] = {}
        for name in names:
            before |= entries_on_disk(swarm, name)
        newest = last_entries(before)
        assert max(entry.round for entry in newest.values()) >= swarm.round_at(killed) - 1, swarm.story()
        # One returns with only its first checkpoint, one without its entries.
        for late in sorted(run_folder(swarm, "ben").glob("checkpoint-*"))[1:]:
            late.unlink()
        shutil.rmtree(run_folder(swarm, "cleo") / "entries")

        # All have new ports, so the others must get the address of one of them.
        swarm.start("ada", founds=True)
        swarm.wait("where ada is", lambda: swarm.peers["ada"].status.updated > killed)
        for name in ("ben", "cleo"):
            swarm.start(name, via=["ada"])
        swarm.wait_for_whole_round(names, 3, since=killed, lasting=True)
        end_together(swarm, names)
        after = entries_on_disk(swarm, "ada")
        for span, entry in newest.items():
            child = after.get((span, sha256(entry.parent, entry.digest())))
            assert child is not None, f"round {entry.round} of {span} is lost\n{swarm.story()}"
            assert child.height == entry.height + 1


def wait_until_said(swarm: ProcessSwarm, name: str, words: str, since: float, patience_seconds: float) -> float:
    def said() -> bool:
        return any(words in event.text for event in swarm.peers[name].events("content", since=since))

    swarm.wait(f"{name} saying: {words}", said, patience_seconds)
    return time.time() - since


@pytest.mark.parametrize("names", [["ada", "ben"], ["ada", "ben", "cleo"]], ids=["two", "three"])
def test_a_flipped_bit_is_found_reported_and_repaired_within_a_scrub_period(names: Sequence[str]) -> None:
    with ProcessSwarm() as swarm:
        started(swarm, *names)
        flipped = swarm.flip_a_bit("ben")
        patience = SCRUB_SECONDS + 4 * ROUND_SECONDS
        seconds = wait_until_said(swarm, "ben", "was damaged in memory; repaired", flipped, patience)
        print(f"mended after {seconds:.1f} s; the scrub period is {SCRUB_SECONDS:.1f} s")
        innocent = [event.text for name in names if name != "ben" for event in swarm.peers[name].events("content")]
        assert not any("repaired" in text or "fetching" in text for text in innocent), swarm.story()
        end_together(swarm, names)


def test_a_joiner_continues_with_other_donors_after_one_was_killed_half_way() -> None:
    with ProcessSwarm() as swarm:
        for name in ("ada", "ben", "cleo"):
            swarm.start(name, founds=name == "ada", serves_slowly=0.1)
        swarm.wait_for_whole_round(["ada", "ben", "cleo"], 3, since=0.0, lasting=True)
        state = 8 * swarm.peers["ada"].status.parameters
        late = swarm.start("late", via=["ada"])
        swarm.wait("half of the state", lambda: late.status.bytes_received.transfer > state / 3)
        assert not late.status.ready
        killed = swarm.kill("ben")
        swarm.wait("late is ready", lambda: late.status.ready)
        transferred = late.status.bytes_received.transfer
        print(f"ready {time.time() - killed:.1f} s after a donor died, with {transferred / state:.2f} x state")
        assert transferred < 1.5 * state, swarm.story()
        swarm.wait_for_whole_round(["ada", "cleo", "late"], 3, since=killed)
        end_together(swarm, ["ada", "cleo", "late"])
