"""The archivist: a peer that trains nothing, follows the run, and exports its model every few cycles.

An export is of one agreed state: each span as it was after the last entry of the same cycle, rebuilt from a checkpoint
and the entries on this disk. So archivists that export equally often write the same parameters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from p2p_diloco.app.models.evaluation import AnchorEvaluation, WholeEvaluation, evaluation_of
from p2p_diloco.app.models.exported_model import check_export, files_of, provenance_of, why_not_reloaded
from p2p_diloco.app.models.run_model import build_run_model
from p2p_diloco.app.text.data import Text
from p2p_diloco.app.text.run_text import keep_tokenizer, open_fetched_text, open_run_text
from p2p_diloco.app.text.token_shards import INDEX_FILE, TokenText
from p2p_diloco.config.manifest import STANDARD_LIBRARY, RunManifest
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, P2PDilocoError, StateError
from p2p_diloco.ids import Digest, PeerId, SpanId, format_peer_id
from p2p_diloco.outer.state import SpanState, state_digest
from p2p_diloco.protocol.wire.heartbeat import FragmentHead
from p2p_diloco.rate import counted
from p2p_diloco.session.held_state import HeldState, anchor_slice
from p2p_diloco.session.learnt_model import learnt_model
from p2p_diloco.session.training import NoTraining, TrainingHost
from p2p_diloco.storage.export_folder import EXPORTS_FILE, ExportFolder, ExportPlan, due_cycle, export_name
from p2p_diloco.storage.run_folder import TOKENIZER_FILE

LOOK_SECONDS = 1.0
FEWEST_CHECKPOINTS = 3
"""An archivist keeps at least so many, a cycle or more apart: one of them is then older than the cycle to export."""
CYCLES_REMEMBERED = 4


class CompletedCycles:
    """Which cycles are over for all: their end lies on a log that most members hold too. A state machine without I/O.

    A peer that has lost the others must not take its old state for that of a later cycle, nor follow one member that
    differs from the rest. So for each fragment a cycle counts only once more than half of the other members on the
    roster have published the same log position at the end of that fragment's round, also of those that are not heard.
    """

    def __init__(self, num_fragments: int) -> None:
        self._num_fragments = num_fragments
        self._own: dict[tuple[int, int], Digest] = {}
        self._holders: dict[tuple[int, int], set[PeerId]] = {}
        self._level = [-1] * num_fragments
        """Per fragment, the latest round at whose end most members held the same."""

    def note(
        self, own: Iterable[FragmentHead], others: Mapping[PeerId, Iterable[FragmentHead]], num_others: int
    ) -> None:
        """Compare the log positions that this peer and ready members have published, one per fragment.

        Args:
            num_others: number of members on the roster besides this peer.
        """
        for fragment, head in enumerate(own):
            key = (fragment, head.round)
            if self._own.get(key) != head.digest:
                self._own[key], self._holders[key] = head.digest, set()
        for peer, heads in others.items():
            for fragment, head in enumerate(heads):
                key = (fragment, head.round)
                if fragment < self._num_fragments and self._own.get(key) == head.digest:
                    self._holders[key].add(peer)
                    if 2 * len(self._holders[key]) > num_others:
                        self._level[fragment] = max(self._level[fragment], head.round)
        oldest = max((head_round for _, head_round in self._own), default=0) - CYCLES_REMEMBERED * self._num_fragments
        self._own = {key: digest for key, digest in self._own.items() if key[1] >= oldest}
        self._holders = {key: self._holders[key] for key in self._own}

    @property
    def num_cycles(self) -> int:
        return max(min(self._level) // self._num_fragments + 1, 0)


class Archivist(NoTraining):
    """Exports the model of a run while its peer follows the run."""

    reads_text = True
    fewest_checkpoints = FEWEST_CHECKPOINTS

    def __init__(self, exports: ExportPlan) -> None:
        super().__init__()
        self._exports = exports
        self._writing: asyncio.Future[_Done] | None = None
        """The latest export; it may go on after its session."""

    def check(self, settings: PeerSettings, manifest: RunManifest | None) -> None:
        """Refuse a run whose exports would be incomplete here, and a copy of the text that is not the run's."""
        if manifest is None:
            return
        data = manifest.data
        if settings.data is not None:
            if manifest.model.is_own_loop:
                raise ConfigError(
                    f'"{manifest.name}" trains its own model, whose held-out loss an archivist cannot measure; leave '
                    "out --data"
                )
            open_run_text(data, settings.data)
        elif data.tokenizer is not None and not data.share and not manifest.model.is_own_loop:
            raise ConfigError(
                "the exports of this run need its tokenizer, which comes with its text; give the path of your copy of "
                "the text with --data PATH"
            )

    def open(self, host: TrainingHost) -> HeldState:
        self._host = host
        self._completed = CompletedCycles(host.plan.rules.clock.num_fragments)
        self._evaluation: AnchorEvaluation | WholeEvaluation | None = None
        self._folder: ExportFolder | None = None
        self._exporting = asyncio.Lock()
        self._tried = 0
        """The latest cycle whose export was begun in this session, even if it failed."""
        return super().open(host)

    async def serve(self) -> None:
        """Export every few cycles, until cancelled.

        Raises:
            StateError: the list of exports cannot be read or written.
        """
        await self._open_folder()
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(self._open_text())
            if self._host.text is None:
                await opening
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                engine, now = self._host.engine, self._host.now()
                if engine.ready and not engine.conditions.is_paused:
                    self._completed.note(engine.closed_heads(now), self._published(now), len(self._members()))
                    # What comes late to a round is there a cycle later.
                    await self._export_if_due(self._completed.num_cycles - 1)

    async def finish(self, last_round: int) -> None:
        """Export the state after the last round, if that is due. Call it once all peers hold the same."""
        await self._export_if_due((last_round + 1) // self._host.plan.rules.clock.num_fragments)

    async def end(self) -> None:
        """Free the memory of the state; an export in progress goes on with its own."""
        self._evaluation = None
        await super().end()

    async def _open_folder(self) -> None:
        host = self._host
        exports = self._exports
        if self._writing is not None:  # of an earlier session; its draft would be taken for one that a crash has left
            await asyncio.wait({self._writing})

        def open_folder() -> tuple[ExportFolder, tuple[str, ...]]:
            owner = format_peer_id(host.peer)[-8:]
            folder = ExportFolder(exports.folder, host.folder / EXPORTS_FILE, keep=exports.keep, owner=owner)
            return folder, folder.tidy()

        folder, sentences = await asyncio.to_thread(open_folder)
        self._say(*sentences)
        cycles = counted(exports.every, "cycle") if exports.every > 1 else "cycle"
        unchecked = why_not_reloaded(host.plan, host.settings.model)
        kept = f"exports go to {exports.folder} every {cycles}; the newest {exports.keep} are kept"
        self._say(kept + (f"; {unchecked}" if unchecked is not None else ""))
        self._folder = folder

    async def _open_text(self) -> None:
        """Open the held-out text, and the tokenizer with it. Without a text, exports have no loss."""
        host = self._host
        data = host.plan.manifest.data
        if host.plan.manifest.model.is_own_loop:
            return
        if host.text is None and host.settings.data is None and data.path != STANDARD_LIBRARY:
            text = "the held-out loss is not measured, because it needs a copy of the run's text: --data PATH"
            host.reporter.report("evaluation", text)
            return
        try:
            opened = await self._fetched() if host.text is not None else await asyncio.to_thread(self._own_text)
            self._evaluation = await asyncio.to_thread(self._evaluation_on, opened)
        except ConfigError as error:
            host.reporter.report("evaluation", f"the held-out loss is not measured: {error}")

    def _own_text(self) -> Text:
        text = open_run_text(self._host.plan.manifest.data, self._host.settings.data)
        keep_tokenizer(self._host.folder, text)
        return text

    async def _fetched(self) -> Text:
        """Return the text that other peers send, once its held-out part is here; of bytes, it lies in all files."""
        text, data = self._host.text, self._host.plan.manifest.data
        assert text is not None, "asked before"
        if data.tokenizer is None:
            while not text.is_whole():  # noqa: ASYNC110  # a thread without a loop fetches it
                await asyncio.sleep(LOOK_SECONDS)
            return await asyncio.to_thread(open_fetched_text, data, text.root)
        await text.fetch([INDEX_FILE, TOKENIZER_FILE])
        opened = await asyncio.to_thread(open_fetched_text, data, text.root)
        assert isinstance(opened, TokenText), "it has a tokenizer"
        await asyncio.to_thread(keep_tokenizer, self._host.folder, opened)  # exports need it before the held-out part
        await text.fetch(opened.files_of(opened.held_out_parts))
        return opened

    def _evaluation_on(self, text: Text) -> AnchorEvaluation | WholeEvaluation:
        """Return the evaluation of the run's model, which needs no base model unless the user has named one."""
        plan, own = self._host.plan, self._host.settings.model
        if plan.manifest.model.lora_rank and own is None:
            raise ConfigError("it needs the base model of these adapters; give its folder or hub id with --model")
        model = build_run_model(plan, own, founds=False) if plan.built_in is None else None
        return evaluation_of(plan, model, text)

    def _published(self, now: float) -> dict[PeerId, tuple[FragmentHead, ...]]:
        beats, members = self._host.engine.membership.liveness.alive(now), self._members()
        return {peer: beat.heads for peer, beat in beats.items() if peer in members and beat.ready}

    def _members(self) -> frozenset[PeerId]:
        roster = self._host.engine.book.in_force
        return frozenset(roster.peers() if roster is not None else ()) - {self._host.peer}

    async def _export_if_due(self, num_cycles: int) -> None:
        async with self._exporting:
            tips = self._tips()
            if self._folder is None or tips is None or not self._has_tokenizer():
                return
            cycle = due_cycle(num_cycles, self._exports.every, max(self._folder.newest, self._tried))
            if cycle is None:
                return
            self._tried = cycle
            await self._host.written()
            try:
                self._writing = asyncio.ensure_future(
                    asyncio.to_thread(_export, self._host, self._evaluation, cycle, tips, self._folder)
                )
                self._writing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                done = await asyncio.shield(self._writing)
            except Exception as error:  # this peer may be the one that keeps the run alive
                reason = str(error) if isinstance(error, P2PDilocoError) else f"{type(error).__name__}: {error}"
                next_cycle = cycle + self._exports.every
                self._say(f"cycle {cycle} was not exported: {reason}; cycle {next_cycle} is next")
                return
            self._report(cycle, done, self._folder.path(cycle))

    def _report(self, cycle: int, done: _Done, path: Path) -> None:
        reporter, loss = self._host.reporter, done.loss
        if loss is not None:
            reporter.note(anchor_loss=loss)
            last_round = cycle * self._host.plan.rules.clock.num_fragments - 1
            text = f"held-out loss {loss:.4f} (shared model)"
            reporter.report("evaluation", text, anchor_loss=loss, round=last_round)
        described = f", held-out loss {loss:.4f}" if loss is not None else ""
        self._say(f"wrote {path}{described}", cycle=cycle, state=done.state)
        self._say(*done.sentences)

    def _has_tokenizer(self) -> bool:
        """Return whether the tokenizer is here, if the run has one; it comes with the text."""
        manifest = self._host.plan.manifest
        if manifest.model.is_own_loop or manifest.data.tokenizer is None:
            return True
        return (self._host.folder / TOKENIZER_FILE).exists()

    def _tips(self) -> Mapping[SpanId, Digest] | None:
        """Return the digest that each span's log has reached; None while a span is missing."""
        states = self.held.moving_states() if self.held is not None else {}
        if len(states) < len(self._host.plan.places):
            return None
        return {span: state.head.digest for span, state in states.items()}

    def _say(self, *sentences: str, **figures: float | int | str) -> None:
        for sentence in sentences:
            self._host.reporter.report("export", sentence, **figures)


def _export(
    host: TrainingHost,
    evaluation: AnchorEvaluation | WholeEvaluation | None,
    cycle: int,
    tips: Mapping[SpanId, Digest],
    folder: ExportFolder,
) -> _Done:
    """Write one export; called in a thread.

    Raises:
        StateError: the state cannot be rebuilt, has not changed, or the export cannot be written.
    """
    plan = host.plan
    rounds = cycle * plan.rules.clock.num_fragments
    states = _rebuild(host, rounds, tips)
    state = state_digest([states[span] for span in sorted(states)]).hex()
    if state == folder.state:
        raise StateError(f"nothing has changed since {export_name(folder.newest)}")
    loss = _held_out_loss(host.plan, evaluation, states)
    learnt = learnt_model(plan, host.folder, states, rounds)
    del states  # as large as the model twice
    facts = replace(provenance_of(learnt, None), state=state, held_out_loss=loss)
    check = partial(check_export, learnt, host.settings.model)
    return _Done(state=state, loss=loss, sentences=folder.write(cycle, files_of(learnt, facts), state, check))


def _rebuild(host: TrainingHost, rounds: int, tips: Mapping[SpanId, Digest]) -> dict[SpanId, SpanState]:
    """Return all spans as they were after this number of rounds."""
    states: dict[SpanId, SpanState] = {}
    for span, tip in tips.items():
        state = host.archive.rebuild_before(span, rounds, tip)
        if state is None:
            raise StateError("the checkpoints and entries on this disk do not lead to its end")
        states[span] = state
    return states


def _held_out_loss(
    plan: RunPlan, evaluation: AnchorEvaluation | WholeEvaluation | None, states: Mapping[SpanId, SpanState]
) -> float | None:
    if evaluation is None:
        return None
    evaluation.begin()
    loss = None
    for part in evaluation.parts:
        loss = evaluation.take([anchor_slice(plan, states, each) for each in part])
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A finished export: its state, held-out loss, and a sentence about each older export that stays."""

    state: str
    loss: float | None
    sentences: tuple[str, ...]
