"""Texts as people have them: each kind of file with the documents that it holds, or the sentence that refuses it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from p2p_diloco.app.text.token_shards import Shard

DOCUMENTS = [
    f'Island {number} sent "{number * 7}" to all,\nand — naïve café, 漢字 😀 — was heard.\n' for number in range(60)
]
LATIN = "naïve café\n" * 200
CHAT = [{"role": "user", "content": "How far?"}, {"role": "assistant", "content": "As far as 漢字."}]
CHAT_TEXT = "<|user|>How far?<|end|>\n<|assistant|>As far as 漢字.<|end|>\n"


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        name: of the kind, and of the file or folder.
        make: writes it to a path.
        documents: what it holds; empty if it is refused.
        refusal: pattern of the sentence that refuses it.
        options: options of `tokenize` that it needs.
        skipped: how much is left out with `--skip-bad`, if it is refused without.
        left_out: how much is left out without, and counted.
    """

    name: str
    make: Callable[[Path], object]
    documents: Sequence[str] = DOCUMENTS
    refusal: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    skipped: int = 0
    left_out: int = 0


def lines(texts: list[Any] = DOCUMENTS, **changes: Any) -> str:
    return "".join(json.dumps({"text": text}, **changes) + "\n" for text in texts)


def writes(content: bytes | str) -> Callable[[Path], object]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda path: path.write_bytes(raw)


def zstd(raw: bytes) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        from backports import zstd

        path.write_bytes(zstd.compress(raw))

    return write


def parquet(**columns: list[Any]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table(columns), path, row_group_size=16)

    return write


def damaged(make: Callable[[Path], object], place: float, change: bytes | None) -> Callable[[Path], object]:
    """Return a writer that puts `change` at a share of the file, or ends the file there."""

    def write(path: Path) -> None:
        make(path)
        raw = path.read_bytes()
        at = int(len(raw) * place)
        path.write_bytes(raw[:at] if change is None else raw[:at] + change + raw[at + len(change) :])

    return write


