"""Make a folder of token shards from texts: files, Hugging Face datasets, or both, mixed by weight.

Requires the extra `hf`. Documents are read one after the other, so a dataset on the hub is streamed, not downloaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from p2p_diloco.app.text.documents import Piece, Reader
from p2p_diloco.app.text.hub import HUB, Rows, is_saved_dataset, open_dataset
from p2p_diloco.app.text.token_shards import INDEX_FILE, Shard, ShardIndex, Source
from p2p_diloco.app.text.tokenizer import CHAT_DATE, PROBE, TextTokenizer, find_tokenizer, read_tokenizer
from p2p_diloco.app.text.tokenizer_files import TokenizerFiles
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import sha256
from p2p_diloco.storage.corpus_files import list_corpus_files
from p2p_diloco.storage.run_folder import TOKENIZER_FILE
from p2p_diloco.wording import first_line

SHARD_TOKENS = 1 << 21
MOST_HELD_OUT = SHARD_TOKENS
"""Maximum number of held-out tokens: an evaluation uses far fewer."""
UNIT_TOKENS = 1 << 11
"""Maximum number of tokens of a document that are trained on, or held out, together."""
MOST_VOCABULARY = 1 << 24
_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 21, 256

Named = TypeVar("Named", str, Path)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions:
    """Sources and rules for shards.

    Attributes:
        sources: files, folders, globs, or `hf:` with a folder or id of a dataset; `=` and a weight may follow.
        tokenizer: `tokenizer.json`, a folder with one, or `hf:` with the id of a model on the hub.
        column: column of a record that holds its text or chat messages.
        encoding: of files without a byte-order mark; None: UTF-8.
        end_token: text of the token between documents; None: the tokenizer's own; empty: none.
        held_out: share of the text that is kept for evaluation.
        most_tokens: maximum tokens of each source; None: all of it.
        skip_bad: whether to skip what cannot be read or tokenised, instead of refusing it.
    """

    sources: tuple[str, ...]
    tokenizer: str
    column: str = "text"
    encoding: str | None = None
    end_token: str | None = None
    held_out: float = 0.01
    most_tokens: int | None = None
    skip_bad: bool = False


@dataclass(slots=True, kw_only=True)
class Taken:
    """Documents taken from a source so far.

    Attributes:
        name: the source; of the hub, with its commit.
        files, documents: how many were read, whole or in part; a dataset counts as one file.
        tokens, held_out: tokens to train on, and to evaluate on.
        unknown: how many of them stand for something that the tokenizer cannot express.
        bytes: length in UTF-8.
    """

    name: str
    files: int = 0
    documents: int = 0
    tokens: int = 0
    held_out: int = 0
    unknown: int = 0
    bytes: float = 0.0
    _reported: int = field(default=0)

    def add(self, unit: _Unit, *, is_held_out: bool) -> None:
        self.documents += unit.is_start
        self.bytes += unit.bytes
        self.held_out += len(unit.ids) if is_held_out else 0
        self.tokens += 0 if is_held_out else len(unit.ids)

    def lost(self, unknown: int) -> None:
        """Count tokens that stand for something that the tokenizer cannot express."""
        self.unknown += unknown

    def has_grown(self) -> bool:
        """Return whether ten million tokens came since this last returned True."""
        if self.tokens - self._reported < 10_000_000:
            return False
        self._reported = self.tokens
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """A new folder of tokens.

    Attributes:
        index: the index of the shards.
        taken: what was taken from each source.
        skipped: how often something was skipped or replaced, by what it was.
    """

    index: ShardIndex
    taken: tuple[Taken, ...]
    skipped: Counter[str]


def tokenize_text(options: TokenizeOptions, folder: Path, report: Callable[[str], None]) -> Tokenized:
    """Write shards, index and tokenizer into a new folder.

    Raises:
        ConfigError: a source or the tokenizer cannot be read, or a source has no text.
    """
    split = [_weight_of(source) for source in options.sources]
    _check(options, [name for name, _ in split])
    path = _found(options.tokenizer, find_tokenizer)
    tokenizer = TextTokenizer(_found(path, read_tokenizer), options.tokenizer)
    files, end = _with_end(tokenizer.files, options.end_token)
    if files.vocabulary > MOST_VOCABULARY:
        raise ConfigError(
            f"the tokenizer has an id of {files.vocabulary - 1:,}; expected less than {MOST_VOCABULARY:,}"
        )
    reader = Reader(
        column=options.column, encoding=options.encoding, skip_bad=options.skip_bad, render=tokenizer.render
    )
    writer = _Writer(folder, np.dtype("<u2" if files.vocabulary <= 1 << 16 else "<u4"))
    making = _Making(options=options, tokenizer=tokenizer, end=end, reader=reader, writer=writer, report=report)
    making.check_tokenizer(path)
    sources, all_taken = [], []
    for number, (name, weight) in enumerate(split):
        taken = making.take(name, f"s{number}")
        shards = writer.finish(f"s{number}")
        if not shards:
            raise ConfigError(_too_little(taken, reader.skipped))
        all_taken.append(taken)
        sources.append(Source(name=taken.name, weight=weight or float(taken.tokens), shards=shards))
    raw = files.encode()
    index = ShardIndex(
        vocabulary=files.vocabulary,
        tokenizer=sha256(raw).hex(),
        end_token=end,
        bytes_per_token=bytes_per_token(all_taken),
        sources=tuple(sources),
        held_out=writer.finish("held-out"),
    )
    if tokenizer.dates:
        reader.skipped[f"today's date in a chat, which became {CHAT_DATE:%d %b %Y}"] = tokenizer.dates
    (folder / TOKENIZER_FILE).write_bytes(raw)
    (folder / INDEX_FILE).write_bytes(index.encode())
    return Tokenized(index=index, taken=tuple(all_taken), skipped=reader.skipped)


def bytes_per_token(taken: Sequence[Taken]) -> float:
    """Return the mean length of a token in bytes of UTF-8."""
    return round(sum(each.bytes for each in taken) / sum(each.tokens + each.held_out for each in taken), 4)


def _check(options: TokenizeOptions, names: Sequence[str]) -> None:
    if not 0.0 < options.held_out <= 0.5:
        raise ConfigError(f"--held-out is {options.held_out:g}; expected more than 0 and at most 0.5")
    if options.most_tokens is not None and options.most_tokens < 1:
        raise ConfigError(f"--most-tokens is {options.most_tokens}; expected at least 1")
    if not names or not all(names) or not options.tokenizer:
        raise ConfigError(
            "name at least one text (a file, a folder, a glob, or hf: and the id of a dataset) and a tokenizer; none "
            "may be empty"
        )
    try:
        "a".encode(options.encoding or "utf-8")
    except (LookupError, ValueError):
        raise ConfigError(f"--encoding is {options.encoding}; expected one such as latin-1, cp1252 or utf-16") from None


def _found(name: Named, find: Callable[[Named], Found]) -> Found:
    """Look for a source or a tokenizer.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return find(name)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}); make it readable") from None


