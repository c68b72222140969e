"""The agreed state on a peer's disk: checkpoints, later entries, and the state rebuilt from both.

A checkpoint plus the entries after it give the current bytes. So nothing on disk is lost even if all peers are killed
at once, and a peer can check whether its memory is sound.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from p2p_diloco.errors import FrameError, NonFiniteUpdate, StateError
from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.state import SpanState, absorb
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.storage.checkpoint import CheckpointFolder
from p2p_diloco.storage.entry_log import EntryLog

ENTRIES_FOLDER = "entries"
TOGETHER_BYTES = 16 * 1024 * 1024
"""Maximum bytes of vectors written at once: requests for an entry wait meanwhile, and a failed write loses all."""
LONGEST_PAUSE_SECONDS = 300.0
SHORTEST_PAUSE_SECONDS = 10.0
LOOK_SECONDS = 1.0
ROOM_TO_RETURN = 0.9
"""Share of a limit into which everything must fit before a peer writes all again: otherwise it would stop at once."""


class ReplayPlan(Protocol):
    """The part of a run plan that an archive needs: how entries are kept, decoded and applied."""

    @property
    def rules(self) -> RunRules: ...

    @property
    def codecs(self) -> Codecs: ...

    @property
    def outer(self) -> OuterRule: ...


class Saving(enum.Enum):
    """The part of its state that a peer writes to its disk."""

    ALL = "all"
    NEWEST = "only the newest checkpoint"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRules:
    """The owner's limits in bytes; None: no limit.

    Attributes:
        cap: maximum size of the state directory.
        free: space to leave free on its disk.
    """

    cap: float | None = None
    free: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes on the disk, and bytes that would be written to it.

    Attributes:
        used: in the state directory.
        free: free space on its disk.
        checkpoint: size of the next checkpoint.
        num_checkpoints: number of checkpoints that a peer without limits keeps.
    """

    used: float
    free: float
    checkpoint: float = 0.0
    num_checkpoints: int = 1


def judge_disk(rules: DiskRules, use: DiskUse, before: Saving) -> Saving:
    """Return what to write from now on; call it again a moment after each change, once its effect shows.

    A checkpoint is written before an older one is removed, so there must be room for one more.
    """
    if _fits(rules, use, 1, 1.0):
        is_roomy = before is Saving.ALL or _fits(rules, use, use.num_checkpoints, ROOM_TO_RETURN)
        return Saving.ALL if is_roomy else before
    return Saving.NEWEST if before is Saving.ALL else Saving.NOTHING


def _fits(rules: DiskRules, use: DiskUse, num_more: int, share: float) -> bool:
    more = num_more * use.checkpoint
    fits_cap = rules.cap is None or use.used + more <= share * rules.cap
    return fits_cap and (rules.free is None or use.free - more >= rules.free / share)


