"""A whole peer of this project in a thread of this process: `p2p-diloco join` without its output."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import uvloop

from p2p_diloco.app.cli.peer_process import wake_politely
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.app.training.built_in import BuiltInTraining
from p2p_diloco.config.invite import Invite, parse_invite
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import NetworkError
from p2p_diloco.memory.heap import share_one_arena
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.peer_plan import Founding, PeerPlan
from p2p_diloco.session.start import PeerResult, run_peer
from p2p_diloco.signing import SigningKey
from p2p_diloco.status.event_log import PeerEvent
from p2p_diloco.status.status_file import PeerStatus

EVALUATE_SECONDS = 60.0
KEEP_CHECKPOINTS = 1


class SwarmPeer:
    """A peer that founds or joins the run and then runs by itself; the worker waits for its progress."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        # As `p2p-diloco join` does.
        share_one_arena()
        wake_politely()
        torch.set_num_threads(1)
        self._order = order
        self._changed = threading.Condition()
        self._invite = ""
        self._status = PeerStatus()
        self._sentences: deque[str] = deque(maxlen=4)
        self._rounds: set[int] = set()
        self._result: PeerResult | None = None
        self._failure: BaseException | None = None
        self._is_over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: StopRequest | None = None
        self._thread = threading.Thread(target=self._live, name="peer", daemon=True)
        self._plan: PeerPlan

    # -- commands of the worker

    def found(self, seconds: float) -> dict[str, Any]:
        """Found the run, if this is the first peer, and return its invite."""
        if self._order["place"]:
            return {}
        organiser = SigningKey(bytes.fromhex(self._order["organiser"]))
        signed = decode_signed_manifest(bytes.fromhex(self._order["manifest"]))
        self._start(Founding(signed=signed, organiser_key=organiser, make_start=make_start, names_founder=False))
        self._wait_until(lambda: bool(self._invite), seconds, "the founding")
        return {"invite": self._invite}

    def join(self, invite: str) -> None:
        """Join the run, unless this peer has founded it."""
        if self._order["place"]:
            self._start(parse_invite(invite))

    def exchange(self, rounds: int, seconds: float) -> dict[str, Any]:
        """Wait for this number of rounds with entries since the start."""
        self._wait_until(lambda: len(self._rounds) >= rounds, seconds, "an exchange")
        return {"round": self._status.round}

    def finish(self, last_round: int, seconds: float) -> dict[str, Any]:
        """End after a round that is the same for all peers."""
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.end_after, last_round)
        self._wait_until(lambda: self._result is not None, seconds, "the end")
        assert self._result is not None
        return {
            "digest": self._result.state_digest,
            "rounds": len(self._rounds),
            "entries": self._status.entries_absorbed,
            "steps": self._status.inner_steps,
        }

    def close(self) -> None:
        """Wait for the thread to end; if it does not, it ends with the process."""
        self._thread.join(10.0)

    def _wait_until(self, is_so: Any, seconds: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_so() or self._is_over, seconds)
            if self._failure is not None:
                raise self._failure
            if not is_so():
                said = " | ".join(self._sentences) or "nothing"
                raise NetworkError(f"{what} did not happen within {seconds:.0f} s; last events of the peer: {said}")

    # -- the peer

    def _start(self, source: Invite | Founding) -> None:
        settings = PeerSettings(
            state_directory=Path(self._order["folder"]) / "state",
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
            device="cpu",
            threads=1,
            keep_checkpoints=KEEP_CHECKPOINTS,
        )
        training = BuiltInTraining(evaluate_seconds=EVALUATE_SECONDS)
        self._plan = PeerPlan(settings=settings, source=source, training=training)
        self._thread.start()

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(self._run())
                self._note(result=result)
        except BaseException as error:
            self._note(failure=error)

    async def _run(self) -> PeerResult:
        self._loop, self._stop = asyncio.get_running_loop(), StopRequest()
        return await run_peer(self._plan, self, self._stop)

    def _note(self, *, result: PeerResult | None = None, failure: BaseException | None = None) -> None:
        with self._changed:
            self._result, self._failure, self._is_over = result, failure, True
            self._changed.notify_all()

    # -- events of the peer

    def listening(self, invite: str, *, own_model: bool) -> None:
        """Store the invite."""
        with self._changed:
            self._invite = invite
            self._changed.notify_all()

    def status(self, status: PeerStatus) -> None:
        """Store the status."""
        self._status = status

    def event(self, event: PeerEvent) -> None:
        """Store an event, and count rounds with entries."""
        print(event.text, flush=True)
        with self._changed:
            self._sentences.append(event.text)
            if event.topic == "round" and event.figures["num_entries"]:
                self._rounds.add(int(event.figures["round"]))
            self._changed.notify_all()