class _Unit(NamedTuple):
    """Tokens that are trained on, or held out, together.

    Attributes:
        bytes: their length in UTF-8, if all tokens of their document are equally long.
        is_start: whether a document begins with them.
    """

    ids: list[int]
    bytes: float
    is_start: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Making:
    """Parts that make tokens of all sources."""

    options: TokenizeOptions
    tokenizer: TextTokenizer
    end: int | None
    reader: Reader
    writer: _Writer
    report: Callable[[str], None]

    def check_tokenizer(self, path: Path) -> None:
        """Before a text is read, refuse a tokenizer that cannot encode each, and say what else is odd about it."""
        if difference := self.tokenizer.difference(path):
            self.report(
                f"{difference}, which gives these tokens and is exported; for those of the class, name what "
                f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained('FOLDER') writes"
            )
        if changed := self.tokenizer.changed():
            self.report(f"this tokenizer does not give every text back, so a model will not write it either: {changed}")
        lost, why = self.tokenizer.lost()
        if lost:
            shown = " ".join(lost[:8]) + (" …" if len(lost) > 8 else "")
            what = f"cannot encode {len(lost)} of {len(PROBE)} characters that were tried: {shown} ({why})"
            remedy = "take one with an unknown token, or with bytes as a fallback"
            self.reader.bad(f"the tokenizer {self.options.tokenizer}", what, remedy)

    def take(self, name: str, stem: str) -> Taken:
        self.reader.files = 0
        taken, pieces = _found(name, self._open)
        share, most_tokens = self.options.held_out, self.options.most_tokens
        most_held_out = MOST_HELD_OUT // len(self.options.sources)
        for unit in self._units_of(pieces, taken):
            # The first unit is held out, then another whenever the share has fallen behind.
            is_behind = taken.held_out < share * (taken.tokens + taken.held_out) + 1
            is_held_out = is_behind and taken.held_out < most_held_out
            self.writer.add("held-out" if is_held_out else stem, unit.ids)
            taken.add(unit, is_held_out=is_held_out)
            if taken.has_grown():
                self.report(f"{name}: {taken.tokens:,} tokens")
            if most_tokens is not None and taken.tokens >= most_tokens:
                break
        return replace(taken, files=max(1, self.reader.files))

    def _open(self, name: str) -> tuple[Taken, Iterator[Piece]]:
        """Return what will be taken from a source, and its documents."""
        reader, place = self.reader, os.path.expanduser(name)
        if name.startswith(HUB) or is_saved_dataset(Path(place)):
            rows = open_dataset(name.removeprefix(HUB) if name.startswith(HUB) else place, reader.column)
            return Taken(name=f"{HUB}{rows.name}"), reader.records(_read(rows), f"record {{}} of {rows.name}")
        files = list_corpus_files(
            name,
            (lambda path, why: reader.bad(str(path), why)) if reader.skip_bad else None,
            lambda _: reader.skipped.update(["hidden files and folders"]),
        )
        return Taken(name=name), (piece for file in files for piece in reader.file(file))

    def _units_of(self, pieces: Iterator[Piece], taken: Taken) -> Iterator[_Unit]:
        """Yield the tokens of documents, at most `UNIT_TOKENS` at a time."""
        tokenizer = self.tokenizer
        for some in _batches(pieces):
            for piece, ids in zip(some, self._encoded(some), strict=True):
                if ids is None:
                    continue
                taken.lost(ids.count(tokenizer.unknown) if tokenizer.unknown is not None else 0)
                framed = self._framed(piece, ids)
                length = len(piece.text.encode()) / max(1, len(framed))
                for at in range(0, len(framed), UNIT_TOKENS):
                    unit = framed[at : at + UNIT_TOKENS]
                    yield _Unit(unit, length * len(unit), piece.is_start and at == 0)

    def _framed(self, piece: Piece, ids: list[int]) -> list[int]:
        """Return the ids of a piece with what precedes and follows its document; a chat may have it already."""
        first, last = (list(each) for each in (self.tokenizer.first, self.tokenizer.last))
        before = first if piece.is_start and ids[: len(first)] != first else []
        if not piece.is_end:
            return before + ids
        behind = last if ids[-len(last) :] != last else []
        own = [*ids, *behind]
        is_closed = own[-1:] == [self.end] or (own[-2:-1] == [self.end] and not self.tokenizer.decode(own[-1:]).strip())
        return [*before, *own, *([self.end] if self.end is not None and not is_closed else ())]

    def _encoded(self, pieces: list[Piece]) -> list[list[int] | None]:
        """Return the ids of each piece; None for one that cannot be tokenised and is skipped."""
        try:
            return [*self.tokenizer.encode([(piece.context, piece.text) for piece in pieces])]
        except ValueError as error:
            if len(pieces) > 1:
                return [ids for piece in pieces for ids in self._encoded([piece])]
            self.reader.bad(pieces[0].where, f"cannot be tokenised ({error})")
            return [None]


