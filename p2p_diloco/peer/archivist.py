"""The archivist: a peer that trains nothing, follows the run, and exports its model every few cycles.

An export is of one agreed state: each span as it was after the last entry of the same cycle, rebuilt from a checkpoint
and the entries on this disk. So archivists that export equally often write the same parameters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from p2p_diloco.config.manifest import STANDARD_LIBRARY, RunManifest
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, P2PDilocoError, StateError
from p2p_diloco.ids import Digest, PeerId, SpanId, format_peer_id
from p2p_diloco.outer.state import SpanState, state_digest
from p2p_diloco.peer.evaluation import anchor_slice, evaluation_of
from p2p_diloco.peer.exported_model import check_export, files_of, provenance_of, why_not_reloaded
from p2p_diloco.peer.learnt_model import learnt_model
from p2p_diloco.peer.peer_plan import ExportPlan
from p2p_diloco.peer.run_model import build_run_model
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.peer.run_text import SharedText, keep_tokenizer, open_fetched_text, open_run_text
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.wire.heartbeat import FragmentHead
from p2p_diloco.rate import counted
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.storage.archive import Archive
from p2p_diloco.storage.export_folder import EXPORTS_FILE, ExportFolder, due_cycle, export_name
from p2p_diloco.text.data import Text
from p2p_diloco.text.token_shards import INDEX_FILE, TOKENIZER_FILE, TokenText
from p2p_diloco.training.evaluation import AnchorEvaluation, WholeEvaluation

LOOK_SECONDS = 1.0
FEWEST_CHECKPOINTS = 3
"""An archivist keeps at least so many, a cycle or more apart: one of them is then older than the cycle to export."""
CYCLES_REMEMBERED = 4


class Agreement:
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
        """Number of cycles that are over."""
        return max(min(self._level) // self._num_fragments + 1, 0)


def check_archivist(settings: PeerSettings, manifest: RunManifest) -> None:
    """Refuse a run whose exports would be incomplete here, and a copy of the text that is not the run's.

    Raises:
        ConfigError: what is missing or wrong.
    """
    data = manifest.data
    if settings.data is not None:
        if manifest.model.is_own_loop:
            raise ConfigError(
                f'"{manifest.name}" trains its own model, whose held-out loss an archivist cannot measure; leave out '
                "--data"
            )
        open_run_text(data, settings.data)
    elif data.tokenizer is not None and not data.share and not manifest.model.is_own_loop:
        raise ConfigError(
            "the exports of this run need its tokenizer, which comes with its text; give the path of your copy of the "
            "text with --data PATH"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivistParts:
    """The parts of a session that an archivist uses.

    Attributes:
        folder: the run's folder on this machine.
        tips: returns the chain digest that each span has reached; None while a span is missing.
        written: returns once all entries so far are on the disk.
        text: the run's text if it is fetched from other peers.
    """

    exports: ExportPlan
    plan: RunPlan
    settings: PeerSettings
    folder: Path
    me: PeerId
    engine: PeerEngine
    archive: Archive
    now: Callable[[], float]
    tips: Callable[[], Mapping[SpanId, Digest] | None]
    written: Callable[[], Awaitable[object]]
    reporter: StatusReporter
    text: SharedText | None = None


class Archivist:
    """Exports the model of a run while its peer follows the run."""

    def __init__(self, parts: ArchivistParts) -> None:
        self._parts = parts
        self._agreement = Agreement(parts.plan.rules.clock.num_fragments)
        self._evaluation: AnchorEvaluation | WholeEvaluation | None = None
        self._folder: ExportFolder | None = None
        self._exporting = asyncio.Lock()
        self._tried = 0
        """The latest cycle whose export was begun in this session, even if it failed."""

    async def run(self) -> None:
        """Export every few cycles, until cancelled.

        Raises:
            StateError: the list of exports cannot be read or written.
        """
        await self._open_folder()
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(self._open_text())
            if self._parts.text is None:
                await opening
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                engine, now = self._parts.engine, self._parts.now()
                if engine.ready and not engine.membership.is_paused:
                    self._agreement.note(engine.closed_heads(now), self._published(now), len(self._members()))
                    # What comes late to a round is there a cycle later.
                    await self._export_if_due(self._agreement.num_cycles - 1)

    async def finish(self, last_round: int) -> None:
        """Export the state after the last round, if that is due. Call it once all peers hold the same."""
        await self._export_if_due((last_round + 1) // self._parts.plan.rules.clock.num_fragments)

    async def _open_folder(self) -> None:
        parts = self._parts
        exports = parts.exports

        def open_folder() -> tuple[ExportFolder, tuple[str, ...]]:
            owner = format_peer_id(parts.me)[-8:]
            folder = ExportFolder(exports.folder, parts.folder / EXPORTS_FILE, keep=exports.keep, owner=owner)
            return folder, folder.tidy()

        folder, sentences = await asyncio.to_thread(open_folder)
        self._say(*sentences)
        cycles = counted(exports.every, "cycle") if exports.every > 1 else "cycle"
        unchecked = why_not_reloaded(parts.plan, parts.settings.model)
        kept = f"exports go to {exports.folder} every {cycles}; the newest {exports.keep} are kept"
        self._say(kept + (f"; {unchecked}" if unchecked is not None else ""))
        self._folder = folder

    async def _open_text(self) -> None:
        """Open the held-out text, and the tokenizer with it. Without a text, exports have no loss."""
        parts = self._parts
        data = parts.plan.manifest.data
        if parts.plan.manifest.model.is_own_loop:
            return
        if parts.text is None and parts.settings.data is None and data.path != STANDARD_LIBRARY:
            text = "the held-out loss is not measured, because it needs a copy of the run's text: --data PATH"
            parts.reporter.report("evaluation", text)
            return
        try:
            opened = await self._fetched() if parts.text is not None else await asyncio.to_thread(self._own_text)
            self._evaluation = await asyncio.to_thread(self._evaluation_on, opened)
        except ConfigError as error:
            parts.reporter.report("evaluation", f"the held-out loss is not measured: {error}")

    def _own_text(self) -> Text:
        text = open_run_text(self._parts.plan.manifest.data, self._parts.settings.data)
        keep_tokenizer(self._parts.folder, text)
        return text

    async def _fetched(self) -> Text:
        """Return the text that other peers send, once its held-out part is here; of bytes, it lies in all files."""
        text, data = self._parts.text, self._parts.plan.manifest.data
        assert text is not None, "asked before"
        if data.tokenizer is None:
            while not text.is_whole():  # noqa: ASYNC110  # a thread without a loop fetches it
                await asyncio.sleep(LOOK_SECONDS)
            return await asyncio.to_thread(open_fetched_text, data, text.root)
        await text.fetch([INDEX_FILE, TOKENIZER_FILE])
        opened = await asyncio.to_thread(open_fetched_text, data, text.root)
        assert isinstance(opened, TokenText), "it has a tokenizer"
        await asyncio.to_thread(keep_tokenizer, self._parts.folder, opened)  # exports need it before the held-out part
        await text.fetch(opened.files_of(opened.held_out_parts))
        return opened

    def _evaluation_on(self, text: Text) -> AnchorEvaluation | WholeEvaluation:
        """Return the evaluation of the run's model, which needs no base model unless the user has named one."""
        plan, own = self._parts.plan, self._parts.settings.model
        if plan.manifest.model.lora_rank and own is None:
            raise ConfigError("it needs the base model of these adapters; give its folder or hub id with --model")
        model = build_run_model(plan, own, founds=False) if plan.built_in is None else None
        return evaluation_of(plan, model, text)

    def _published(self, now: float) -> dict[PeerId, tuple[FragmentHead, ...]]:
        """Return the log positions that ready members have published last."""
        beats, members = self._parts.engine.membership.alive(now), self._members()
        return {peer: beat.heads for peer, beat in beats.items() if peer in members and beat.ready}

    def _members(self) -> frozenset[PeerId]:
        """Return the members on the roster besides this peer."""
        roster = self._parts.engine.book.in_force
        return frozenset(roster.peers() if roster is not None else ()) - {self._parts.me}

    async def _export_if_due(self, num_cycles: int) -> None:
        async with self._exporting:
            tips = self._parts.tips()
            if self._folder is None or tips is None or not self._has_tokenizer():
                return
            cycle = due_cycle(num_cycles, self._parts.exports.every, max(self._folder.newest, self._tried))
            if cycle is None:
                return
            self._tried = cycle
            await self._parts.written()
            try:
                done = await asyncio.to_thread(self._export, cycle, tips, self._folder)
            except Exception as error:  # this peer may be the one that keeps the run alive
                reason = str(error) if isinstance(error, P2PDilocoError) else f"{type(error).__name__}: {error}"
                next_cycle = cycle + self._parts.exports.every
                self._say(f"cycle {cycle} was not exported: {reason}; cycle {next_cycle} is next")
                return
            self._report(cycle, done, self._folder.path(cycle))

    def _report(self, cycle: int, done: _Done, path: Path) -> None:
        reporter, loss = self._parts.reporter, done.loss
        if loss is not None:
            reporter.anchor_loss = loss
            last_round = cycle * self._parts.plan.rules.clock.num_fragments - 1
            text = f"held-out loss {loss:.4f} (shared model)"
            reporter.report("evaluation", text, anchor_loss=loss, round=last_round)
        described = f", held-out loss {loss:.4f}" if loss is not None else ""
        self._say(f"wrote {path}{described}", cycle=cycle, state=done.state)
        self._say(*done.sentences)

    def _has_tokenizer(self) -> bool:
        """Return whether the tokenizer is here, if the run has one; it comes with the text."""
        manifest = self._parts.plan.manifest
        return manifest.data.tokenizer is None or (self._parts.folder / TOKENIZER_FILE).exists()

    def _export(self, cycle: int, tips: Mapping[SpanId, Digest], folder: ExportFolder) -> _Done:
        """Write one export; called in a thread.

        Raises:
            StateError: the state cannot be rebuilt, has not changed, or the export cannot be written.
        """
        parts, plan = self._parts, self._parts.plan
        rounds = cycle * plan.rules.clock.num_fragments
        states = self._rebuild(rounds, tips)
        state = state_digest([states[span] for span in sorted(states)]).hex()
        if state == folder.state:
            raise StateError(f"nothing has changed since {export_name(folder.newest)}")
        loss = self._held_out_loss(states)
        learnt = learnt_model(plan, parts.folder, states, rounds)
        del states  # as large as the model twice
        facts = replace(provenance_of(learnt, None), state=state, held_out_loss=loss)
        check = partial(check_export, learnt, parts.settings.model)
        return _Done(state=state, loss=loss, sentences=folder.write(cycle, files_of(learnt, facts), state, check))

    def _rebuild(self, rounds: int, tips: Mapping[SpanId, Digest]) -> dict[SpanId, SpanState]:
        """Return all spans as they were after this number of rounds."""
        states: dict[SpanId, SpanState] = {}
        for span, tip in tips.items():
            state = self._parts.archive.rebuild_before(span, rounds, tip)
            if state is None:
                raise StateError("the checkpoints and entries on this disk do not lead to its end")
            states[span] = state
        return states

    def _held_out_loss(self, states: Mapping[SpanId, SpanState]) -> float | None:
        if self._evaluation is None:
            return None
        self._evaluation.begin()
        loss = None
        for part in self._evaluation.parts:
            loss = self._evaluation.take([anchor_slice(self._parts.plan, states, each) for each in part])
        return loss

    def _say(self, *sentences: str, **figures: float | int | str) -> None:
        for sentence in sentences:
            self._parts.reporter.report("export", sentence, **figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A finished export: its state, held-out loss, and a sentence about each older export that stays."""

    state: str
    loss: float | None
    sentences: tuple[str, ...]
