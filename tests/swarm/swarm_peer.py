"""One peer of a fault test in its own process: `python swarm_peer.py ORDER.json`.

It writes `invite`, `events.jsonl` and `status.json` into its folder. SIGINT: leave. SIGUSR1: end after the round in the
file `last_round`. SIGUSR2: flip a bit of the anchor, then write `flipped`. It dies with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.paced_steps import hold_steps
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.training.built_in import BuiltInTraining
from p2p_diloco.config.invite import Invite, parse_invite
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.ids import Digest
from p2p_diloco.protocol.actions import ServeSpan
from p2p_diloco.protocol.round import credit
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.peer_plan import Founding, PeerPlan
from p2p_diloco.session.start import run_peer
from p2p_diloco.session.trained_state import TrainedState
from p2p_diloco.signing import SigningKey
from p2p_diloco.span import serve
from p2p_diloco.status.event_log import PeerEvent, append_event
from p2p_diloco.status.status_file import PeerStatus, write_status
from p2p_diloco.storage import member_files
from p2p_diloco.storage.text_copy import TextCopy

LAST_ROUND_FILE = "last_round"
INVITE_FILE = "invite"
FLIPPED_FILE = "flipped"
STEP_SECONDS = 0.05
"""Several steps in the shortest round of a test, and most of the machine left for what is tested."""
FLIP_SECONDS = 0.2
"""Time to check a flipped bit; absorbing an entry takes much less."""


class FolderObserver:
    """An observer that writes files, as the command line does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def listening(self, invite: str, *, own_model: bool) -> None:
        draft = self._folder / f".{INVITE_FILE}"
        draft.write_text(invite)
        draft.replace(self._folder / INVITE_FILE)

    def status(self, status: PeerStatus) -> None:
        write_status(self._folder, status)

    def event(self, event: PeerEvent) -> None:
        append_event(self._folder, event)


def plan_of(order: dict[str, Any], folder: Path) -> PeerPlan:
    source: Founding | Invite
    if order["manifest"] is None:
        source = parse_invite(order["invite"])
    else:
        signed = decode_signed_manifest(bytes.fromhex(order["manifest"]))
        organiser = SigningKey(bytes.fromhex(order["organiser"]))
        source = Founding(signed=signed, organiser_key=organiser, make_start=make_start, names_founder=False)
    dial_out_only = order["dial_out_only"]
    return PeerPlan(
        settings=PeerSettings(
            state_directory=folder,
            host_maddrs=() if dial_out_only else (f"/ip4/{order['host']}/tcp/{order.get('port', 0)}",),
            dial_out_only=dial_out_only,
            initial_peers=tuple(order["initial_peers"]),
            data=order["text"],
            device="cpu",
            threads=1,
            keep_trace=order.get("keep_trace", False),
            max_upload=order.get("max_upload"),
        ),
        source=source,
        training=BuiltInTraining(evaluate_seconds=0.0) if order["trains"] else None,
    )


def flip_a_bit(folder: Path) -> None:
    """Flip the sign of the largest number of some span's anchor, in memory, as a broken module would.

    The thread that follows entries may already have read this state to make the next one; then the flip is lost. So it
    is checked a little later, and repeated until it persists. Only then does a file report it.
    """
    gc.unfreeze()  # otherwise objects that existed when the loops were warm are not listed
    (trained,) = [found for found in gc.get_objects() if isinstance(found, TrainedState)]
    span, state = sorted(trained.states().items())[-1]
    place = int(np.abs(state.anchor_N).argmax())
    was_negative = bool(state.anchor_N[place] < 0.0)
    state.anchor_N.flags.writeable = True
    state.anchor_N.view(np.uint32)[place] ^= 1 << 31
    state.anchor_N.flags.writeable = False

    def look() -> None:
        if bool(trained.states()[span].anchor_N[place] < 0.0) == was_negative:
            flip_a_bit(folder)
        else:
            (folder / FLIPPED_FILE).write_text(str(span))

    asyncio.get_running_loop().call_later(FLIP_SECONDS, look)


def serve_slowly(seconds: float) -> None:
    """Serve small pieces of spans, each after a delay."""
    serve.PIECE_BYTES = 2048
    at_once = serve.Pieces.serve

    def later(self: serve.Pieces, action: ServeSpan) -> None:
        asyncio.get_running_loop().call_later(seconds, at_once, self, action)

    serve.Pieces.serve = later  # type: ignore[method-assign]


def flip_text() -> None:
    """Flip a bit of each piece of the text that is sent, but none of its list."""
    honest = TextCopy.read

    def flipped(self: TextCopy, digest: Digest, offset: int, most_bytes: int) -> tuple[int, bytes]:
        total, block = honest(self, digest, offset, most_bytes)
        if digest == self.digest or not block:
            return total, block
        return total, bytes([block[0] ^ 1, *block[1:]])

    TextCopy.read = flipped  # type: ignore[method-assign]


async def main(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    hold_steps(STEP_SECONDS)
    stop = StopRequest()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.leave)
    loop.add_signal_handler(signal.SIGUSR2, flip_a_bit, folder)
    if order["serves_slowly"]:
        serve_slowly(order["serves_slowly"])
    if order.get("block_cycles"):
        credit.BLOCK_CYCLES = member_files.BLOCK_CYCLES = order["block_cycles"]
    if order.get("flips_text"):
        flip_text()
    loop.add_signal_handler(signal.SIGUSR1, lambda: stop.end_after(int((folder / LAST_ROUND_FILE).read_text())))
    await run_peer(plan_of(order, folder), FolderObserver(folder), stop)


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(json.loads(Path(sys.argv[1]).read_text())))