class Archive:
    """An `EntryArchive` of the swarm, and the source of a peer's state when it starts.

    Args:
        folder: the run's folder on this machine.
        soon: runs functions on the writer thread, one at a time.
        report: called with `(topic, text)` about the disk, from any thread.
    Raises:
        StateError: the folder of the entries cannot be created or read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        plan: ReplayPlan,
        keep: int,
        soon: Callable[[Callable[[], None]], object],
        report: Callable[[str, str], None],
    ) -> None:
        self.checkpoints = CheckpointFolder(folder, run=plan.rules.run, elements=plan.rules.span_elements, keep=keep)
        self.saving = Saving.ALL
        """The part that is written, by the limits of the machine's owner; see `limit_saving`."""
        self._keep = keep
        self.wants_checkpoint = False
        """Whether a span was replaced since the last checkpoint, so that the entries on disk do not lead to it."""
        self._plan = plan
        self._soon = soon
        self._report = report
        self._is_refused = False
        self._num_given_up = 0
        self._rebuilt_from: dict[SpanId, int] = {}
        """The height of the checkpoint from which a span was last rebuilt."""
        self._distrusted: dict[SpanId, list[range]] = {}
        """Spans whose bytes were corrected since the start, and the heights at which checkpoints may be wrong."""
        self._waiting: deque[Entry | SpanId] = deque()
        self._is_called = False
        self._log = EntryLog(folder / ENTRIES_FOLDER, keep_cycles=plan.rules.retained_cycles)

    # -- for the swarm

    def keep_entry(self, entry: Entry) -> None:
        """Schedule writing an entry; a failing disk is reported once, and once more when it works again."""
        if self.saving is Saving.NOTHING:
            self.wants_checkpoint = True  # the entries on disk no longer lead to the present
            return
        self._write_soon(entry)

    def give_up(self, span: SpanId) -> None:
        self.wants_checkpoint = True
        self._write_soon(span)

    def distrust(self, span: SpanId, height: int, *, is_mended: bool) -> None:
        """Rebuild a span from no checkpoint up to `height`: its bytes were wrong, and may be wrong there too.

        Without this, the next comparison would replace the right bytes by the wrong ones of a checkpoint.

        Args:
            is_mended: whether it was rebuilt here; then the checkpoint that was used stays trusted.
        """
        self.wants_checkpoint = True
        first = self._rebuilt_from.get(span, -1) + 1 if is_mended else 0
        self._distrusted.setdefault(span, []).append(range(first, height + 1))

    def entry_after(self, span: SpanId, parent: Digest) -> Entry | None:
        return self._log.entry_after(span, parent)

    def rebuild(self, span: SpanId, digest: Digest) -> SpanState | None:
        """Return the span at chain digest `digest`, from the oldest checkpoint that leads there.

        The oldest is used because newer checkpoints may contain a flipped bit from memory.
        """
        for state in self._trusted(span):
            for reached in self._history(state, span):
                if reached.head.digest == digest:
                    self._rebuilt_from[span] = state.head.height
                    return reached
        return None

    def rebuild_parent(self, span: SpanId, tip: Digest) -> SpanState | None:
        """Return the span before the entry that led to `tip`, from the oldest checkpoint that leads there."""
        for state in self._trusted(span):
            for before, reached in pairwise(self._history(state, span)):
                if reached.head.digest == tip:
                    self._rebuilt_from[span] = state.head.height
                    return before
        return None

    def rebuild_before(self, span: SpanId, round_index: int, tip: Digest) -> SpanState | None:
        """Return the span as it was before the entries of a round and later ones; None if this disk does not show it.

        Args:
            tip: chain digest that the span has reached. Without a later entry on the disk, this must be the result.
        """
        for state in self._trusted(span):
            if state.head.round >= round_index:
                return None
            reached = deque(self._history(state, span, before=round_index), maxlen=1)[0]
            following = self._log.entry_after(span, reached.head.digest)
            if reached.head.digest == tip or (following is not None and following.round >= round_index):
                return reached
        return None

    def _trusted(self, span: SpanId) -> Iterator[SpanState]:
        """Yield a span from each checkpoint that is not distrusted, oldest first."""
        for state in self.checkpoints.load_span(span):
            if not any(state.head.height in heights for heights in self._distrusted.get(span, ())):
                yield state

    def limit_saving(self, saving: Saving) -> None:
        """Write less from now on, or all again; what the newest checkpoint needs is always kept.

        Call it in the loop; the files are removed on the writer thread.
        """
        self.saving = saving
        self._soon(self._thin_out)

    def _thin_out(self) -> None:
        try:
            self.checkpoints.keep_only(self._keep if self.saving is Saving.ALL else 1)
            if self.saving is not Saving.ALL:
                self._log.drop_before_checkpoint()
        except (OSError, StateError) as error:
            self._report("disk", f"cannot remove old checkpoints: {error}")

    def _write_soon(self, what: Entry | SpanId) -> None:
        self._waiting.append(what)
        if not self._is_called:
            self._is_called = True
            self._soon(self._write_all)

    def _write_all(self) -> None:
        """Write everything in the queue, then sync once."""
        self._is_called = False  # reset first, so that items added during the last write are not missed
        if not self._waiting:
            return
        try:
            while self._waiting:
                self._write_next()
            self._log.sync()
        except StateError as error:
            self._report_refused(str(error))
            return
        self._report_refused("")
        if self._log.num_given_up > self._num_given_up:
            self._report("entries", "the disk is full; deleted the entries of the oldest cycles to make room")
        self._num_given_up = self._log.num_given_up

    def _write_next(self) -> None:
        """Write the first item in the queue, together with further entries up to `TOGETHER_BYTES`."""
        first = self._waiting.popleft()
        if isinstance(first, SpanId):
            self._log.give_up(first)
            return
        entries, room = [first], TOGETHER_BYTES - len(first.payload)
        while self._waiting and isinstance(following := self._waiting[0], Entry) and len(following.payload) <= room:
            entries.append(following)
            room -= len(following.payload)
            self._waiting.popleft()
        self._log.keep(entries)

    def _report_refused(self, sentence: str) -> None:
        """Report once that the disk fails, and once that it works again."""
        if sentence and not self._is_refused:
            self._report("entries", sentence)
        elif self._is_refused and not sentence:
            self._report("entries", "writing entries to disk again")
        self._is_refused = bool(sentence)

    # -- for the start and checkpoints

    def make_room(self) -> bool:
        """Delete the oldest entries to free space for more important data; return whether that freed any."""
        return self._log.make_room()

    def recall(self) -> dict[SpanId, SpanState] | None:
        """Return the state on this disk: the newest sound checkpoint with all later entries applied."""
        states, refused = self.checkpoints.load_newest()
        for sentence in refused:
            self._report("checkpoint", sentence)
        if states is None:
            return None
        self._log.note_checkpoint(_heights(states))
        recalled = {span: deque(self._history(state, span), maxlen=1)[0] for span, state in states.items()}
        num_entries = sum(recalled[span].head.height - state.head.height for span, state in states.items())
        if num_entries:
            entries = "1 entry" if num_entries == 1 else f"{num_entries} entries"
            self._report("replay", f"replayed {entries} from disk on top of the checkpoint")
        return recalled

    def save(self, states: Mapping[SpanId, SpanState]) -> None:
        """Write a checkpoint.

        Raises:
            StateError: the write failed; earlier checkpoints are kept.
        """
        self.wants_checkpoint = False
        heights = _heights(states)  # read first, since spans advance during the write
        self.checkpoints.save(states)
        self._log.note_checkpoint(heights)
        if self.saving is not Saving.ALL:
            self._log.drop_before_checkpoint()

    def _history(self, state: SpanState, span: SpanId, before: int | None = None) -> Iterator[SpanState]:
        """Yield a state and those to which the entries on disk lead, in parent order; only entries `before` a round."""
        reached: SpanState | None = state
        while reached is not None:
            yield reached
            reached = self._follow_one(reached, span, before)

    def _follow_one(self, state: SpanState, span: SpanId, before: int | None) -> SpanState | None:
        """Apply the next entry on disk; None if there is none, it is of a later round, or it cannot be applied."""
        entry = self._log.entry_after(span, state.head.digest)
        if entry is None or (before is not None and entry.round >= before):
            return None
        try:
            update_N = self._plan.codecs.entry.decode(entry.payload, state.elements)
            return absorb(state, entry=entry.absorbed(), update_N=update_N, rule=self._plan.outer)
        except (FrameError, NonFiniteUpdate, StateError) as error:
            self._report("entries", f"a stored entry of {span} cannot be replayed: {error}")
            return None


