"""State directories as peers write them, for tests of the page."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.peer_files import PeerFiles
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus

RUN = "ab" * 32
PEER = "12D3KooWAnnAnnAnnAnnAnnAnnAnnAnnAnnAnnAnnAnnAnnAnn01"
OTHER = "12D3KooWBobBobBobBobBobBobBobBobBobBobBobBobBobBob02"
INVITE = f"p2pdiloco://{RUN}?v=10&b=/ip4/203.0.113.7/tcp/31337/p2p/{OTHER}"


def a_status(**changes: object) -> PeerStatus:
    status = PeerStatus(
        run=RUN,
        run_name="Tales",
        peer=PEER,
        pid=os.getpid(),
        updated=time.time(),
        round=41,
        cycle=10,
        roster=3,
        num_members=3,
        num_ready=2,
        grid=(3,),
        row=0,
        ready=True,
        phase="training",
        inner_steps=1_000,
        tokens=512_000,
        tokens_per_second=1_000.0,
        loss=2.25,
        anchor_loss=2.125,
        parameters=1_000_000,
        participation=0.96875,
        weight=0.5,
        reachable=True,
        addresses=("/ip4/203.0.113.9/tcp/31338",),
        reach="reachable at 203.0.113.9:31338, proved by 2 peers",
        invite=INVITE,
        bytes_sent=ByteCounts(vectors=3_000_000),
        peers=(
            PeerLine(
                peer=OTHER,
                ready=True,
                steps=100,
                step_tokens=512.0,
                tokens_per_second=500.0,
                loss=2.5,
                seconds_since_heard=0.5,
                row=0,
                weight=0.25,
            ),
            PeerLine(peer="12D3KooWCat03", trains=False, reachable=True, seconds_since_heard=1.0),
        ),
    )
    return replace(status, **changes)  # type: ignore[arg-type]


def a_peer(folder: Path, *, minutes: int = 5, **changes: object) -> PeerStatus:
    """Write the files of a peer that has run for some minutes, and return its last status."""
    folder.mkdir(exist_ok=True)
    files, status = PeerFiles(folder), a_status(**changes)
    for step in range(6 * minutes, -1, -1):
        loss = None if status.anchor_loss is None else status.anchor_loss + 0.01 * step
        files.status(replace(status, updated=status.updated - 10 * step, anchor_loss=loss, round=status.round - step))
    for index, (entries, included) in enumerate(((4, 8), (3, 6), (0, 0)), status.round - 3):
        files.event(a_round(index, entries=entries, included=included))
    files.event(PeerEvent(time=status.updated, topic="roster", text="roster 3: 3 members (new: 12D3..BobBob02)"))
    return status


def a_round(index: int, *, entries: int, included: int) -> PeerEvent:
    figures = {
        "round": index,
        "num_spans": 4,
        "num_entries": entries,
        "num_included": included,
        "num_ready": 2,
        "num_members": 3,
    }
    return PeerEvent(time=time.time(), topic="round", text=f"round {index}", figures=figures)
