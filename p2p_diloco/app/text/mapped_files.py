"""A text of bytes: its files, end to end."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.app.text.token_shards import is_shard_folder
from p2p_diloco.app.text.unpacked import HEAD_BYTES, is_packed, why_no_text
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, sha256
from p2p_diloco.storage.corpus_files import list_corpus_files

_FINGERPRINT_PIECES = 1024
_FINGERPRINT_PIECE_BYTES = 16_384


def list_byte_files(path: str | Path | None) -> tuple[Path, ...]:
    """Return the files of a text whose bytes are trained on as they are, or of a folder of tokens.

    Raises:
        ConfigError: the path has no text, or a file holds it in another form, such as compressed.
    """
    files = list_corpus_files(path)
    for file in () if path is None or is_shard_folder(Path(path).expanduser()) else files:
        try:
            with file.open("rb") as opened:
                head = opened.read(HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"text {file} cannot be read ({error.strerror}); make it readable") from None
        if (why := why_no_text(head)) is not None:
            raise ConfigError(f"{file} {why[0]}; {why[1]}")
        if is_packed(head):
            raise ConfigError(
                f"{file} is compressed or a table, and without a tokenizer a run trains on the bytes as they are; "
                "unpack it, or make tokens of it with p2p-diloco tokenize"
            )
    return files


class MappedFiles:
    """Concatenated files as one read-only text of bytes.

    A file is opened for each read, which costs some microseconds: a map of a file that becomes shorter kills the
    process (SIGBUS), and shows other bytes once the file is overwritten. A new modification time, as a backup or a copy
    sets it, is compared by the fingerprint.

    Args:
        is_arriving: the files have their lengths, but their bytes are still being fetched.

    Attributes:
        num_bytes: length of the text.
    """

    def __init__(self, files: tuple[Path, ...], *, is_arriving: bool = False) -> None:
        self._files = files
        self._is_arriving = is_arriving
        self._stamps = [self._stamp(file.stat()) for file in files]
        self._stops = np.cumsum(self.file_sizes, dtype=np.int64)
        self.num_bytes = int(self._stops[-1])

    @property
    def file_sizes(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self._stamps)

    @cached_property
    def fingerprint(self) -> Digest:
        """Digest over the sizes and 1,024 evenly spread pieces of 16 KiB: a text of up to 16 MiB is covered fully.

        The bound keeps the start fast even with a terabyte of text.
        """
        sizes = np.array(self.file_sizes, dtype="<i8").tobytes()
        pieces = min(_FINGERPRINT_PIECES, -(-self.num_bytes // _FINGERPRINT_PIECE_BYTES))
        starts = (self.num_bytes * index // pieces for index in range(pieces))
        return sha256(
            sizes,
            *(self.read(start, min(start + _FINGERPRINT_PIECE_BYTES, self.num_bytes)).tobytes() for start in starts),
        )

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a copy of bytes `start` to `stop`, which may span several files.

        Raises:
            ConfigError: a file has changed since it was opened, or cannot be read.
        """
        if not 0 <= start <= stop <= self.num_bytes:
            raise ValueError(f"bytes {start} to {stop} are not within a text of {self.num_bytes}")
        pieces: list[bytes] = []
        index = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            file_stop = int(self._stops[index])
            file_start = file_stop - self._stamps[index][0]
            pieces.append(self._read(index, start - file_start, min(stop, file_stop) - file_start))
            start = file_stop
            index += 1
        return np.frombuffer(bytearray().join(pieces), np.uint8)

    def _read(self, index: int, start: int, stop: int) -> bytes:
        file, expected = self._files[index], self._stamps[index]
        try:
            with file.open("rb") as opened:
                found = self._stamp(os.fstat(opened.fileno()))
                opened.seek(start)
                piece = opened.read(stop - start)
            is_same = found == expected or (found[0] == expected[0] and self._has_same_fingerprint())
        except OSError as error:
            raise ConfigError(f"text {file} cannot be read ({error}); make it readable and start again") from error
        if not is_same or len(piece) < stop - start:
            raise ConfigError(
                f"text {file} is not what it was when training began ({expected[0]} bytes then, {found[0]} now); put "
                "the run's text back and start again"
            )
        return piece

    def _has_same_fingerprint(self) -> bool:
        """Return whether the files are what they were when the fingerprint was taken; if so, take their new times."""
        if "fingerprint" not in vars(self):
            return False
        now = MappedFiles(self._files)
        is_same = now.fingerprint == self.fingerprint
        if is_same:
            self._stamps = now._stamps
        return is_same

    def _stamp(self, found: os.stat_result) -> tuple[int, int]:
        return found.st_size, 0 if self._is_arriving else found.st_mtime_ns
