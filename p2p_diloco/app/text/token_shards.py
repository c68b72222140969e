"""A text as shards of tokens: files of little-endian integers, listed in an index with their SHA-256.

`p2p-diloco tokenize` writes such a folder: `index.json`, `tokenizer-files.json` and the shards. The manifest holds the
digest of the index, so one digest fixes tokenizer, text, weights of its sources, and the held-out part.

A peer trains on a few shards at a time: a block of windows comes from shards that are drawn from (run, peer, block). So
a peer needs only the shards of its current block, and still has no rank and an exact position after a restart.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import DIGEST_BYTES, Digest, sha256
from p2p_diloco.storage.run_folder import TOKENIZER_FILE

INDEX_FILE = "index.json"
INDEX_FORMAT = 2
MOST_INDEX_BYTES = 16 * 1024 * 1024
MOST_TOKENS_IN_SHARD = 1 << 26
SHARDS_OF_A_BLOCK = 4
"""Shards that a peer draws windows from at a time."""
_SHARD_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_DIGEST_TEXT = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of tokens."""

    name: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Shards of one origin.

    Attributes:
        name: what it was made from, for people.
        weight: share of the training windows that come from it, relative to other sources.
    """

    name: str
    weight: float
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The list of all shards of a text, and how its tokens were made.

    Attributes:
        vocabulary: number of tokens of the tokenizer; all tokens are smaller.
        tokenizer: SHA-256 of `tokenizer-files.json` in hexadecimal digits.
        end_token: token between documents; None: documents follow each other directly.
        bytes_per_token: mean length of a training token in bytes of UTF-8, for people.
        sources: shards to train on.
        held_out: shards to evaluate on.
    """

    vocabulary: int
    tokenizer: str
    end_token: int | None
    bytes_per_token: float
    sources: tuple[Source, ...]
    held_out: tuple[Shard, ...]

    def encode(self) -> bytes:
        """Return canonical JSON."""
        document = {
            "format": INDEX_FORMAT,
            "vocabulary": self.vocabulary,
            "tokenizer": self.tokenizer,
            "end_token": self.end_token,
            "bytes_per_token": self.bytes_per_token,
            "sources": [
                {"name": each.name, "weight": each.weight, "shards": [_row(shard) for shard in each.shards]}
                for each in self.sources
            ],
            "held_out": [_row(shard) for shard in self.held_out],
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")

    @property
    def digest(self) -> Digest:
        """The digest that a manifest names."""
        return sha256(self.encode())

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All shards: those to train on, source by source, then those to evaluate on."""
        return (*(shard for source in self.sources for shard in source.shards), *self.held_out)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")


def decode_index(encoded: bytes, place: str) -> ShardIndex:
    """Parse an index.

    Args:
        place: name of the file, for errors.
    Raises:
        ConfigError: it is not a valid index.
    """
    try:
        document = json.loads(encoded)
        if document["format"] != INDEX_FORMAT:
            raise ValueError(f"it has format {document['format']!r}; this version reads format {INDEX_FORMAT}")
        index = ShardIndex(
            vocabulary=_whole(document["vocabulary"], 1 << 24),
            tokenizer=_digest_text(document["tokenizer"]),
            end_token=None if document["end_token"] is None else _whole(document["end_token"], 1 << 24, least=0),
            bytes_per_token=_positive(document["bytes_per_token"]),
            sources=tuple(
                Source(name=str(each["name"]), weight=_positive(each["weight"]), shards=_shards(each["shards"]))
                for each in document["sources"]
            ),
            held_out=_shards(document["held_out"]),
        )
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(
            f"{place} is not a valid index of shards ({error}); make it again with p2p-diloco tokenize"
        ) from None
    names = [shard.name for shard in index.shards]
    is_empty = not index.sources or not index.held_out or not all(source.shards for source in index.sources)
    if is_empty or len(set(names)) < len(names):
        raise ConfigError(f"{place} lists no shards, or one twice; make it again with p2p-diloco tokenize")
    if index.encode() != encoded:
        raise ConfigError(f"{place} is not in canonical form; make it again with p2p-diloco tokenize")
    return index


def is_shard_folder(path: Path) -> bool:
    return (path / INDEX_FILE).is_file()


class TokenText:
    """A text of token shards. Not thread-safe.

    Attributes:
        index: the index, checked.
        train_parts, held_out_parts: those of each shard, as `Text` has them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / INDEX_FILE
        try:
            with path.open("rb") as file:
                encoded = file.read(MOST_INDEX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        if len(encoded) > MOST_INDEX_BYTES:
            raise ConfigError(f"{path} is longer than {MOST_INDEX_BYTES} bytes; is it the right file?")
        self.index = decode_index(encoded, str(path))
        self._shards = self.index.shards
        self._stops = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        parts = np.stack([self._stops - [shard.tokens for shard in self._shards], self._stops], axis=1)
        split = len(self._shards) - len(self.index.held_out)
        self.train_parts, self.held_out_parts = parts[:split], parts[split:]
        self._verified: dict[int, tuple[int, int]] = {}
        """Size and modification time of each shard that was compared with the index."""

    @property
    def fingerprint(self) -> Digest:
        return self.index.digest

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return a copy of tokens `start` to `stop` of the whole text, within one shard.

        Raises:
            ConfigError: the shard is missing, or its SHA-256 is not that of the index.
        """
        number, size = int(np.searchsorted(self._stops, start, side="right")), self.index.dtype.itemsize
        offset, path = int(self._stops[number]) - self._shards[number].tokens, self._path(number)
        try:
            # Not mapped: a map of a file that becomes shorter kills the process (SIGBUS).
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                if self._verified.get(number) != (found.st_size, found.st_mtime_ns):
                    self._verify(number, file.read())
                    self._verified[number] = found.st_size, found.st_mtime_ns
                file.seek(size * (start - offset))
                piece = file.read(size * (stop - start))
        except OSError as error:
            raise ConfigError(f"shard {path} cannot be read ({error}); copy it again from the organiser") from None
        if len(piece) < size * (stop - start):
            raise self._differs(number)
        return np.frombuffer(bytearray(piece), self.index.dtype)

    def files_of(self, parts: NDArray[np.int64]) -> tuple[str, ...]:
        """Return the names of the files of these stretches, without repetition."""
        numbers = np.searchsorted(self._stops, parts[:, 0], side="right")
        return tuple(dict.fromkeys(self._shards[int(number)].name for number in numbers))

    def parts_of_block(self, seed: bytes, block: int) -> NDArray[np.int64]:
        """Return the shards that a block of windows comes from, as (start, stop); a shard may come twice.

        Sources are drawn by weight, then shards of a source by length.
        """
        numbers = [self._draw(seed, block, place) for place in range(SHARDS_OF_A_BLOCK)]
        return self.train_parts[numbers]

    def tokenizer(self) -> bytes:
        """Return the content of `tokenizer-files.json`.

        Raises:
            ConfigError: it is missing, or not the tokenizer of this text.
        """
        path = self._folder / TOKENIZER_FILE
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        if sha256(raw).hex() != self.index.tokenizer:
            raise ConfigError(
                f"{path} has SHA-256 {sha256(raw).hex()[:16]}…, the text was made with {self.index.tokenizer[:16]}…; "
                "copy it again from the organiser"
            )
        return raw

    def windows_of_block(self, window: int) -> int | None:
        """Return the number of windows of a block: about as many as fit into its shards."""
        mean = float((self.train_parts[:, 1] - self.train_parts[:, 0]).mean())
        return max(1, int(SHARDS_OF_A_BLOCK * mean) // window)

    def _draw(self, seed: bytes, block: int, place: int) -> int:
        drawn = sha256(b"p2p-diloco block 1\n", seed, block.to_bytes(8, "little"), bytes([place]))
        of_source, of_shard = (int.from_bytes(drawn[at : at + 8], "little") / 2.0**64 for at in (0, 8))
        source = int(np.searchsorted(self._source_stops, of_source * self._source_stops[-1], side="right"))
        first, stops = self._shards_of_source[source]
        return first + int(np.searchsorted(stops, of_shard * stops[-1], side="right"))

    @cached_property
    def _source_stops(self) -> NDArray[np.float64]:
        return np.cumsum([source.weight for source in self.index.sources])

    @cached_property
    def _shards_of_source(self) -> list[tuple[int, NDArray[np.int64]]]:
        """The number of each source's first shard, and the running sum of its shards' lengths."""
        found, first = [], 0
        for source in self.index.sources:
            found.append((first, np.cumsum([shard.tokens for shard in source.shards], dtype=np.int64)))
            first += len(source.shards)
        return found

    def _path(self, number: int) -> Path:
        return self._folder / self._shards[number].name

    def _verify(self, number: int, content: bytes) -> None:
        """Compare a shard with the index.

        Raises:
            ConfigError: it differs.
        """
        shard = self._shards[number]
        if len(content) != shard.tokens * self.index.dtype.itemsize or sha256(content).hex() != shard.sha256:
            raise self._differs(number)
        largest = int(np.frombuffer(content, self.index.dtype).max())
        if largest >= self.index.vocabulary:
            raise ConfigError(
                f"shard {self._path(number)} has token {largest}; expected less than {self.index.vocabulary}"
            )

    def _differs(self, number: int) -> ConfigError:
        return ConfigError(
            f"shard {self._path(number)} differs from the index, which expects SHA-256 "
            f"{self._shards[number].sha256[:16]}…; copy it again from the organiser"
        )


def _row(shard: Shard) -> list[Any]:
    return [shard.name, shard.tokens, shard.sha256]


def _shards(rows: Any) -> tuple[Shard, ...]:
    found = []
    for name, tokens, digest in rows:
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name) or name in (INDEX_FILE, TOKENIZER_FILE):
            raise ValueError(f"{name!r} is not a name of a shard")
        found.append(Shard(name=name, tokens=_whole(tokens, MOST_TOKENS_IN_SHARD), sha256=_digest_text(digest)))
    return tuple(found)


def _whole(value: Any, most: int, *, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is not a whole number from {least} to {most}")
    return value


def _positive(value: Any) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value!r} is not a positive number")
    return float(value)


def _digest_text(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST_TEXT.fullmatch(value):
        raise ValueError(f"{value!r} is not a SHA-256")
    return value
