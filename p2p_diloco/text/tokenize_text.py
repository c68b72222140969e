"""Make a folder of token shards from texts: files, Hugging Face datasets, or both, mixed by weight.

Requires the extra `hf`. Documents are read one after the other, so a dataset on the hub is streamed, not downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import sha256
from p2p_diloco.text.corpus_files import list_corpus_files
from p2p_diloco.text.token_shards import INDEX_FILE, TOKENIZER_FILE, Shard, ShardIndex, Source
from p2p_diloco.text.tokenizer_files import TOKENIZER, TokenizerFiles, read_tokenizer_folder

HUB = "hf:"
SHARD_TOKENS = 1 << 21
MOST_HELD_OUT = SHARD_TOKENS
"""Maximum number of held-out tokens: an evaluation uses far fewer."""
_PIECE_CHARACTERS = 1 << 16
"""Length of the pieces of a long text file that are tokenised at a time; they end at line ends."""
_BATCH = 256
_INSTALL = 'install the extra: pip install "p2p-diloco[hf]"'


class Piece(NamedTuple):
    """A piece of text, and whether its document ends with it."""

    text: str
    is_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions:
    """Sources and rules for shards.

    Attributes:
        sources: files, folders, globs, or `hf:` with a folder or id of a dataset; `=` and a weight may follow.
        tokenizer: `tokenizer.json`, a folder with one, or `hf:` with the id of a model on the hub.
        text_field: field of a record that holds its text.
        end_token: text of the token between documents; None: the tokenizer's own; empty: none.
        held_out: share of the documents that is kept for evaluation.
        most_tokens: maximum tokens of each source; None: all of it.
    """

    sources: tuple[str, ...]
    tokenizer: str
    text_field: str = "text"
    end_token: str | None = None
    held_out: float = 0.01
    most_tokens: int | None = None


def tokenize_text(options: TokenizeOptions, folder: Path, report: Callable[[str], None]) -> ShardIndex:
    """Write shards, index and tokenizer into a new folder, and return the index.

    Raises:
        ConfigError: a source or the tokenizer cannot be read, or a source has no text.
    """
    if not 0.0 < options.held_out <= 0.5:
        raise ConfigError(f"--held-out is {options.held_out:g}; expected more than 0 and at most 0.5")
    if not options.sources:
        raise ConfigError("name at least one text: a file, a folder, a glob, or hf: and the id of a dataset")
    tokenizer_file = find_tokenizer(options.tokenizer)
    tokenizer = _load_tokenizer(tokenizer_file)
    files = read_tokenizer_folder(tokenizer_file.parent)
    vocabulary = files.vocabulary
    end = _end_token(files, options.end_token)
    split = [_weight_of(source) for source in options.sources]
    folder.mkdir(parents=True)
    writer = _Writer(folder, np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4"))
    sources, num_bytes, num_tokens = [], 0, 0
    for number, (name, weight) in enumerate(split):
        taken = _Taken()
        for piece, ids in _tokens_of(tokenizer, pieces_of(name, options.text_field)):
            if piece.is_end and end is not None:
                ids.append(end)
            size = len(piece.text.encode("utf-8", "surrogatepass"))
            taken.bytes += size
            # The first piece is held out, then another whenever the share has fallen behind.
            if taken.held_out < options.held_out * (taken.tokens + taken.held_out) + 1 and not writer.is_held_out_full:
                taken.held_out += len(ids)
                writer.add("held-out", ids)
            else:
                taken.tokens += len(ids)
                num_bytes += size
                writer.add(f"s{number}", ids)
            if taken.has_grown():
                report(f"{name}: {taken.tokens:,} tokens")
            if options.most_tokens is not None and taken.tokens >= options.most_tokens:
                break
        shards = writer.finish(f"s{number}")
        if not shards:
            raise ConfigError(f"{name} has too little text: {taken.held_out:,} tokens, all of them held out")
        num_tokens += taken.tokens
        sources.append(Source(name=name, weight=weight if weight is not None else float(taken.tokens), shards=shards))
    raw = files.encode()
    (folder / TOKENIZER_FILE).write_bytes(raw)
    index = ShardIndex(
        vocabulary=vocabulary,
        tokenizer=sha256(raw).hex(),
        end_token=end,
        bytes_per_token=round(num_bytes / num_tokens, 4),
        sources=tuple(sources),
        held_out=writer.finish("held-out"),
    )
    (folder / INDEX_FILE).write_bytes(index.encode())
    return index


def find_tokenizer(place: str) -> Path:
    """Return the path of a `tokenizer.json`: given, in the given folder, or of a model on the hub.

    Raises:
        ConfigError: there is none.
    """
    path = Path(os.path.expanduser(place.removeprefix(HUB)))
    if path.is_dir():
        path = path / TOKENIZER
    if path.is_file():
        return path
    if not place.startswith(HUB):
        raise ConfigError(
            f"there is no tokenizer at {path}; expected tokenizer.json, a folder with it, or hf: and the id of a model"
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ConfigError(f"fetching {place} needs huggingface_hub; {_INSTALL}") from None
    try:
        return Path(hf_hub_download(place.removeprefix(HUB), TOKENIZER))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot fetch the tokenizer {place} ({_first_line(error)})") from None


def pieces_of(source: str, text_field: str) -> Iterator[Piece]:
    """Yield the text of a source: text, .jsonl and .parquet files, or a Hugging Face dataset.

    Raises:
        ConfigError: it cannot be read, or a record has no such field.
    """
    if source.startswith(HUB):
        yield from _of_dataset(source.removeprefix(HUB), text_field)
        return
    for file in list_corpus_files(source):
        match file.suffix:
            case ".jsonl" | ".ndjson":
                yield from _of_lines(file, text_field)
            case ".parquet":
                yield from _of_parquet(file, text_field)
            case _:
                yield from _of_text(file)


def _of_text(file: Path) -> Iterator[Piece]:
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        piece = lines.read(_PIECE_CHARACTERS)
        while piece:
            piece += lines.readline(_PIECE_CHARACTERS)
            following = lines.read(_PIECE_CHARACTERS)
            yield Piece(piece, not following)
            piece = following


def _of_lines(file: Path, text_field: str) -> Iterator[Piece]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise ConfigError(f"line {number} of {file} is not JSON; expected one JSON object per line") from None
            yield Piece(_text_of(record, text_field, f"line {number} of {file}"), True)


def _of_parquet(file: Path, text_field: str) -> Iterator[Piece]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"reading {file} needs pyarrow; {_INSTALL}") from None
    try:
        with parquet.ParquetFile(file) as table:
            if text_field not in table.schema_arrow.names:
                raise ConfigError(
                    f"{file} has no column {text_field}; name one with --text-field: "
                    f"{', '.join(table.schema_arrow.names)}"
                )
            for batch in table.iter_batches(columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    yield Piece(_checked_text(text, text_field, str(file)), True)
    except pa.ArrowException as error:
        raise ConfigError(f"cannot read {file} ({_first_line(error)})") from None


def _of_dataset(name: str, text_field: str) -> Iterator[Piece]:
    """Yield the documents of a dataset: a folder of `save_to_disk`, or an id, with `:split` if it is not `train`."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"reading {HUB}{name} needs datasets; {_INSTALL}") from None
    place, _, split = name.partition(":")
    try:
        if (Path(place) / "state.json").exists() or (Path(place) / "dataset_dict.json").exists():
            found = datasets.load_from_disk(place)
            rows: Iterable[Any] = found[split or "train"] if isinstance(found, datasets.DatasetDict) else found
        else:
            rows = datasets.load_dataset(place, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            yield Piece(_text_of(row, text_field, f"record {number} of {name}"), True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the dataset {name} ({_first_line(error)})") from None


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict) or text_field not in record:
        fields = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{where} has no field {text_field}; name one with --text-field: {fields}")
    return _checked_text(record[text_field], text_field, where)


def _checked_text(text: Any, text_field: str, where: str) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ConfigError(f"{text_field} in {where} is {type(text).__name__}; expected text")
    return text


def _tokens_of(tokenizer: Any, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, list[int]]]:
    with_text = (piece for piece in pieces if piece.text)
    while some := list(islice(with_text, _BATCH)):
        encoded = tokenizer.encode_batch([piece.text for piece in some], add_special_tokens=False)
        yield from zip(some, (each.ids for each in encoded), strict=True)


