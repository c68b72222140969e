"""Making shards of tokens from text files, JSON lines, Parquet and datasets, all made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.text.token_shards import TokenText, total_tokens
from p2p_diloco.text.tokenize_text import SHARD_TOKENS, TokenizeOptions, pieces_of, tokenize_text
from p2p_diloco.text.tokenizer_files import (
    TOKENIZER,
    SpecialTokens,
    decode_tokenizer,
    exported_files,
    read_tokenizer_folder,
)

TEXTS = [f"Island {number} sent its round {number * 7} to the roster.\n" for number in range(400)]


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason='pip install "p2p-diloco[hf]" brings it; make models runs this')


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return the folder of a tokenizer of 300 tokens, trained on the texts."""
    tokenizers = needs("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / TOKENIZER))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


def write_lines(path: Path, texts: list[str] = TEXTS, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def options(tokenizer: Path, *sources: object, **more: Any) -> TokenizeOptions:
    return TokenizeOptions(sources=tuple(map(str, sources)), tokenizer=str(tokenizer), **more)


def decoded(text: TokenText, parts: Any) -> str:
    tokenizers = needs("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(decode_tokenizer(text.tokenizer(), "it").texts[TOKENIZER])
    pieces = [tokenizer.decode(text.read(start, stop).tolist(), skip_special_tokens=False) for start, stop in parts]
    return "".join(pieces)


def test_shards_hold_every_document_once_in_the_training_or_the_held_out_part(tmp_path: Path, tokenizer: Path) -> None:
    source = write_lines(tmp_path / "docs.jsonl")
    index = tokenize_text(options(tokenizer, source, held_out=0.1), tmp_path / "tokens", print)
    text = TokenText(tmp_path / "tokens")
    train, held = decoded(text, text.train_parts), decoded(text, text.held_out_parts)
    documents = [each for part in (train, held) for each in part.split("<|endoftext|>") if each]
    assert sorted(documents) == sorted(TEXTS)
    assert 0.05 < total_tokens(index.held_out) / total_tokens(index.shards) < 0.15
    assert index.vocabulary == 300
    assert abs(index.bytes_per_token - len("".join(TEXTS)) / total_tokens(index.shards)) < 0.5


def test_all_kinds_of_files_give_the_same_documents(tmp_path: Path) -> None:
    pa, parquet = needs("pyarrow"), needs("pyarrow.parquet")
    datasets = needs("datasets")
    table = pa.table({"body": TEXTS})
    parquet.write_table(table, tmp_path / "docs.parquet")
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    write_lines(tmp_path / "docs.jsonl", key="body")
    (tmp_path / "hub").mkdir()
    parquet.write_table(table, tmp_path / "hub" / "train.parquet")
    for source in ("docs.parquet", "docs.jsonl", "hf:saved", "hf:hub", "hf:hub:train"):
        place = source.replace("hf:", f"hf:{tmp_path}/") if source.startswith("hf:") else f"{tmp_path}/{source}"
        assert [piece.text for piece in pieces_of(place, "body")] == TEXTS, source


def test_a_long_text_file_is_read_in_pieces_that_end_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join(TEXTS) * 20)
    pieces = list(pieces_of(str(path), "text"))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == path.read_text()
    assert all(piece.text.endswith("\n") for piece in pieces)
    assert [piece.is_end for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_weights_and_limits_are_kept_in_the_index(tmp_path: Path, tokenizer: Path) -> None:
    one, two = write_lines(tmp_path / "one.jsonl"), write_lines(tmp_path / "two.jsonl")
    index = tokenize_text(options(tokenizer, f"{one}=0.25", two, most_tokens=1000), tmp_path / "tokens", print)
    assert [source.name for source in index.sources] == [str(one), str(two)]
    assert index.sources[0].weight == 0.25
    assert index.sources[1].weight == total_tokens(index.sources[1].shards)
    assert all(1000 <= total_tokens(source.shards) < 1100 for source in index.sources)


def test_a_long_text_fills_several_shards(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_diloco.text.tokenize_text.SHARD_TOKENS", 1000)
    source = write_lines(tmp_path / "docs.jsonl")
    index = tokenize_text(options(tokenizer, source), tmp_path / "tokens", print)
    sizes = [shard.tokens for shard in index.sources[0].shards]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {1000}
    assert 1000 <= sizes[-1] < 2000
    assert SHARD_TOKENS >= 1 << 20


def test_the_end_token_can_be_chosen_or_left_out(tmp_path: Path, tokenizer: Path) -> None:
    source = write_lines(tmp_path / "docs.jsonl")
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    ends = [
        tokenize_text(options(tokenizer, source, end_token=end), tmp_path / f"tokens {end}", print).end_token
        for end in (None, "", "<|endoftext|>")
    ]
    assert ends[0] is not None
    assert ends[1:] == [None, 0]
    assert ends[0] != ends[2]
    with pytest.raises(ConfigError, match='--end-token "</s>" is not a token of'):
        tokenize_text(options(tokenizer, source, end_token="</s>"), tmp_path / "other", print)


def test_what_cannot_be_read_is_named(tmp_path: Path, tokenizer: Path) -> None:
    source = write_lines(tmp_path / "docs.jsonl", key="body")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"text": \n')
    number = tmp_path / "number.jsonl"
    number.write_text('{"text": 7}\n')
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "a word"}\n')
    cases = {
        str(source): r"line 1 of .*docs.jsonl has no field text; name one with --text-field: body",
        str(broken): r"line 2 of .*broken.jsonl is not JSON; expected one JSON object per line",
        str(number): r"text in line 1 of .*number.jsonl is int; expected text",
        str(short): r"short.jsonl has too little text: \d+ tokens, all of them held out",
        f"{source}=0": r"the weight of .*docs.jsonl is 0; expected a positive number",
        str(tmp_path / "nowhere"): r"text .*nowhere does not exist",
        f"hf:{tmp_path}/nowhere": r"cannot read the dataset .*nowhere",
    }
    for place, text in cases.items():
        with pytest.raises(ConfigError, match=text):
            tokenize_text(options(tokenizer, place), tmp_path / f"tokens {len(place)} {text[:5]}", print)
    with pytest.raises(ConfigError, match=r"there is no tokenizer at .*elsewhere; expected tokenizer.json"):
        tokenize_text(options(tmp_path / "elsewhere", source), tmp_path / "no tokenizer", print)
    with pytest.raises(ConfigError, match=r"docs.jsonl is not a tokenizer"):
        tokenize_text(options(source, source), tmp_path / "no tokenizer", print)
    with pytest.raises(ConfigError, match=r"--held-out is 0.9; expected more than 0 and at most 0.5"):
        tokenize_text(options(tokenizer, source, held_out=0.9), tmp_path / "no share", print)


def test_an_export_has_the_tokenizer_as_it_was_published_but_for_what_names_code_or_this_machine(
    tmp_path: Path,
) -> None:
    document = {
        "added_tokens": [{"content": "<s>", "id": 1}, {"content": "</s>", "id": 2}],
        "model": {"vocab": {"a": 0}},
    }
    texts = {
        TOKENIZER: json.dumps(document),
        "tokenizer_config.json": '{"eos_token": {"content": "</s>"}, "auto_map": {"AutoTokenizer": "x"}, "add_x": 1}',
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"eos_token_id": [2, 1, 9]}',
    }
    for name, content in {**texts, "secret.txt": "mine"}.items():
        (tmp_path / name).write_text(content)
    tokenizer = decode_tokenizer(read_tokenizer_folder(tmp_path).encode(), "it")
    files = exported_files(tokenizer, 64)
    assert files.keys() == {TOKENIZER, "tokenizer_config.json", "chat_template.jinja"}
    assert files[TOKENIZER].decode() == texts[TOKENIZER]
    assert json.loads(files["tokenizer_config.json"]) == {
        "eos_token": {"content": "</s>"},
        "add_x": 1,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
    }
    assert tokenizer.special() == SpecialTokens(document_end=2, ends=(2, 1)), "9 is no token"
    assert tokenizer.vocabulary == 3
    assert exported_files(None, None).keys() == {TOKENIZER, "tokenizer_config.json"}


@pytest.mark.parametrize(
    "encoded", [b"", b"[]", b"{}", b'{"tokenizer.json": 1}', b'{"tokenizer.json": "{}", "x.py": ""}']
)
def test_what_is_no_bundle_of_a_tokenizers_files_is_refused(encoded: bytes) -> None:
    with pytest.raises(ConfigError, match=r"t.json does not hold a tokenizer's files .*make the tokens again"):
        decode_tokenizer(encoded, "t.json")
