"""The text of a run on this machine: the standard library's source, the user's copy, or what other peers send.

A training may begin with the first files of a text that is fetched, and need never wait for the last.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from p2p_diloco.app.text.data import BatchStream, Corpus, Text, open_corpus
from p2p_diloco.app.text.token_shards import INDEX_FILE, TokenText, is_shard_folder
from p2p_diloco.config.manifest import STANDARD_LIBRARY, DataSection
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId
from p2p_diloco.session.shared_text import SharedText
from p2p_diloco.storage.run_folder import TOKENIZER_FILE
from p2p_diloco.storage.text_copy import available_ranges
from p2p_diloco.storage.whole_file import replace_file

STARTS = 1 << 24
WINDOWS_OF_ONE_START = 1 << 40
"""Each start of a peer draws from its own positions, so that one that restarts often does not repeat the same text."""


def open_run_text(data: DataSection, own_copy: str | None) -> Text:
    """Open the text to train on.

    Args:
        data: the manifest's data section; its path is never opened, because it could name private files.
        own_copy: path of this machine's copy; None for the standard library.
    Raises:
        ConfigError: the run needs a copy and none is named, it cannot be read, or it differs from the run's text.
    """
    if own_copy is None and data.path != STANDARD_LIBRARY:
        raise ConfigError(f'this run trains on "{data.path}"; give the path of your copy of that text with --data PATH')
    corpus: Text
    if data.tokenizer is not None:
        assert own_copy is not None, "the standard library is a text of bytes"
        if not is_shard_folder(Path(own_copy)):
            raise ConfigError(
                f"this run trains on tokens, and {own_copy} has no {INDEX_FILE}; give a copy of the folder "
                "that the organiser made with p2p-diloco tokenize"
            )
        corpus = TokenText(Path(own_copy))
        if corpus.index.tokenizer != data.tokenizer:
            raise ConfigError(
                f"the tokens at {own_copy} were made with the tokenizer {corpus.index.tokenizer[:16]}…, the run "
                f"expects {data.tokenizer[:16]}…; get the folder that the organiser names"
            )
    else:
        corpus = open_corpus(own_copy, held_out_share=data.held_out)
    if data.fingerprint is not None and corpus.fingerprint.hex() != data.fingerprint:
        raise ConfigError(
            f"the text at {own_copy or 'the standard library'} has fingerprint {corpus.fingerprint.hex()[:16]}…, the "
            f"run expects {data.fingerprint[:16]}…; get the text that the organiser names"
        )
    return corpus


def open_fetched_text(data: DataSection, root: Path) -> Text:
    """Open a text that was fetched to `root`; it may have gaps, because its pieces were compared as they came.

    Raises:
        ConfigError: it is not of the kind that the run names.
    """
    if data.tokenizer is not None:
        return open_run_text(data, str(root))
    return open_corpus(str(root), held_out_share=data.held_out, is_arriving=True)


def keep_tokenizer(folder: Path, text: Text) -> None:
    """Write the tokenizer of a text of tokens into the run's folder, for `export`, which has only this folder."""
    if isinstance(text, TokenText):
        replace_file(folder / TOKENIZER_FILE, text.tokenizer())


def open_stream(corpus: Text, plan: RunPlan, peer: PeerId, incarnation: int) -> BatchStream:
    """Return a peer's stream of text windows, at the position of this start."""
    return open_own_stream(corpus, plan, peer, first_position(incarnation))


def first_position(incarnation: int) -> int:
    """Return the position of a start in its peer's stream of windows."""
    return (incarnation - 1) % STARTS * WINDOWS_OF_ONE_START


def open_own_stream(corpus: Text, plan: RunPlan, peer: PeerId, position: int) -> BatchStream:
    """Return a peer's stream of text windows, from `position` on."""
    inner, run = plan.inner, plan.rules.run
    return BatchStream(corpus, run, peer, batch=inner.batch, context=plan.context, position=position)


FIRST_BYTES = 4 << 20
"""Part of the text with which training begins, or all of a shorter text."""
WORTH_ADDING = 1.25
"""Factor by which the part that is here must grow before training uses what was added."""


