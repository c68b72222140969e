"""Peer of this project without training: engine, node, island thread, archive, disk and transport of a real peer.

The whole vector is one fragment, so one round is one exchange. Swarm time stops between turns, and the event loop runs
only during turns. `StagedPeer` describes this, and the parts of a real peer that are missing here. Also missing is the
comparison of content digests every few cycles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.averaging.synthetic_island import SyntheticState, tensors_of
from benchmarks.averaging.textbook import seed_of
from benchmarks.staged_peer import StagedPeer
from p2p_diloco.app.training.training_thread import TrainingThread
from p2p_diloco.config.decoder import model_shape
from p2p_diloco.config.manifest import decode_signed_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_tensors
from p2p_diloco.ids import SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.session.ending import state_digest

TRIAL_LINGER_SECONDS = 1.0
"""Extra time in warm-up turns, in which peers exchange messages to vote on rosters that list all peers."""
LINGER_SECONDS = 0.1
TRIAL_SHARE = 0.125
"""Share of a round that a warm-up turn may take. If some peers start it under the previous roster, there are no
entries; the turn then ends and is repeated. A round is twice as long as a turn may take."""
START_SCALE = 0.02
_NEVER = 2**20


class OurPeer(StagedPeer):
    """One peer. Its public methods are the commands of the comparison."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        super().__init__(order, plan_of(order))
        self._applied = asyncio.Event()
        self._applied_at, self._num_absorbed, self._is_in_all = 0.0, 0, True
        self._state: SyntheticState

    # -- commands of the worker

    def prepare(self, turn: int) -> None:
        """Move θ away from the anchor, as training would."""
        self.thread.wait_until_idle()
        self._state.walk(seed_of(self.place, turn))

    def play(self, turn: int, at: float, is_trial: bool) -> dict[str, Any]:
        """Start the round of this turn at `at`, and run until all its entries are in φ, m and θ, and on disk."""
        trouble = self.run(self._play(turn, at, is_trial=is_trial))
        if is_trial and not trouble:
            trouble = self._non_voters(turn + 1)
        return {"applied_at": self._applied_at, "trouble": trouble}

    def settle(self, turn: int, at: float) -> dict[str, Any]:
        """Run a turn without an exchange, in which peers compare content digests as after every start.

        Not settled while a peer is missing from the roster or has just returned to it: the next turn would be without
        it.
        """
        is_settled = self.run(self.compare_contents(turn, at)) and not self.missing_members(turn + 1)
        roster = self.governing_roster(turn + 1)
        return {"is_settled": is_settled, "roster": roster.digest().hex() if roster is not None else ""}

    def digest(self) -> dict[str, Any]:
        """Return a hash of φ and m."""
        return {"digest": state_digest(self._state.states())}

    # -- the vectors

    def make_start(self) -> dict[SpanId, Any]:
        """Return the initial φ, the same on all peers."""
        rng = np.random.Generator(np.random.Philox(key=0))
        return {
            span: np.float32(START_SCALE) * rng.standard_normal(place.stop - place.start, dtype=np.float32)
            for span, place in self.plan.places.items()
        }

    def make_thread(self, states: dict[SpanId, SpanState]) -> TrainingThread:
        """Return the thread of an island that makes no steps."""
        self._state = SyntheticState(self.state_host(), absorbed=self._note_absorbed)
        self._state.hold(states)
        return TrainingThread(state=self._state, step=None)

    # -- a turn

    def _note_absorbed(self, at: float, is_in: bool) -> None:
        """Count an entry. Called by the island's thread."""
        self._num_absorbed += 1
        self._is_in_all = self._is_in_all and is_in
        self._applied_at = at
        if self._num_absorbed == len(self.plan.places):
            self.in_loop(self._applied.set)

    async def _play(self, turn: int, at: float, *, is_trial: bool) -> str:
        self._num_absorbed, self._is_in_all, self._applied_at = 0, True, at
        self._applied.clear()
        self.listener.sentences.clear()
        async with self.driven(turn, at) as driving:
            round_seconds = self.plan.rules.clock.round_seconds
            await self._wait_for_entries(driving, TRIAL_SHARE * round_seconds if is_trial else round_seconds)
            # Pending disk writes are part of the exchange.
            await self.wait_for_disk()
            trouble = self._trouble(turn)
            await asyncio.sleep(TRIAL_LINGER_SECONDS if is_trial else LINGER_SECONDS)
        return trouble

    async def _wait_for_entries(self, driving: asyncio.Future[None], seconds: float) -> None:
        applied = asyncio.ensure_future(self._applied.wait())
        try:
            waits: set[asyncio.Future[Any]] = {applied, driving}
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self.check(driving)
        finally:
            applied.cancel()

    def _non_voters(self, turn: int) -> str:
        """Return a text while members may not vote yet, else '': the roster is replaced once they may."""
        roster = self.governing_roster(turn)
        num_waiting = sum(not member.counts for member in roster.members) if roster is not None else 0
        return f"{num_waiting} members may not vote yet; the next roster lets them" if num_waiting else ""

    def _trouble(self, turn: int) -> str:
        """Return why the exchange did not include all peers, or nothing if it did."""
        num_spans = len(self.plan.places)
        if missing := self.missing_members(turn):
            return missing
        if self._num_absorbed == num_spans and self._is_in_all:
            return ""
        said = " | ".join(self.listener.sentences) or "nothing"
        included = "all" if self._is_in_all else "not all"
        return f"{self._num_absorbed} of {num_spans} entries arrived, {included} with this peer; last events: {said}"


def plan_of(order: Mapping[str, Any]) -> RunPlan:
    """Return the plan of a run over one long vector.

    Between turns there are no entries, so no run is ever stalled; contents are compared in `settle` alone, and the only
    heartbeat of a round is its first.
    """
    manifest = decode_signed_manifest(bytes.fromhex(order["manifest"])).manifest
    plan = plan_tensors(manifest, model_shape(manifest.model.size), tensors_of(int(order["parameters"])))
    beat = manifest.rounds.round_seconds
    rules = replace(plan.rules, heartbeat_seconds=beat, least_stalled_cycles=_NEVER, scrub_cycles=_NEVER)
    return replace(plan, rules=rules)
