"""Write the files of a peer in a run of 200 members once a second, as the peer would: python many_members.py FOLDER."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.peer_files import PeerFiles
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus

MEMBERS, ROW = 200, 15
HOSTILE = '<b onclick="alert(1)">&amp;\u202e\x07'


def main(folder: Path) -> None:
    """Write until killed."""
    folder.mkdir(exist_ok=True)
    files, chance, began = PeerFiles(folder), random.Random(1), time.time()
    for second in range(24 * 3600):
        shown = second if second > 0 else 1
        if second == 0:
            for step in range(400, 0, -1):  # the history of an hour
                files.status(status(chance, shown, began - 10.0 * step))
        files.event(round_event(shown))
        if shown % 5 == 0:
            files.event(PeerEvent(time=time.time(), topic="roster", text=f"roster {shown}: {HOSTILE}"))
        files.status(status(chance, shown, time.time()))
        time.sleep(1.0)


def round_event(index: int) -> PeerEvent:
    figures = {
        "round": index,
        "num_spans": MEMBERS,
        "num_entries": MEMBERS if index % 5 else 150,
        "num_included": MEMBERS * 190 - index % 3,
        "num_ready": 190,
        "num_members": MEMBERS,
    }
    return PeerEvent(time=time.time(), topic="round", text=f"round {index}", figures=figures)


def status(chance: random.Random, second: int, updated: float) -> PeerStatus:
    peers = tuple(
        PeerLine(
            peer=f"12D3KooW{number:036d}{HOSTILE}",
            ready=number % 7 > 0,
            reachable=number % 3 == 0,
            steps=100 * second,
            step_tokens=512.0,
            tokens_per_second=10_000.0 * chance.random(),
            loss=2.0 + chance.random(),
            seconds_since_heard=40.0 if number % 11 == 0 else chance.random(),
            row=number // ROW,
            weight=1 / MEMBERS,
        )
        for number in range(MEMBERS - 1)
    )
    return PeerStatus(
        run="ab" * 32,
        run_name=f"many {HOSTILE}",
        peer="12D3KooW" + "x" * 44,
        pid=os.getpid(),
        updated=updated,
        round=second,
        num_members=MEMBERS,
        num_ready=190,
        grid=(ROW,) * 13 + (5,),
        row=0,
        ready=True,
        phase="training",
        inner_steps=10 * second,
        tokens=5_120 * second,
        tokens_per_second=5_120.0,
        loss=2.0,
        anchor_loss=2.0 + 1.0 / second,
        parameters=10**9,
        participation=0.95,
        weight=1 / MEMBERS,
        peers=peers,
        bytes_sent=ByteCounts(vectors=1_000_000 * second),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