class ArrivingText:
    """Batches from a text that is still arriving. Call it from the training thread.

    A text of bytes is one block, so training begins with the first megabytes and takes up what is added. Once all of
    it is here, the windows are those of a peer with its own copy at the same position. Of a text of tokens, a peer
    reads a few shards at a time: those of its own block are fetched first, then those of the next one, and its windows
    are always those of a peer with its own copy.

    Args:
        open_whole: opens the text in the folder of the files, of which some may have gaps.
        stream_of: returns a stream over a text, from a position on.
        opened: called once with the text.
        batch, context: windows of the first batch, and predicted tokens in a window.
        position: windows drawn by earlier starts.
        is_tokens: whether the text is a folder of shards of tokens.
        needs_all: wait for the whole text, if it is one of bytes.
        peer: this peer; peers begin with different files.
    """

    def __init__(
        self,
        text: SharedText,
        *,
        open_whole: Callable[[], Text],
        stream_of: Callable[[Text, int], BatchStream],
        opened: Callable[[Text], None] = lambda text: None,
        batch: int,
        context: int,
        position: int,
        is_tokens: bool,
        needs_all: bool,
        peer: PeerId,
    ) -> None:
        self.open_whole = open_whole
        self.position = position
        self.batch = batch
        self.context = context
        self.is_whole = False
        """Whether the stream is that of the whole text."""
        self._text = text
        self._stream_of = stream_of
        self._opened = opened
        self._is_tokens = is_tokens
        self._needs_all = needs_all
        self._peer = peer
        self._layout: Text | None = None
        self._stream: BatchStream | None = None
        self._used_pieces = 0
        self._has_batch = False
        self._held_out: tuple[str, ...] = ()

    def has_held_out(self) -> bool:
        """Return whether the held-out part is here; of bytes, it lies in all files. Callable from any thread."""
        return self._text.has(self._held_out) if self._held_out else self._text.is_whole()

    def is_ready(self) -> bool:
        """Return whether a batch can be drawn; looks for text that was added."""
        if not self.is_whole:
            self._look()
        return self._has_batch

    @property
    def has_begun(self) -> bool:
        """Whether a batch could be drawn when it was last asked for."""
        return self._has_batch

    def next_batch(self) -> Tensor:
        """Return the next batch; call it only when `is_ready`."""
        assert self._stream is not None, "asked before"
        self._stream.batch = self.batch
        batch = self._stream.next_batch()
        self.position = self._stream.position
        return batch

    def _look(self) -> None:
        if self._text.store.listed is None:
            return
        if self._layout is None:
            first = [INDEX_FILE, TOKENIZER_FILE] if self._is_tokens else self._first_names()
            self._text.want(first)
            if self._is_tokens and not self._text.has(first):
                return
            # Files of bytes have their full lengths from the beginning, so the stretches are those of the whole text.
            self._layout = self.open_whole()
            if isinstance(self._layout, TokenText):
                self._held_out = self._layout.files_of(self._layout.held_out_parts)
            self._opened(self._layout)
        if self._text.is_whole():
            self.is_whole = self._has_batch = True
            self._stream = self._stream_of(self._layout, self.position)
        elif isinstance(self._layout, TokenText):
            self._look_for_shards(self._layout)
        elif isinstance(self._layout, Corpus) and not self._needs_all:
            self._look_for_bytes(self._layout)

    def _look_for_shards(self, layout: TokenText) -> None:
        stream = self._stream = self._stream or self._stream_of(layout, self.position)
        needed = layout.files_of(stream.parts_of_next(self.batch))
        self._has_batch = self._text.has(needed)
        ahead = layout.files_of(stream.block_ahead())
        self._text.want((*needed, *ahead, *self._held_out) if self._has_batch else needed)

    def _look_for_bytes(self, layout: Corpus) -> None:
        listed, held = self._text.store.listed, self._text.store.held
        assert listed is not None, "asked before"
        here = held.bit_count()
        if here <= WORTH_ADDING * self._used_pieces:
            return
        ranges = available_ranges(listed, held)
        corpus = layout.within(ranges)
        if sum(stop - start for start, stop in ranges) >= FIRST_BYTES and len(corpus.train_parts):
            self._used_pieces = here
            self._stream = self._stream_of(corpus, self.position)
            self._has_batch = True

    def _first_names(self) -> list[str]:
        """Return the files to begin with: from this peer's own place in the text on, until they are long enough."""
        listed = self._text.store.listed
        assert listed is not None, "known before"
        first = listed.piece(int.from_bytes(self._peer[:8], "little") % listed.num_pieces).file
        names, num_bytes = [], 0
        for file in (*listed.files[first:], *listed.files[:first]):
            if num_bytes >= FIRST_BYTES:
                break
            names.append(file.name)
            num_bytes += file.num_bytes
        return names