def _load_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(f"tokenising needs tokenizers; {_INSTALL}") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise ConfigError(f"{path} is not a tokenizer ({_first_line(error)})") from None


def _end_token(tokenizer: TokenizerFiles, wanted: str | None) -> int | None:
    """Return the token between documents: the wanted one, or the tokenizer's own."""
    if wanted == "":
        return None
    if wanted is None:
        return tokenizer.special().document_end
    token = tokenizer.ids().get(wanted)
    if token is None:
        raise ConfigError(f'--end-token "{wanted}" is not a token of the tokenizer')
    return token


def _weight_of(source: str) -> tuple[str, float | None]:
    """Split `books/=0.3` into the source and its weight."""
    name, equals, weight = source.rpartition("=")
    if not equals:
        return source, None
    try:
        value = float(weight)
    except ValueError:
        return source, None
    if not 0.0 < value < float("inf"):
        raise ConfigError(f"the weight of {name} is {weight}; expected a positive number, such as 0.3")
    return name, value


@dataclass(slots=True)
class _Taken:
    """Tokens of a source so far."""

    tokens: int = 0
    held_out: int = 0
    bytes: int = 0
    _reported: int = field(default=0)

    def has_grown(self) -> bool:
        """Return whether ten million tokens came since this last returned True."""
        if self.tokens - self._reported < 10_000_000:
            return False
        self._reported = self.tokens
        return True


class _Writer:
    """Collects tokens and writes them as shards."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self._dtype = dtype
        self._waiting: dict[str, list[int]] = {}
        self._written: dict[str, list[Shard]] = {}

    @property
    def is_held_out_full(self) -> bool:
        """Whether there are enough held-out tokens."""
        return len(self._waiting.get("held-out", ())) >= MOST_HELD_OUT

    def add(self, stem: str, ids: list[int]) -> None:
        """Add tokens to the shards called `stem`."""
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
        (self._folder / name).write_bytes(raw)
        written.append(Shard(name=name, tokens=len(ids), sha256=sha256(raw).hex()))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
