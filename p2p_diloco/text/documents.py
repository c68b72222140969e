"""The documents of files as people have them, one after the other: text, JSON, CSV and Parquet, compressed or not.

A file that cannot be read in full, and a record without text, is an error that names it, or is skipped and counted.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from p2p_diloco.errors import ConfigError
from p2p_diloco.wording import install_line

PIECE_CHARACTERS = 1 << 18
"""Maximum length of the pieces that a long document is tokenised in."""
_BLOCK_BYTES = 1 << 16
_MOST_GUESSED_BYTES = 1 << 18
HEAD_BYTES = 512
_INSTALL = f"install the extra: {install_line('hf')}"
_PACKED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".lzma", ".zst", ".zstd"})
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NO_TEXT = (
    (re.compile(rb"PK\x03\x04|7z\xbc\xaf|Rar!"), "an archive; unpack it and name the files in it"),
    (re.compile(rb".{257}ustar", re.DOTALL), "an archive; unpack it and name the files in it"),
    (re.compile(rb"%PDF-"), "a PDF; extract its text first, for example with pdftotext"),
    (re.compile(rb"ARROW1|\xff\xff\xff\xff..\x00\x00", re.DOTALL), "an Arrow table; name its folder, after hf:"),
)
_SURROGATES = re.compile("[\ud800-\udfff]")
_MIDDLE_OF_LINE = re.compile(r"(?<=\S) (?=\S)")


class Piece(NamedTuple):
    """A piece of a document.

    Attributes:
        text: not empty.
        is_start, is_end: whether its document begins, or ends, with it.
        where: file and line of the document, for errors.
    """

    text: str
    is_start: bool
    is_end: bool
    where: str


@dataclass(slots=True, kw_only=True)
class Reader:
    """Reads files and records, and counts what it has seen.

    Attributes:
        column: column of a record that holds its text or chat messages; dots lead into nested columns.
        encoding: of files without a byte-order mark; None: UTF-8.
        skip_bad: whether to skip what cannot be read instead of raising.
        render: returns a text for chat messages.
        skipped: how often something was skipped or replaced, by what it was.
    """

    column: str = "text"
    encoding: str | None = None
    skip_bad: bool = False
    render: Callable[[list[dict[str, Any]]], str]
    files: int = 0
    documents: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def file(self, path: Path) -> Iterator[Piece]:
        """Yield the documents of a file.

        Raises:
            ConfigError: it cannot be read, or a record has no text.
        """
        self.files += 1
        with self._named(path):
            with path.open("rb") as raw:
                head = raw.read(HEAD_BYTES)
            kind = Path(path.stem if path.suffix.lower() in _PACKED_SUFFIXES else path.name).suffix.lower()
            if head.startswith(b"PAR1") or kind == ".parquet":
                yield from self.records(_parquet_rows(path, self.column), f"record {{}} of {path}")
                return
            with open_unpacked(path) as raw:
                chunks = self._decoded(raw, path)
                if kind in (".jsonl", ".ndjson", ".json"):
                    yield from self._numbered(self._json_records(_lines(chunks), kind == ".json", path))
                elif kind in (".csv", ".tsv"):
                    yield from self._numbered(_table_rows(chunks, path, "\t" if kind == ".tsv" else ","))
                else:
                    yield from self._cut(chunks, str(path))

    def records(self, rows: Iterable[Any], where: str) -> Iterator[Piece]:
        """Yield the documents of records; `where` has a place for their number."""
        yield from self._numbered((where.format(number), row) for number, row in enumerate(rows, 1))

    def bad(self, where: str, what: str, remedy: str = "") -> None:
        """Count what cannot be read.

        Raises:
            ConfigError: bad records are not skipped.
        """
        if not self.skip_bad:
            raise ConfigError(f"{where} {what}; {f'{remedy}, or ' if remedy else ''}leave such out with --skip-bad")
        self.skipped[re.sub(r"\d+", "N", what.partition("; ")[0])] += 1

    def _numbered(self, records: Iterable[tuple[str, Any]]) -> Iterator[Piece]:
        for where, record in records:
            text = self._text_of(record, where)
            if text:
                yield from self._cut((text,), where)

    @contextmanager
    def _named(self, path: Path) -> Iterator[None]:
        """Turn errors of reading a file into one that names it."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                self.bad(str(path), f"is damaged ({first_line(error)})", "fetch it again")
            else:
                self.bad(str(path), f"cannot be read ({error.strerror})", "make it readable")
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            self.bad(str(path), f"is damaged, or ends too early ({first_line(error)})", "fetch it again")
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("pyarrow", "backports", "compression"):
                raise
            self.bad(str(path), f"is damaged ({first_line(error)})", "fetch it again")

    def _decoded(self, raw: IO[bytes], path: Path) -> Iterator[str]:
        """Yield the text of a file; NUL bytes and bytes of another encoding are errors that name their position."""
        block = raw.read(_BLOCK_BYTES)
        marked = next((name for mark, name in _MARKS if block.startswith(mark)), None)
        encoding = marked or self.encoding or "utf-8"
        self._check_kind(block, path, is_wide=encoding not in ("utf-8", "utf-8-sig"))
        decoder, before = codecs.getincrementaldecoder(encoding)(), 0
        while True:
            waiting = decoder.getstate()[0]
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeError as error:
                start = getattr(error, "start", 0)
                what = f"is not {encoding.upper()} at byte {before - len(waiting) + start:,}"
                self.bad(str(path), what, _likeliest(path) if self.encoding is None else "name another --encoding")
                return
            if "\0" in text and encoding in ("utf-8", "utf-8-sig"):
                self.bad(str(path), "is not text: it holds NUL bytes", "if it is UTF-16, add --encoding utf-16-le")
                return
            yield text
            if not block:
                return
            before += len(block)
            block = raw.read(_BLOCK_BYTES)

    def _check_kind(self, head: bytes, path: Path, *, is_wide: bool) -> None:
        what = next((what for pattern, what in _NO_TEXT if pattern.match(head)), None)
        if what is not None and not is_wide:
            raise ConfigError(f"{path} is {what}")

    def _json_records(self, lines: Iterator[str], may_be_one: bool, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield the objects of JSON lines, of which some may share a line, or of one array."""
        for number, line in enumerate(lines, 1):
            where = f"line {number} of {path}"
            try:
                for record in _values_of_line(line):
                    if may_be_one and isinstance(record, list):
                        yield from ((f"record {place} of {path}", each) for place, each in enumerate(record, 1))
                    else:
                        yield where, record
            except (ValueError, RecursionError):
                if may_be_one:
                    yield from self._json_document(chain((line,), lines), path)
                    return
                self.bad(where, "is not JSON", "expected one JSON object per line")
            may_be_one = may_be_one and not line.strip()

    def _json_document(self, lines: Iterable[str], path: Path) -> Iterator[tuple[str, Any]]:
        """Yield the records of a file that is one value over several lines."""
        try:
            value = json.loads("\n".join(lines))
        except (ValueError, RecursionError) as error:
            self.bad(str(path), f"is not JSON ({first_line(error)})", "expected records, one per line or in one array")
            return
        yield from ((f"record {place} of {path}", each) for place, each in enumerate(_as_list(value), 1))

    def _text_of(self, record: Any, where: str) -> str | None:
        """Return the text of a record; None if it has none."""
        if not isinstance(record, dict):
            self.bad(where, f"is {_kind(record)}", 'expected an object such as {"text": "…"}')
            return None
        value: Any = record
        for key in (self.column,) if self.column in record else self.column.split("."):
            if not isinstance(value, dict) or key not in value:
                names = ", ".join(map(str, record)) or "none"
                self.bad(where, f"has no column {self.column}", f"its columns: {names}; name one with --column")
                return None
            value = value[key]
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            return self._rendered(value, where)
        if value is None or value == "":
            self.skipped["records without text"] += 1
        elif isinstance(value, str):
            return value
        else:
            self.bad(where, f"has {_kind(value)} in {self.column}", _remedy(self.column, value))
        return None

    def _rendered(self, value: list[dict[str, Any]], where: str) -> str | None:
        try:
            return self.render([_message(each) for each in value])
        except LookupError:
            self.bad(where, f"has objects in {self.column} that are no chat messages", _remedy(self.column, value[0]))
        except ValueError as error:
            self.bad(where, f"cannot be put into the chat template ({first_line(error)})")
        return None

    def _cut(self, chunks: Iterable[str], where: str) -> Iterator[Piece]:
        """Yield a document in pieces that are cut before a word in the middle of a line, or else behind a line."""
        waiting, is_start = "", True
        for chunk in chunks:
            waiting += self._without_surrogates(chunk)
            while len(waiting) > PIECE_CHARACTERS:
                cut = _cut_at(waiting[:PIECE_CHARACTERS])
                yield Piece(waiting[:cut], is_start, False, where)
                waiting, is_start = waiting[cut:], False
        if waiting:
            self.documents += 1
            yield Piece(waiting, is_start, True, where)

    def _without_surrogates(self, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            text, number = _SURROGATES.subn("\N{REPLACEMENT CHARACTER}", text)
            self.skipped["lone surrogates, which became U+FFFD"] += number
        return text


def open_unpacked(path: Path) -> IO[bytes]:
    """Open a file, decompressed if its first bytes are those of a compressed one.

    Raises:
        ConfigError: its name promises a compressed file and it is none, or reading it needs a package.
        OSError: it cannot be opened.
    """
    with path.open("rb") as raw:
        head = raw.read(10)
    is_named = path.suffix.lower() in _PACKED_SUFFIXES
    opens: Callable[[Path], Any] | None = None
    if head.startswith(b"\x1f\x8b"):
        opens = gzip.open
    elif re.match(rb"BZh[1-9](1AY&SY|\x17rE8P)", head):
        opens = bz2.open
    elif head.startswith(b"\xfd7zXZ\0") or (path.suffix == ".lzma" and head.startswith(b"]\0\0")):
        opens = lzma.open
    elif re.match(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", head):
        opens = _zstd().open
    elif is_named and head:
        raise ConfigError(f"{path} is not compressed, against its name; rename it without {path.suffix}")
    return opens(path) if opens is not None else path.open("rb")


def is_packed(head: bytes) -> bool:
    """Return whether a file with these first bytes holds its text in another form: compressed, a table, or UTF-16."""
    forms = rb"\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|PAR1|\xff\xfe|\xfe\xff"
    return re.match(forms, head) is not None or any(form.match(head) for form, _ in _NO_TEXT)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _zstd() -> Any:
    try:
        try:
            from compression import zstd  # from Python 3.14 on
        except ImportError:
            from backports import zstd
    except ImportError:
        raise ConfigError(f"reading a zstd file needs backports.zstd; {_INSTALL}") from None
    return zstd


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    """Yield lines without their ends, LF or CR LF."""
    waiting: list[str] = []
    for chunk in chunks:
        *whole, rest = chunk.split("\n")
        for line in whole:
            yield "".join((*waiting, line)).removesuffix("\r")
            waiting = []
        waiting.append(rest)
    yield "".join(waiting)


def _values_of_line(line: str) -> Iterator[Any]:
    decoder, place = json.JSONDecoder(), len(line) - len(line.lstrip())
    while place < len(line):
        value, place = decoder.raw_decode(line, place)
        yield value
        place += len(line[place:]) - len(line[place:].lstrip(" \t\r,"))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _table_rows(chunks: Iterator[str], path: Path, delimiter: str) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(1 << 30)
    rows = csv.DictReader((f"{line}\n" for line in _lines(chunks)), delimiter=delimiter)
    try:
        yield from ((f"line {rows.line_num} of {path}", row) for row in rows)
    except csv.Error as error:
        raise ConfigError(f"line {rows.line_num} of {path} is not a row of a table ({error})") from None


def _parquet_rows(path: Path, column: str) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"reading {path} needs pyarrow; {_INSTALL}") from None
    with parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        wanted = column if column in names else column.partition(".")[0]
        if wanted not in names:
            raise ConfigError(f"{path} has no column {column}; name one with --column: {', '.join(names)}")
        for batch in table.iter_batches(batch_size=256, columns=[wanted]):
            yield from batch.to_pylist()


def _cut_at(text: str) -> int:
    """Return where to cut, in the second half: before a space in the middle of a line, behind a line, or at the end."""
    half = len(text) // 2
    place = text.rfind(" ", half, len(text) - 1)
    while place > half and not _MIDDLE_OF_LINE.match(text, place):
        place = text.rfind(" ", half, place)
    return place if place > half else max(text.rfind("\n", half) + 1, 0) or len(text)


def _message(value: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message with a role and a content, from either of the two usual layouts."""
    if "role" in value and "content" in value:
        return value
    roles = {"human": "user", "gpt": "assistant"}
    return {"role": roles.get(value["from"], value["from"]), "content": value["value"]}


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a truth value", list: "a list", dict: "an object", bytes: "bytes"}
    return names.get(type(value), "a text" if isinstance(value, str) else f"the number {value!r}")


def _remedy(column: str, value: Any) -> str:
    if isinstance(value, dict) and value:
        return f"name a column in it, such as --column {column}.{next(iter(value))}"
    return "expected text, or chat messages with role and content"


def _likeliest(path: Path) -> str:
    """Return what to do about a file in an unknown encoding."""
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return "name its encoding, such as --encoding latin-1"
    with open_unpacked(path) as raw:
        best = from_bytes(raw.read(_MOST_GUESSED_BYTES)).best()
    name = best.encoding.replace("_", "-") if best is not None else "latin-1"
    return f"it looks like {name}: if it is, add --encoding {name}"