def folder(**files: Callable[[Path], object]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.mkdir()
        for name, make in files.items():
            (path / name.replace("__", ".")).parent.mkdir(exist_ok=True)
            make(path / name.replace("__", "."))

    return write


def links(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def table(delimiter: str) -> str:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(["number", "text"])
    writer.writerows(enumerate(DOCUMENTS))
    return out.getvalue()


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("docs.txt", "".join(DOCUMENTS))


def joined(*makes: Callable[[Path], object]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        raw = b""
        for make in makes:
            make(path)
            raw += path.read_bytes()
        path.write_bytes(raw)

    return write


def not_utf8(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    raw = pa.array([*(text.encode() for text in DOCUMENTS), b"na\xefve"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": raw}), path)


def saved_dataset(path: Path, **form: Any) -> None:
    import datasets

    made = datasets.Dataset.from_dict({"text": DOCUMENTS, "label": [*range(len(DOCUMENTS))]})
    made.with_format(**form).save_to_disk(str(path))


def with_configurations(path: Path) -> None:
    """Write a dataset with two configurations of two splits, as on the hub."""
    header = ["---", "configs:"]
    for name in ("en", "de"):
        header += [f"- config_name: {name}", "  data_files:"]
        (path / name).mkdir(parents=True)
        for split in ("train", "test"):
            header += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
            texts = DOCUMENTS if name == "en" else [text.upper() for text in DOCUMENTS]
            (path / name / f"{split}.jsonl").write_text(lines(texts if split == "train" else texts[:40]))
    (path / "README.md").write_text("\n".join([*header, "---", ""]))


RAW = lines().encode()
TEXT = "".join(DOCUMENTS)
MIXED = "".join(f"{number * number:x} {number % 977}\n" for number in range(60_000))
"""Longer than a block of bytes when it is compressed, so that a decompressor gives nothing at first."""
SURROGATE = '{"text": "broken \\ud83d emoji"}\n'
ONE = "line {} of .*"
KINDS = [
    Kind("docs.jsonl", writes(RAW)),
    Kind("docs.ndjson", writes(RAW)),
    Kind("ascii.jsonl", writes(lines(ensure_ascii=True))),
    Kind("utf8.jsonl", writes(lines(ensure_ascii=False))),
    Kind("DOCS.JSONL", writes(RAW)),
    Kind("docs.jsonl.gz", writes(gzip.compress(RAW))),
    Kind("two-members.jsonl.gz", writes(gzip.compress(RAW[:1000]) + gzip.compress(RAW[1000:]))),
    Kind("docs.jsonl.bz2", writes(bz2.compress(RAW))),
    Kind("docs.jsonl.xz", writes(lzma.compress(RAW))),
    Kind("docs.jsonl.zst", zstd(RAW)),
    Kind("docs.json.gz", writes(gzip.compress(RAW))),
    Kind("packed-without-saying.jsonl", writes(gzip.compress(RAW))),
    Kind("docs.txt.gz", writes(gzip.compress(TEXT.encode())), [TEXT]),
    Kind("bom.jsonl", writes(b"\xef\xbb\xbf" + RAW)),
    Kind("two-marked-files.jsonl", writes(b"\xef\xbb\xbf" + RAW + b"\xef\xbb\xbf" + RAW), DOCUMENTS * 2),
    Kind("utf16.jsonl", writes(lines(ensure_ascii=False).encode("utf-16"))),
    Kind("blank-lines.jsonl", writes(b"\n\n" + RAW.replace(b"\n", b"\n\n  \n"))),
    Kind("crlf.jsonl", writes(RAW.replace(b"\n", b"\r\n"))),
    Kind("no-last-line-end.jsonl", writes(RAW.rstrip())),
    Kind("several-on-a-line.jsonl", writes(RAW.replace(b"}\n{", b"}{").replace(b"}{", b"}, {", 9))),
    Kind("c4.json", writes(RAW)),
    Kind("array.json", writes(json.dumps([{"text": text} for text in DOCUMENTS]))),
    Kind("pretty-array.json", writes(json.dumps([{"text": text} for text in DOCUMENTS], indent=2))),
    Kind("array-after-lines.json", writes("\n\n" + json.dumps([{"text": text} for text in DOCUMENTS]))),
    Kind("pretty-objects.json", writes("\n".join(json.dumps({"text": text}, indent=1) for text in DOCUMENTS))),
    Kind("one-object.json", writes(json.dumps({"text": TEXT}, indent=1)), [TEXT]),
    Kind("other-column.jsonl", writes(RAW.replace(b'"text"', b'"body"')), options={"column": "body"}),
    Kind("dotted-column.jsonl", writes(RAW.replace(b'"text"', b'"a.b"')), options={"column": "a.b"}),
    Kind(
        "nested.jsonl",
        writes("".join(json.dumps({"meta": {"body": text}}) + "\n" for text in DOCUMENTS)),
        options={"column": "meta.body"},
    ),
    Kind("chat.jsonl", writes(lines([CHAT] * 30)), [CHAT_TEXT] * 30),
    Kind(
        "sharegpt.jsonl",
        writes(lines([[{"from": "human", "value": "How far?"}, {"from": "gpt", "value": "As far as 漢字."}]] * 30)),
        [f"{CHAT_TEXT}"] * 30,
    ),
    Kind("without-text.jsonl", writes(lines([None, "", *DOCUMENTS, None])), left_out=3),
    Kind("lone-surrogates.jsonl", writes(SURROGATE * 60), ["broken \ufffd emoji"] * 60, left_out=60),
    Kind("pairs.jsonl", writes('{"text": "whole \\ud83d\\ude00"}\n' * 60), ["whole 😀"] * 60),
    Kind("table.csv", writes(table(","))),
    Kind("table.tsv", writes(table("\t"))),
    Kind("table.csv.gz", writes(gzip.compress(table(",").encode()))),
    Kind("blank-lines.csv", writes("\n\r\n" + table(","))),
    Kind("semicolons.csv", writes(table(";"))),
    Kind("crlf-in-cells.csv", writes("text,id\r\n" + '"a\r\n\r\nb",1\r\n' * 60), ["a\r\n\r\nb"] * 60),
    Kind("cr.csv", writes('"a ""name""",text\r' + '1,"a\r\n\nb\rc"\r' * 60), ["a\r\n\nb\rc"] * 60),
    Kind("twice-cr.csv", writes("id,text\r\r\n" + "1,c\r\r\n" * 60), ["c"] * 60),
    Kind("crlf-after-cr.csv", writes('id,text\r\n1,"a\rb"\r\n' + "2,c\r\n" * 60), ["a\rb", *["c"] * 60]),
    Kind("docs.jl", writes(RAW)),
    Kind("padded.jsonl.xz", writes(lzma.compress(RAW[:999]) + b"\0" * 64 + lzma.compress(RAW[999:]) + b"\0" * 4)),
    Kind("marked.txt.bz2", writes(bz2.compress(b"\xef\xbb\xbf" + MIXED.encode())), [MIXED]),
    Kind("two-frames.jsonl.zst", joined(zstd(RAW[:999]), zstd(RAW[999:]))),
    Kind(
        "parts.jsonl",
        writes(lines([[{**each, "content": [{"type": "text", "text": each["content"]}]} for each in CHAT]] * 30)),
        [CHAT_TEXT] * 30,
    ),
    Kind(
        "null-above.jsonl",
        writes("".join(json.dumps({"a": {"b": each}}) + "\n" for each in DOCUMENTS) + '{"a": null}'),
        options={"column": "a.b"},
        left_out=1,
    ),
    Kind("begins-as-pdf.txt", writes("%PDF-output is a text.\n" * 300), ["%PDF-output is a text.\n" * 300]),
    Kind("docs.parquet", parquet(text=DOCUMENTS)),
    Kind("nulls.parquet", parquet(text=[None, *DOCUMENTS, ""], meta=[{"a": 1}] * 62), left_out=2),
    Kind("nested.parquet", parquet(meta=[{"b": text} for text in DOCUMENTS]), options={"column": "meta.b"}),
    Kind("chat.parquet", parquet(text=[CHAT] * 30), [CHAT_TEXT] * 30),
    Kind("parquet-without-saying", parquet(text=DOCUMENTS)),
    Kind("docs.txt", writes(TEXT), [TEXT]),
    Kind("bom.txt", writes(b"\xef\xbb\xbf" + TEXT.encode()), [TEXT]),
    Kind("utf16.txt", writes(TEXT.encode("utf-16")), [TEXT]),
    Kind("utf16-be.txt", writes(b"\xfe\xff" + TEXT.encode("utf-16-be")), [TEXT]),
    Kind("utf32.txt", writes(TEXT.encode("utf-32")), [TEXT]),
    Kind("utf16-without-mark.txt", writes(TEXT.encode("utf-16-le")), [TEXT], options={"encoding": "utf-16-le"}),
    Kind(
        "latin-1.txt",
        writes(LATIN.encode("latin-1")),
        [LATIN],
        options={"encoding": "latin-1"},
    ),
    Kind("crlf.txt", writes(TEXT.replace("\n", "\r\n")), [TEXT.replace("\n", "\r\n")]),
    Kind("code.py", writes(TEXT), [TEXT]),
    Kind("no-suffix", writes(TEXT), [TEXT]),
    Kind("year=2024", folder(docs__jsonl=writes(RAW))),
    Kind("mixed", folder(a__txt=writes(TEXT), b__jsonl=writes(RAW), c__txt=writes(b"")), [TEXT, *DOCUMENTS]),
    Kind("hidden", folder(docs__jsonl=writes(RAW), __secret=writes("not read")), left_out=1),
    Kind(
        "spark",
        folder(
            **{"part-00000": writes(RAW), "part-00001.gz": writes(gzip.compress(b"\n" + RAW)), "_SUCCESS": writes(b"")},
            **{
                "part-2.c000.snappy__parquet": parquet(text=DOCUMENTS),
                "_committed_1": writes('{"added":["part-00000"]}'),
            },
            **{"__part-00000.crc": writes(b"crc\0")},
        ),
        DOCUMENTS * 3,
        left_out=2,
    ),
    Kind("loop", folder(docs__jsonl=writes(RAW), again=links("."), up=links("../loop"))),
    Kind("linked-folder", folder(docs__jsonl=writes(RAW), more=links("../loop-target")), [*DOCUMENTS, "linked"]),
    Kind("saved", saved_dataset),
    Kind("hf:saved", saved_dataset),
    Kind("saved-as-tables", lambda path: saved_dataset(path, type="pandas")),
    Kind("saved-without-text", lambda path: saved_dataset(path, type="torch", columns=["label"])),
    Kind("hf:configs:en", with_configurations),
    Kind("hf:configs:de[test]", with_configurations, [text.upper() for text in DOCUMENTS[:40]]),
    # what is refused
    Kind(
        "bare-commas.csv",
        writes("id,text\n" + "1,well\n" * 60 + "2,Doc 2 is, well, here.\n"),
        refusal="line 62 of .* has more cells than the 2 of the header; put texts that hold the delimiter in quotes",
        skipped=1,
    ),
    Kind("open-quote.csv", writes('id,text\n1,"open\n2,x\n3,y\n'), refusal="is no row of a table .*; mend its quotes"),
    Kind(
        "loose-quote.tsv",
        writes('id\ttext\n1\t"Hello" she said\n'),
        refusal="follows line 1 of .* is no row of a table",
    ),
    Kind("two-columns.csv", writes("text,text\na,b\n"), refusal="has several columns text; rename all but one"),
    Kind(
        "second-stream.jsonl.bz2",
        writes(bz2.compress(RAW[:999]) + b"XX" + bz2.compress(RAW[999:])[2:]),
        refusal="bz2 is damaged, or ends too early",
    ),
    Kind(
        "one-bad-byte.jsonl",
        writes(RAW + b'{"text": "na\xefve"}\n'),
        refusal="line 61 of .* is not UTF-8 at its byte 12; ",
        skipped=1,
    ),
    Kind("mostly-utf8.txt", writes(TEXT.encode() + b"\xff" + TEXT.encode()), refusal="most of it is UTF-8, so mend it"),
    Kind("no-role.jsonl", writes(lines([[{"role": ["a"], "content": 3}]])), refusal="objects in text that are no chat"),
    Kind("data.json", writes(json.dumps({"data": [{"title": "a"}]})), refusal="its columns: data; name one with"),
    Kind(
        "data-title.json",
        writes(json.dumps({"data": [{"title": "a"}]})),
        refusal=r"has a list where data.title leads; make a file with one record for each text",
        options={"column": "data.title"},
    ),
    Kind("not-utf8.parquet", not_utf8, refusal="has a record that is no text", skipped=2),
    Kind("paper-latin.pdf", writes(b"%PDF-1.7\n%\xe2"), refusal="is a PDF; extract", options={"encoding": "latin-1"}),
    Kind("hf:saved[train]", saved_dataset, refusal="has no such parts; name it without configuration and split"),
    Kind("cut.jsonl.gz", writes(gzip.compress(RAW)[:-30]), refusal="cut.jsonl.gz is damaged, or ends too early"),
    Kind("flipped.jsonl.gz", damaged(writes(gzip.compress(RAW)), 0.5, b"\0\0\0\0"), refusal="gz is damaged"),
    Kind("cut.jsonl.bz2", writes(bz2.compress(RAW)[:-30]), refusal="is damaged, or ends too early"),
    Kind("cut.jsonl.xz", writes(lzma.compress(RAW)[:-30]), refusal="is damaged, or ends too early"),
    Kind("cut.jsonl.zst", damaged(zstd(RAW), 0.7, None), refusal="is damaged, or ends too early"),
    Kind("plain.jsonl.gz", writes(RAW), refusal=r"is not compressed, against its name; rename it without \.gz"),
    Kind(
        "cut.jsonl",
        writes(RAW[:-30]),
        refusal=r"line 60 of .* is not JSON \(.*expected one JSON object",
        skipped=1,
    ),
    Kind("text.jsonl", writes(TEXT), refusal="line 1 of .*text.jsonl is not JSON"),
    Kind("cut-array.json", writes(json.dumps([{"text": "a"}] * 9)[:-9]), refusal=r"is not JSON \(.*expected records"),
    Kind(
        "garbage-on-line-2.json",
        writes(b"\n" + RAW.replace(b"\n", b" and more\n", 1)),
        refusal=r"is not JSON \(Expecting value: line 2 column \d+ .*expected records",
        skipped=1,
    ),
    Kind("cut-line-1.json", writes(RAW[:20] + b"\n" + RAW), refusal=r"is not JSON \(.*expected records", skipped=1),
    Kind("nan.jsonl", writes('{"text": NaN}\n' + lines()), refusal="line 1 of .* has the number nan", skipped=1),
    Kind("number.jsonl", writes(lines() + '{"text": 7}\n'), refusal="line 61 of .* has the number 7", skipped=1),
    Kind(
        "objects.jsonl",
        writes(lines([{"a": "x"}] * 3)),
        refusal=r"line 1 of .* has an object in text; name a column in it, such as --column text\.a",
    ),
    Kind("lists.jsonl", writes(lines([["a", "b"]])), refusal="has a list in text; expected text, or chat messages"),
    Kind("no-object.jsonl", writes('["a"]\n'), refusal="line 1 of .* is a list; expected an object such as"),
    Kind(
        "no-messages.jsonl", writes(lines([[{"who": "me"}]])), refusal="has objects in text that are no chat messages"
    ),
    Kind("no-column.jsonl", writes(RAW.replace(b'"text"', b'"body"')), refusal="has no column text; its columns: body"),
    Kind("no-column.csv", writes("a,b\n1,2\n"), refusal="has no column text; its columns: a, b; name one"),
    Kind(
        "no-column.parquet",
        parquet(body=DOCUMENTS),
        refusal="has no column text; its columns: body; name one",
    ),
    Kind("all-null.parquet", parquet(text=[None] * 9), refusal="all-null.parquet has no text; 9 records without text"),
    Kind("corrupt.parquet", damaged(parquet(text=DOCUMENTS), 0.2, b"\xff" * 40), refusal="corrupt.parquet is damaged"),
    Kind("cut.parquet", damaged(parquet(text=DOCUMENTS), 0.5, None), refusal="cut.parquet is damaged"),
    Kind("text.parquet", writes(TEXT), refusal="text.parquet is damaged"),
    Kind("empty.parquet", writes(b""), refusal="empty.parquet is empty"),
    Kind("empty.txt", writes(b""), refusal=r"empty.txt is empty \(1 file\)"),
    Kind("empty", folder(), refusal=r"empty is empty"),
    Kind(
        "latin-1.txt",
        writes(LATIN.encode("latin-1")),
        refusal=r"latin-1.txt is not UTF-8 at byte 2; it looks like \S+: if it is, add --encoding",
    ),
    *(
        Kind(
            name, writes(raw), refusal="is UTF-8, against --encoding cp1252; read such", options={"encoding": "cp1252"}
        )
        for name, raw in (("utf8.txt", TEXT), ("utf8.jsonl", lines(ensure_ascii=False)))
    ),
    Kind("by-columns.json", writes('{"text": {"0": "a", "1": "b"}}'), refusal=r"to_json\(orient='records', lines=True"),
    Kind("late.txt", writes(b"a" * 100_000 + b"\xff"), refusal="late.txt is not UTF-8 at byte 100,000"),
    Kind("cut-character.txt", writes("aé".encode()[:-1]), refusal="is not UTF-8 at byte 1"),
    Kind("utf16-without-mark.txt", writes("ab\n".encode("utf-16-le") * 99), refusal="NUL bytes; if it is UTF-16"),
    Kind(
        "picture.png", writes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"), refusal="not UTF-8 at byte 0; it holds bytes that no"
    ),
    Kind("docs.zip", zipped, refusal="docs.zip is an archive; unpack it"),
    Kind("docs.txt.lz4", writes(b"\x04\x22\x4d\x18"), refusal="is compressed in no form that is read; unpack it"),
    Kind("pages.warc.gz", writes(gzip.compress(b"WARC/1.0\r\n")), refusal="is a web archive; extract its texts first"),
    Kind("letter.rtf", writes("{\\rtf1 Hello}"), refusal="letter.rtf is RTF; save it as plain text"),
    *(
        Kind(
            f"pointer.{end}",
            writes("version https://git-lfs.github.com/spec/v1\n"),
            refusal="is a pointer of Git LFS; ",
        )
        for end in ("txt", "parquet", "jsonl.gz")
    ),
    Kind("paper.pdf", writes(b"%PDF-1.7\n%\xe2\xe3"), refusal="paper.pdf is a PDF; extract its text first"),
    Kind("docs.tar.gz", writes(gzip.compress(b"a" * 257 + b"ustar\0")), refusal="docs.tar.gz is an archive; unpack it"),
    Kind(
        "delta",
        folder(_delta_log=folder(a__json=writes("{}")), **{"part-0__parquet": parquet(text=DOCUMENTS)}),
        refusal="_delta_log is of a Delta table, whose files also hold rows that were deleted; write its newest",
    ),
    Kind("broken", folder(a__txt=writes(TEXT), b__txt=links("nowhere")), refusal="b.txt is a link to nowhere"),
    Kind("broken-link.txt", links("nowhere"), refusal="broken-link.txt is a link to nowhere, which does not exist"),
    Kind("pipe", os.mkfifo, refusal="pipe is no regular file"),
    Kind("hf:configs", with_configurations, refusal="choose a configuration, such as hf:.*:en; there are: en, de"),
    Kind("hf:configs:fr", with_configurations, refusal="there is no configuration fr, such as .*; there are: en, de"),
    Kind("hf:configs:en[dev]", with_configurations, refusal="there is no split dev, .*; there are: train, test"),
    Kind("hf:configs:en[test]x", with_configurations, refusal=r"is no dataset; expected hf:owner/name:CONFIG\[SPLIT\]"),
    Kind("hf:nothing", folder(), refusal="cannot read the dataset"),
]


def total_tokens(shards: Iterable[Shard]) -> int:
    return sum(shard.tokens for shard in shards)
