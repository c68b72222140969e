"""A text: a training part, a fixed held-out part, and an endless stream of windows for each peer.

`Corpus` is a text of bytes, where each byte is a token; `TokenText` in `token_shards.py` has tokens of a tokenizer.

A peer's stream depends only on (run, peer, position). There is no rank and no world size, so peers may come and go,
and a restarted peer continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2p_diloco.app.text.mapped_files import MappedFiles, list_byte_files
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId, sha256

HELD_OUT_SHARE = 0.05
MIN_CORPUS_BYTES = 16_384
_STRIDE_BYTES = 327_680
"""The end of each stretch of about this length is held out, so that the held-out text resembles the rest. The end of a
sorted folder would cover other topics."""
_STREAM_DOMAIN = b"p2p-diloco batch stream 1"


class Text(Protocol):
    """Numbered tokens with a held-out part, the same on all machines with the same files. Not thread-safe.

    Attributes:
        train_parts, held_out_parts: (start, stop) of the stretches to train on and to evaluate on, int64, shape (S, 2).
    """

    train_parts: NDArray[np.int64]
    held_out_parts: NDArray[np.int64]

    @property
    def fingerprint(self) -> Digest:
        """The digest that a manifest names."""

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return a copy of tokens `start` to `stop`, within one stretch."""

    def windows_of_block(self, window: int) -> int | None:
        """Return the number of windows of that many tokens that form a block; None: all windows are one block."""

    def parts_of_block(self, seed: bytes, block: int) -> NDArray[np.int64]:
        """Return the stretches that a peer's windows of a block come from, as (start, stop)."""


