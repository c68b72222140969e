"""The documents of files as people have them, one after the other: text, JSON, CSV and Parquet, compressed or not.

A file that cannot be read in full, and a record without text, is an error that names it, or is skipped and counted.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from p2p_diloco.app.extra import import_extra
from p2p_diloco.app.text.unpacked import PACKED_SUFFIXES, unpacked, why_no_text
from p2p_diloco.errors import ConfigError
from p2p_diloco.wording import first_line, format_bytes

PIECE_CHARACTERS = 1 << 18
"""Maximum length of the pieces that a long document is tokenised in."""
CONTEXT_CHARACTERS = 1 << 8
"""Length of the text before a piece that is tokenised with it, so that its tokens are those of the whole document."""
LONGEST_VALUE = 1 << 30
"""Maximum length of a line of records, and of a JSON value over several lines: these are read as a whole."""
_MOST_NAMES, _LONGEST_NAME = 8, 40
_SURE_CHARACTERS = 4
_SHORTEST_GUESSED, _LONGEST_GUESSED = 1 << 11, 1 << 15
_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".jsonlines", ".jl", ".json"})
_ABOUT_OTHERS = re.compile(r"_(SUCCESS|metadata|common_metadata|(started|committed)_\d+)")
"""Names of files about the other files of a folder, as Parquet and Spark write them."""
_RECORDS = re.compile(rb'(?:\xef\xbb\xbf)?\s*\[?\s*\{\s*"')
"""The first bytes of JSON records; Spark and others write them to files without a suffix."""
_DELTA_LOG = "_delta_log"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_WIDE = ("utf-16", "utf-32")
_SURROGATES = re.compile("[\ud800-\udfff]")
_NEVER_IN_TEXT = re.compile(rb"[\0-\x06\x0e-\x19\x1c-\x1f]")
_MIDDLE_OF_LINE = re.compile(r"(?<=\S) (?=\S)")
_CR_ALONE = re.compile(rb'(?:"[^"]*"|[^"\r\n\0])*\r+[^\r\n\0]')
"""A first line of a table that ends as those of old Macs do; UTF-16 has a NUL there."""
_BEFORE_VALUES = " \t\r\n\N{ZERO WIDTH NO-BREAK SPACE}"
"""The last is the mark of a file that was put behind another."""
_BETWEEN_VALUES = re.compile(r"[ \t\r\n,]*")


class Piece(NamedTuple):
    """A piece of a document.

    Attributes:
        text: not empty.
        context: the end of the piece before it; empty at the start.
        is_start, is_end: whether its document begins, or ends, with it.
        where: file and line of the document, for errors.
    """

    text: str
    context: str
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
    skipped: Counter[str] = field(default_factory=Counter)

    def file(self, path: Path) -> Iterator[Piece]:
        """Yield the documents of a file.

        Raises:
            ConfigError: it cannot be read, or a record has no text.
        """
        if _DELTA_LOG in path.parts:
            raise ConfigError(
                f"{path.parent} is of a Delta table, whose files also hold rows that were deleted; write its newest "
                "version as Parquet, and name that"
            )
        if _ABOUT_OTHERS.fullmatch(path.name):
            self.skipped["files about others, such as _SUCCESS"] += 1
            return
        self.files += 1
        kind = Path(path.stem if path.suffix.lower() in PACKED_SUFFIXES else path.name).suffix.lower()
        blocks = self._blocks(path)
        first = next(blocks, b"")
        if (why := why_no_text(first)) is not None and not self._encoding_of(first).startswith(_WIDE):
            self.bad(str(path), *why)
            return
        if first.startswith(b"PAR1") or kind == ".parquet":
            yield from self.records(self._parquet_rows(path), f"record {{}} of {path}")
            return
        if not self._encoding_of(first).startswith("utf-8") and _is_utf8(first):
            self.bad(str(path), f"is UTF-8, against --encoding {self.encoding}", "read such files alone, without it")
            return
        blocks = chain((first,), blocks)
        kind = ".json" if not kind and _RECORDS.match(first) else kind
        if kind in _JSON_SUFFIXES:
            yield from self._numbered(self._json_records(self._lines(blocks, path), kind == ".json", path))
        elif kind in (".csv", ".tsv"):
            end = "\r" if _CR_ALONE.match(first) else "\n"
            yield from self._numbered(self._table_rows(self._lines(blocks, path, end), path, kind == ".tsv"))
        else:
            yield from self._cut(self._decoded(blocks, path), str(path))

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
        self.skipped[re.sub(r"\d[\d,]*", "N", what.partition(" (")[0])] += 1

    def _numbered(self, records: Iterable[tuple[str, Any]]) -> Iterator[Piece]:
        for where, record in records:
            text = self._text_of(record, where)
            if text:
                yield from self._cut((text,), where)

    # -- bytes and text

    def _blocks(self, path: Path) -> Iterator[bytes]:
        """Yield the content of a file; if the rest cannot be read, only what precedes it."""
        with self._named(path):
            yield from unpacked(path)

    @contextmanager
    def _named(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or first_line(error)
            self.bad(str(path), f"cannot be read ({why})", "make it readable, or fetch it again")
        except (EOFError, ValueError) as error:
            self.bad(str(path), f"is damaged, or ends too early ({first_line(error)})", "fetch it again")

    def _encoding_of(self, first: bytes) -> str:
        marked = next((name for mark, name in _MARKS if first.startswith(mark)), None)
        return marked or codecs.lookup(self.encoding or "utf-8").name

    def _decoded(self, blocks: Iterator[bytes], path: Path) -> Iterator[str]:
        """Yield the text of a file; NUL bytes and bytes of another encoding are errors that name their position."""
        first = next(blocks, b"")
        encoding, position = self._encoding_of(first), 0
        if first.startswith(codecs.BOM_UTF8):
            first, position = first.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
        decoder = codecs.getincrementaldecoder(encoding)()
        for block, is_last in chain(((block, False) for block in chain((first,), blocks)), ((b"", True),)):
            waiting = decoder.getstate()[0] if block or is_last else b""
            try:
                text = decoder.decode(block, final=is_last)
            except UnicodeError as error:
                start = getattr(error, "start", 0)
                what = f"is not {encoding.upper()} at byte {position - len(waiting) + start:,}"
                self.bad(str(path), what, self._likeliest(waiting + block, start, encoding))
                return
            if "\0" in text and not encoding.startswith(_WIDE):
                self.bad(str(path), "is not text: it holds NUL bytes", "if it is UTF-16, add --encoding utf-16-le")
                return
            yield text
            position += len(block)

    def _lines(self, blocks: Iterator[bytes], path: Path, end: str = "\n") -> Iterator[str]:
        """Yield the lines of a file with their ends; a line of another encoding is one error."""
        first = next(blocks, b"")
        encoding = self._encoding_of(first)
        lines: Iterator[Any]
        if encoding.startswith(_WIDE):
            lines = _split(self._decoded(chain((first,), blocks), path), end)
        else:
            lines = _split(chain((first.removeprefix(codecs.BOM_UTF8),), blocks), end.encode())
        for number, line in enumerate(lines, 1):
            where = f"line {number} of {path}"
            if line is None:
                self.bad(
                    where,
                    f"is too long (more than {format_bytes(LONGEST_VALUE)})",
                    "write each record on a line of its own",
                )
                continue
            try:
                yield line if isinstance(line, str) else line.decode(encoding)
            except UnicodeError as error:
                start = getattr(error, "start", 0)
                what = f"is not {encoding.upper()} at its byte {start:,}"
                self.bad(where, what, self._likeliest(line, start, encoding))

    def _likeliest(self, found: bytes, start: int, encoding: str) -> str:
        """Return what to do about bytes around `start` that are of another encoding."""
        near = found[max(0, start - _SHORTEST_GUESSED) : start + _LONGEST_GUESSED]
        if _NEVER_IN_TEXT.search(near):
            return "it holds bytes that no text has, so take it out of the text"
        text = near.decode("utf-8", "replace")
        num_broken = text.count("\N{REPLACEMENT CHARACTER}")
        if sum(character > "\x7f" for character in text) > 2 * num_broken:
            return "most of it is UTF-8, so mend it there"
        try:
            from charset_normalizer import from_bytes
        except ImportError:
            return "name its encoding, such as --encoding latin-1"
        best = from_bytes(near).best()
        name = best.encoding.replace("_", "-") if best is not None else ""
        if not name or name in ("ascii", "utf-8") or codecs.lookup(name).name == encoding:
            return "name its encoding, such as --encoding latin-1"
        return f"it looks like {name}: if it is, add --encoding {name}"

    # -- records

    def _json_records(self, lines: Iterable[str], may_be_one: bool, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield the objects of JSON lines, of which some may share a line, or of values over several lines."""
        numbered = enumerate(lines, 1)
        for number, line in numbered:
            try:
                records = [*_values(line)]
            except (ValueError, RecursionError) as error:
                if may_be_one:
                    rest = (each for _, each in numbered)
                    yield from self._json_document(chain(["\n"] * (number - 1), (line,), rest), path)
                    return
                what = f"is not JSON ({first_line(error)})"
                self.bad(f"line {number} of {path}", what, "expected one JSON object per line")
                continue
            if may_be_one and len(records) == 1 and isinstance(records[0], list):
                yield from ((f"record {place} of {path}", each) for place, each in enumerate(records[0], 1))
            else:
                yield from ((f"line {number} of {path}", each) for each in records)
            may_be_one = may_be_one and not line.strip()

    def _json_document(self, lines: Iterable[str], path: Path) -> Iterator[tuple[str, Any]]:
        """Yield the records of values over several lines, or else, where bad ones are skipped, of each line."""
        whole, length = list[str](), 0
        for line in lines:
            whole.append(line)
            length += len(line)
            if length > LONGEST_VALUE:
                what = f"is not JSON lines, and too long for one value (more than {format_bytes(LONGEST_VALUE)})"
                self.bad(str(path), what, "write each record on a line of its own")
                return
        try:
            values = [*_values("".join(whole))]
        except (ValueError, RecursionError) as error:
            if not self.skip_bad:
                what = f"is not JSON ({first_line(error)})"
                self.bad(str(path), what, "expected records, one per line or in one array")
            yield from self._json_records(whole, False, path)
            return
        records = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        yield from ((f"record {place} of {path}", each) for place, each in enumerate(records, 1))

    def _table_rows(self, lines: Iterator[str], path: Path, is_tabs: bool) -> Iterator[tuple[str, Any]]:
        """Yield the rows of a table with a header."""
        csv.field_size_limit(LONGEST_VALUE)
        header = next((line for line in lines if line.strip()), "")
        counts = {mark: header.count(mark) for mark in ("\t" if is_tabs else ",", ";", "\t", "|")}
        delimiter = max(counts, key=lambda mark: counts[mark])
        rows = csv.DictReader(chain((header,), lines), delimiter=delimiter, strict=True)
        try:
            if list(rows.fieldnames or ()).count(self.column) > 1:
                self.bad(str(path), f"has several columns {self.column}", "rename all but one")
                return
            for row in rows:
                where = f"line {rows.line_num} of {path}"
                if None in row:
                    what = f"has more cells than the {len(rows.fieldnames or ())} of the header"
                    self.bad(where, what, 'put texts that hold the delimiter in quotes ("…")')
                else:
                    yield where, row
        except csv.Error as error:
            self.bad(
                f"what follows line {rows.line_num} of {path}", f"is no row of a table ({error})", "mend its quotes"
            )

    def _parquet_rows(self, path: Path) -> Iterator[Any]:
        pa = import_extra("pyarrow", f"reading {path}")
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path) as table:
                names = table.schema_arrow.names
                top = self.column if self.column in names else self.column.partition(".")[0]
                if names.count(top) != 1:
                    what = f"has several columns {top}" if top in names else f"has no column {self.column}"
                    self.bad(str(path), what, f"its columns: {shown(names)}; name one with --column")
                    return
                for batch in table.iter_batches(batch_size=256, columns=[self.column]):
                    for number in range(batch.num_rows):
                        yield self._row_of(batch.slice(number, 1), path)
        except OSError as error:
            why = error.strerror if error.errno is not None else first_line(error)
            self.bad(str(path), f"is damaged, or cannot be read ({why})", "fetch it again")
        except pa.ArrowException as error:
            self.bad(str(path), f"is damaged ({first_line(error)})", "fetch it again")

    def _row_of(self, row: Any, path: Path) -> Any:
        try:
            return row.to_pylist()[0]
        except (ValueError, OverflowError) as error:
            self.bad(str(path), f"has a record that is no text ({first_line(error)})")
            return {self.column: None}

    def _text_of(self, record: Any, where: str) -> str | None:
        """Return the text of a record; None if it has none."""
        if not isinstance(record, dict):
            self.bad(where, f"is {_kind(record)}", 'expected an object such as {"text": "…"}')
            return None
        value: Any = record
        for key in (self.column,) if self.column in record else self.column.split("."):
            if value is None:
                break
            if isinstance(value, list):
                self.bad(where, f"has a list where {self.column} leads", "make a file with one record for each text")
                return None
            if not isinstance(value, dict) or key not in value:
                self.bad(where, f"has no column {self.column}", f"its columns: {shown(record)}; name one with --column")
                return None
            value = value[key]
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            value = self._rendered(value, where)
            if value is None:
                return None
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
        waiting, context, is_start = "", "", True
        for chunk in chunks:
            waiting += self._without_surrogates(chunk)
            at = 0
            while len(waiting) - at > PIECE_CHARACTERS:
                cut = at + _cut_at(waiting[at : at + PIECE_CHARACTERS])
                yield Piece(waiting[at:cut], context, is_start, False, where)
                context, is_start, at = waiting[max(0, cut - CONTEXT_CHARACTERS) : cut], False, cut
            waiting = waiting[at:]
        if waiting:
            yield Piece(waiting, context, is_start, True, where)

    def _without_surrogates(self, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            text, number = _SURROGATES.subn("\N{REPLACEMENT CHARACTER}", text)
            self.skipped["lone surrogates, which became U+FFFD"] += number
        return text


def shown(names: Iterable[Any]) -> str:
    """Return the first names of columns on one line, each cut if it is long."""
    listed = [repr(str(name)[:_LONGEST_NAME])[1:-1] for name in names]
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return (", ".join(listed[:_MOST_NAMES]) or "none") + more


def _split(chunks: Iterable[Any], end: Any) -> Iterator[Any]:
    """Yield lines with their ends, of text or bytes; None for one that is longer than `LONGEST_VALUE`."""
    waiting: list[Any] = []
    length = 0
    for chunk in chunks:
        *whole, rest = chunk.split(end)
        for line in whole:
            is_too_long = length + len(line) > LONGEST_VALUE
            yield None if is_too_long else end[:0].join([*waiting, line, end])
            waiting, length = [], 0
        length += len(rest)
        waiting.append(rest)
        if length > LONGEST_VALUE:
            waiting.clear()
    if length:
        yield end[:0].join(waiting) if length <= LONGEST_VALUE else None


def _is_utf8(first: bytes) -> bool:
    """Return whether the first bytes of a file can only be UTF-8: other encodings hardly ever give such sequences."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(first)
    except UnicodeError:
        return False
    return sum(character > "\x7f" for character in text) >= _SURE_CHARACTERS


def _values(text: str) -> Iterator[Any]:
    decoder, place = json.JSONDecoder(), len(text) - len(text.lstrip(_BEFORE_VALUES))
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        yield value
        gap = _BETWEEN_VALUES.match(text, place)
        place = gap.end() if gap is not None else place


def _cut_at(text: str) -> int:
    """Return where to cut, in the second half: before a space in the middle of a line, behind a line, or at the end."""
    half = len(text) // 2
    place = text.rfind(" ", half, len(text) - 1)
    while place > half and not _MIDDLE_OF_LINE.match(text, place):
        place = text.rfind(" ", half, place)
    return place if place > half else max(text.rfind("\n", half) + 1, 0) or len(text)


def _message(value: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message with a role and a content, from either of the two usual layouts.

    Raises:
        LookupError: it is none.
    """
    if not {"role", "content"} <= value.keys():
        roles = {"human": "user", "gpt": "assistant"}
        value = {"role": roles.get(str(value["from"]), value["from"]), "content": value["value"]}
    role, content = value["role"], value["content"]
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part["text"]) for part in content)
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and value.get("tool_calls"))):
        raise LookupError("role or content is no text")
    return {**value, "content": content}


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a truth value", list: "a list", dict: "an object", str: "a text"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"the number {value!r}"
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _remedy(column: str, value: Any) -> str:
    if isinstance(value, dict) and "0" in value:
        return "write one record per line, as pandas does with to_json(orient='records', lines=True)"
    if isinstance(value, dict) and value:
        return f"name a column in it, such as --column {column}.{shown([next(iter(value))])}"
    return "expected text, or chat messages with role and content"
