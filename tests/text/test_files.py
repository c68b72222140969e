"""Every kind of file that people have gives its documents, counted by another reader, or one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_files import KINDS, Kind

from p2p_diloco.errors import ConfigError
from p2p_diloco.text.token_shards import TokenText, total_tokens
from p2p_diloco.text.tokenize_text import TokenizeOptions, tokenize_text

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