class Corpus:
    """A text of bytes. Not thread-safe."""

    def __init__(self, files: MappedFiles, *, held_out_share: float = HELD_OUT_SHARE) -> None:
        if not 0.001 <= held_out_share <= 0.5:
            raise ConfigError(f"held-out share is {held_out_share}; expected at least 0.001 and at most 0.5")
        if files.num_bytes < MIN_CORPUS_BYTES:
            raise ConfigError(
                f"text is {files.num_bytes} bytes long; expected at least {MIN_CORPUS_BYTES}; "
                "name a longer file or more files"
            )
        self._files = files
        self.num_bytes = files.num_bytes
        strides = max(1, files.num_bytes // _STRIDE_BYTES)
        # Integer arithmetic: floats would be inexact for texts beyond 2**53 bytes, and could differ between machines.
        borders = [files.num_bytes * index // strides for index in range(strides + 1)]
        per_mille = round(held_out_share * 1000)
        cuts = [stop - (stop - start) * per_mille // 1000 for start, stop in pairwise(borders)]
        self.train_parts = np.array(list(zip(borders[:-1], cuts, strict=True)), dtype=np.int64)
        self.held_out_parts = np.array(list(zip(cuts, borders[1:], strict=True)), dtype=np.int64)

    @property
    def fingerprint(self) -> Digest:
        return self._files.fingerprint

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        return self._files.read(start, stop)

    def windows_of_block(self, window: int) -> int | None:
        """Return None: windows come from the whole text."""
        return None

    def parts_of_block(self, seed: bytes, block: int) -> NDArray[np.int64]:
        """Return the whole training text."""
        return self.train_parts

    def within(self, ranges: Sequence[tuple[int, int]]) -> Corpus:
        """Return a corpus with only the stretches that lie within one of these (start, stop) ranges, in order.

        The corpus has no training text if the ranges hold no whole stretch.
        """
        own = copy(self)
        own._keep_inside(ranges)
        return own

    def _keep_inside(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.train_parts = _inside(self.train_parts, ranges)
        self.held_out_parts = _inside(self.held_out_parts, ranges)


def _inside(parts: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Return the rows of `parts` that lie within one of the ranges, which are in order and apart."""
    starts, stops = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    index = np.searchsorted(starts, parts[:, 0], side="right") - 1
    is_inside = (
        (index >= 0) & (parts[:, 1] <= stops[np.maximum(index, 0)]) if len(starts) else np.zeros(len(parts), bool)
    )
    return parts[is_inside]


def open_corpus(
    path: str | Path | None = None, *, held_out_share: float = HELD_OUT_SHARE, is_arriving: bool = False
) -> Corpus:
    """Open the text at `path`; None is the source of the running Python's standard library.

    Args:
        is_arriving: its files have their lengths, but their bytes are still being fetched.
    Raises:
        ConfigError: the path does not exist, has no text, or the text is too short.
    """
    return Corpus(MappedFiles(list_byte_files(path), is_arriving=is_arriving), held_out_share=held_out_share)


class WindowIndex:
    """Numbers all windows of `window` tokens within single parts, 0 to `num_windows` - 1."""

    def __init__(self, parts: NDArray[np.int64], window: int, what: str) -> None:
        self._starts = parts[:, 0]
        counts = np.maximum(0, parts[:, 1] - parts[:, 0] - window + 1)
        self._stops = np.cumsum(counts)
        self._counts = counts
        self.num_windows = int(self._stops[-1])
        if self.num_windows < 1:
            longest = int((parts[:, 1] - parts[:, 0]).max())
            raise ConfigError(
                f"the {what} text has no stretch of {window} tokens (the longest has {longest}); "
                "name more text or choose a model with a shorter context"
            )

    def start_of(self, window: int) -> int:
        """Return the position in the text at which window `window` begins."""
        part = int(np.searchsorted(self._stops, window, side="right"))
        return int(self._starts[part] + window - (self._stops[part] - self._counts[part]))


class Batches(Protocol):
    """The source of an island's batches.

    Attributes:
        batch: windows of the next batch, which may be set; of an island of several ranks, each gets a part.
        context: predicted tokens in a window.
    """

    batch: int
    context: int

    def next_batch(self) -> Tensor:
        """Return the next windows for this process, int64 on the CPU, shape (batch or its part, context + 1)."""
        ...


class BatchStream:
    """One peer's endless stream of training windows, each drawn uniformly from the text of its block.

    A text of bytes is one block; of a text in shards, a block is a few of them.

    Attributes:
        position: number of windows drawn so far; set it to continue from a checkpoint.
        batch: windows of the next batch.
    """

    def __init__(self, corpus: Text, run: Digest, peer: PeerId, *, batch: int, context: int, position: int = 0) -> None:
        if batch < 1 or position < 0:
            raise ConfigError(f"batch is {batch} and position {position}; expected at least 1 and at least 0")
        self._corpus = corpus
        self._seed = _STREAM_DOMAIN + run + peer
        self.context = context
        self._block_windows = corpus.windows_of_block(context + 1)
        WindowIndex(corpus.train_parts, context + 1, "training")  # refuses a text without windows at once
        self._block, self._windows = -1, self._windows_of(0)
        self.position = position
        self.batch = batch

    def next_batch(self) -> Tensor:
        """Return the next batch of windows, int64 on the CPU, shape (batch, context + 1)."""
        rows = [self._window(self.position + row) for row in range(self.batch)]
        self.position += self.batch
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def parts_ahead(self, num_windows: int) -> NDArray[np.int64]:
        """Return the stretches, as (start, stop), of the block of the window that is `num_windows` ahead."""
        block = 0 if self._block_windows is None else (self.position + num_windows) // self._block_windows
        return self._corpus.parts_of_block(self._seed, block)

    def parts_of_next(self, num_windows: int) -> NDArray[np.int64]:
        """Return the stretches of all blocks of the next windows."""
        places = range(0, num_windows, self._block_windows or num_windows)
        return np.concatenate([self.parts_ahead(place) for place in (*places, num_windows - 1)])

    def block_ahead(self) -> NDArray[np.int64]:
        return self.parts_ahead(self._block_windows or 0)

    def _windows_of(self, block: int) -> WindowIndex:
        return WindowIndex(self._corpus.parts_of_block(self._seed, block), self.context + 1, "training")

    def _window(self, position: int) -> NDArray[Any]:
        block = position // self._block_windows if self._block_windows is not None else 0
        if block != self._block:
            self._block, self._windows = block, self._windows_of(block)
        draw = int.from_bytes(sha256(self._seed, position.to_bytes(8, "little"))[:16], "little")
        # 128 random bits modulo the count: the bias is below 2**-64 for any text.
        start = self._windows.start_of(draw % self._windows.num_windows)
        return self._corpus.read(start, start + self.context + 1)


def held_out_windows(corpus: Text, *, context: int, num_windows: int) -> Tensor:
    """Return a fixed, evenly spread set of held-out windows, int64, shape (at most num_windows, context + 1).

    Raises:
        ConfigError: every held-out stretch is shorter than one window.
    """
    index = WindowIndex(corpus.held_out_parts, context + 1, "held-out")
    num_windows = min(num_windows, index.num_windows)
    starts = (index.start_of(index.num_windows * window // num_windows) for window in range(num_windows))
    return torch.from_numpy(np.stack([corpus.read(start, start + context + 1) for start in starts]).astype(np.int64))