def _read(rows: Rows) -> Iterator[Any]:
    try:
        yield from rows.records
    except Exception as error:  # the library raises any
        raise ConfigError(f"cannot read the dataset {rows.name} ({first_line(error)})") from None


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    some: list[Piece] = []
    characters = 0
    for piece in pieces:
        some.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS or len(some) >= _BATCH_PIECES:
            yield some
            some, characters = [], 0
    if some:
        yield some


def _with_end(files: TokenizerFiles, wanted: str | None) -> tuple[TokenizerFiles, int | None]:
    """Return the files, and the token between documents: the wanted one, or the tokenizer's own."""
    if wanted:
        return files.with_end(wanted), files.ids()[wanted]
    return files, files.special().document_end if wanted is None else None


def _too_little(taken: Taken, skipped: Counter[str]) -> str:
    left_out = "".join(f"; {number:,} {what}" for what, number in skipped.items())
    if not taken.held_out:
        return f"{taken.name} has no text{left_out}"
    return f"{taken.name} has too little text: {taken.held_out:,} tokens, all of them held out{left_out}"


def _weight_of(source: str) -> tuple[str, float | None]:
    """Split `books/=0.3` into the source and its weight; a folder may be called `year=2024`."""
    name, equals, weight = source.rpartition("=")
    if not equals or os.path.lexists(os.path.expanduser(source)):
        return source, None
    try:
        value = float(weight)
    except ValueError:
        return source, None
    if not 0.0 < value < float("inf"):
        raise ConfigError(f"the weight of {name} is {weight}; expected a positive number, such as 0.3")
    return name, value


class _Writer:
    """Collects tokens and writes them as shards."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self._dtype = dtype
        self._waiting: dict[str, list[int]] = {}
        self._written: dict[str, list[Shard]] = {}

    def add(self, stem: str, ids: list[int]) -> None:
        waiting = self._waiting.setdefault(stem, [])
        waiting += ids
        while len(waiting) >= 2 * SHARD_TOKENS:
            self._write(stem, waiting[:SHARD_TOKENS])
            del waiting[:SHARD_TOKENS]

    def finish(self, stem: str) -> tuple[Shard, ...]:
        """Write the rest, and return all shards called `stem`."""
        if rest := self._waiting.pop(stem, []):
            self._write(stem, rest)
        return tuple(self._written.pop(stem, ()))

    def _write(self, stem: str, ids: list[int]) -> None:
        written = self._written.setdefault(stem, [])
        raw = np.array(ids, dtype=self._dtype).tobytes()
        name = f"{stem}-{len(written):05}.bin"
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_bytes(raw)
        written.append(Shard(name=name, tokens=len(ids), sha256=sha256(raw).hex()))
