"""Every kind of file that people have gives its documents, counted by another reader, or one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_files import KINDS, Kind, lines, total_tokens

from p2p_diloco.app.text import documents
from p2p_diloco.app.text.token_shards import TokenText
from p2p_diloco.app.text.tokenize_text import TokenizeOptions, tokenize_text
from p2p_diloco.app.text.unpacked import BLOCK_BYTES, unpacked
from p2p_diloco.errors import ConfigError

tokenizers: Any = pytest.importorskip(
    "tokenizers", reason='pip install "p2p-diloco[hf]" brings it; make files runs this'
)

END = "<|endoftext|>"


def place_of(kind: Kind, folder: Path) -> str:
    """Write the file, and return how `tokenize` is told of it."""
    name = kind.name.removeprefix("hf:")
    path = folder / name.partition(":")[0].partition("[")[0]
    (folder / "loop-target").mkdir()
    (folder / "loop-target" / "more.jsonl").write_text('{"text": "linked"}\n')
    kind.make(path)
    return f"hf:{folder / name}" if kind.name.startswith("hf:") else str(path)


def options_of(kind: Kind, folder: Path, tokenizer: Path, **more: Any) -> TokenizeOptions:
    source = place_of(kind, folder)
    return TokenizeOptions(sources=(source,), tokenizer=str(tokenizer), held_out=0.05, **{**kind.options, **more})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.refusal], ids=lambda kind: kind.name)
def test_a_file_gives_the_documents_that_another_reader_counts(tmp_path: Path, tokenizer: Path, kind: Kind) -> None:
    made = tokenize_text(options_of(kind, tmp_path, tokenizer), tmp_path / "tokens", print)
    other = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = [other.encode(text, add_special_tokens=False).ids for text in kind.documents]
    end = other.token_to_id(END)
    expected = sum(len(each) + 1 for each in ids)  # with a token that ends each
    assert total_tokens(made.index.shards) == expected
    assert made.taken[0].documents == len(kind.documents)
    assert sum(made.skipped.values()) == kind.left_out
    text = TokenText(tmp_path / "tokens")
    seen = [token for start, stop in (*text.held_out_parts, *text.train_parts) for token in text.read(start, stop)]
    assert sorted(seen) == sorted([token for each in ids for token in (*each, end)])
    length = sum(len(text.encode()) for text in kind.documents)
    assert made.index.bytes_per_token == pytest.approx(length / expected, abs=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.refusal], ids=lambda kind: kind.name)
def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path, tokenizer: Path, kind: Kind) -> None:
    with pytest.raises(ConfigError, match=kind.refusal) as caught:
        tokenize_text(options_of(kind, tmp_path, tokenizer), tmp_path / "tokens", print)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.skipped], ids=lambda kind: kind.name)
def test_what_cannot_be_read_is_left_out_and_counted(tmp_path: Path, tokenizer: Path, kind: Kind) -> None:
    made = tokenize_text(options_of(kind, tmp_path, tokenizer, skip_bad=True), tmp_path / "tokens", print)
    assert sum(made.skipped.values()) == kind.skipped
    assert made.taken[0].documents >= 59


@pytest.mark.parametrize("form", ["gzip", "bz2", "lzma", "backports.zstd"])
def test_a_small_file_that_holds_gigabytes_is_unpacked_in_small_pieces(tmp_path: Path, form: str) -> None:
    """Here it holds 9 MB, twice."""
    packed = pytest.importorskip(form).compress(bytes(9_000_000))
    (tmp_path / "bomb").write_bytes(packed + packed)
    lengths = [len(block) for block in unpacked(tmp_path / "bomb")]
    assert (sum(lengths), max(lengths)) == (18_000_000, BLOCK_BYTES)


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.json", "array.json", "pretty-array.json"])
def test_a_value_that_would_fill_the_memory_is_named_and_the_next_is_read(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(documents, "LONGEST_VALUE", 999)
    texts = ["well" * 400, *map(str, range(2000))]
    (tmp_path / "next.jsonl").write_text(lines(texts[1:]))
    records = [{"text": text} for text in texts]
    array = json.dumps(records[1:], indent=1) if name.startswith("pretty") else json.dumps(records)
    whole = lines(texts) if name.startswith("docs") else array
    (tmp_path / name).write_text(whole)
    options = TokenizeOptions(sources=(str(tmp_path / "*.json*"),), tokenizer=str(tokenizer))
    with pytest.raises(
        ConfigError, match=rf"{name} is .*too long.* \(more than 999 B\); write each record on a line of its own"
    ):
        tokenize_text(options, tmp_path / "tokens", print)
    made = tokenize_text(replace(options, skip_bad=True), tmp_path / "more tokens", print)
    assert sum(made.skipped.values()) == 1
    assert made.taken[0].documents == (4000 if name.startswith("docs") else 2000)