def _heights(states: Mapping[SpanId, SpanState]) -> dict[SpanId, int]:
    return {span: state.head.height for span, state in states.items()}


def pause_between_checkpoints(rules: RunRules, keep: int, *, archives: bool = False) -> float:
    """Return the seconds between checkpoints, such that even the oldest of `keep` is newer than the oldest entry.

    Args:
        archives: whether the oldest must also be older than the last whole cycle, from which an archivist exports.
    """
    retained_seconds = rules.retained_cycles * rules.clock.num_fragments * rules.clock.round_seconds
    pause_seconds = min(max(retained_seconds / (keep + 1), SHORTEST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
    return max(pause_seconds, rules.cycle_seconds) if archives else pause_seconds


class Saver:
    """Writes checkpoints; a failed write is reported and retried.

    Args:
        states: returns a live view of all spans, or None while one is missing.
        is_ready: returns whether this peer holds the agreed state.
        saved: called after each checkpoint.
        report: called with `(topic, text)` if a write fails.
    """

    def __init__(
        self,
        archive: Archive,
        *,
        states: Callable[[], Mapping[SpanId, SpanState] | None],
        is_ready: Callable[[], bool],
        pause_seconds: float,
        saved: Callable[[], None] = lambda: None,
        report: Callable[[str, str], None],
    ) -> None:
        self._archive = archive
        self._states = states
        self._is_ready = is_ready
        self._pause_seconds = pause_seconds
        self._saved = saved
        self._report = report
        self._writing = threading.Lock()

    async def run(self) -> None:
        """Save periodically until cancelled: soon after the start, and after a span was replaced."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._is_ready() and (loop.time() >= due or self._archive.wants_checkpoint):
                await self.save()
                due = loop.time() + self._pause_seconds

    async def save(self) -> None:
        """Save now if all spans are present, and the limits of the machine's owner allow it."""
        states = self._states()
        if states is None or self._archive.saving is Saving.NOTHING:
            return
        try:
            await asyncio.to_thread(self._write, states)
        except StateError as error:
            self._report("checkpoint", str(error))
        else:
            self._saved()

    def _write(self, states: Mapping[SpanId, SpanState]) -> None:
        with self._writing:  # a thread goes on writing although the task that waits for it is cancelled
            self._archive.save(states)
