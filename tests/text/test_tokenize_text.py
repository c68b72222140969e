"""Making shards of tokens from text files, JSON lines, Parquet and datasets, all made here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_files import total_tokens

from p2p_diloco.app.text.documents import PIECE_CHARACTERS
from p2p_diloco.app.text.token_shards import TokenText
from p2p_diloco.app.text.tokenize_text import SHARD_TOKENS, TokenizeOptions, tokenize_text
from p2p_diloco.app.text.tokenizer_files import (
    TOKENIZER,
    SpecialTokens,
    decode_tokenizer,
    exported_files,
    read_tokenizer_folder,
)
from p2p_diloco.errors import ConfigError

SPECIAL = ("<|endoftext|>", "<|end|>")
TEXTS = [f"Island {number} sent its round {number * 7} to the roster.\n" for number in range(400)]


def needs(package: str) -> Any:
    return pytest.importorskip(package, reason='pip install "p2p-diloco[hf]" brings it; make models runs this')


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
    index = tokenize_text(options(tokenizer, source, held_out=0.1), tmp_path / "tokens", print).index
    text = TokenText(tmp_path / "tokens")
    train, held = decoded(text, text.train_parts), decoded(text, text.held_out_parts)
    documents = [each for part in (train, held) for each in part.split("<|endoftext|>") if each]
    assert sorted(documents) == sorted(TEXTS)
    assert 0.05 < total_tokens(index.held_out) / total_tokens(index.shards) < 0.15
    assert index.vocabulary == 300
    assert abs(index.bytes_per_token - len("".join(TEXTS)) / total_tokens(index.shards)) < 0.5


def test_a_long_document_is_cut_without_changing_its_tokens(tmp_path: Path, tokenizer: Path) -> None:
    """It is not held out as a whole: it is cut into pieces, of which one is held out."""
    whole = "".join(TEXTS) * 60
    assert len(whole) > 4 * PIECE_CHARACTERS
    (tmp_path / "long.txt").write_text(whole)
    made = tokenize_text(options(tokenizer, tmp_path / "long.txt"), tmp_path / "tokens", print)
    text = TokenText(tmp_path / "tokens")
    tokenizers = needs("tokenizers")
    ids = tokenizers.Tokenizer.from_file(str(tokenizer / TOKENIZER)).encode(whole).ids
    assert made.taken[0].documents == 1
    seen = [token for start, stop in (*text.held_out_parts, *text.train_parts) for token in text.read(start, stop)]
    assert len(seen) == len(ids) + 1
    assert sorted(seen) == sorted([*ids, made.index.end_token])
    assert 0.005 < total_tokens(made.index.held_out) / len(seen) < 0.015


def test_each_layout_of_tokenizers_gives_the_tokens_of_the_whole_document_however_long(
    tmp_path: Path, tokenizer: Path
) -> None:
    """Llama 2 puts a mark before a text, which a cut text would have once in each piece."""

    def prepend(document: dict[str, Any]) -> None:
        marked = [{"type": "Prepend", "prepend": "!"}, {"type": "Replace", "pattern": {"String": "~"}, "content": "!"}]
        document["normalizer"] = {"type": "Sequence", "normalizers": marked}

    whole = "".join(TEXTS) * 60
    (tmp_path / "long.txt").write_text(whole)
    made = variant(tokenizer, tmp_path / "made", prepend)
    tokenize_text(options(made, tmp_path / "long.txt"), tmp_path / "tokens", print)
    text = TokenText(tmp_path / "tokens")
    ids = needs("tokenizers").Tokenizer.from_file(str(made / TOKENIZER)).encode(whole).ids
    seen = [token for start, stop in (*text.held_out_parts, *text.train_parts) for token in text.read(start, stop)]
    assert sorted(seen) == sorted([*ids, 0])


@pytest.mark.parametrize("shift", range(6))
def test_a_text_without_a_place_to_cut_is_taken_once_from_its_first_to_its_last_character(
    tmp_path: Path, tokenizer: Path, shift: int
) -> None:
    """As Chinese has none: a token that lay across a cut was taken whole, after its beginning had been taken."""
    whole = "-" * shift + "roster" * (PIECE_CHARACTERS // 4)
    (tmp_path / "long.txt").write_text(whole)
    tokenize_text(options(tokenizer, tmp_path / "long.txt"), tmp_path / "tokens", print)
    text = TokenText(tmp_path / "tokens")
    taken = decoded(text, (*text.held_out_parts, *text.train_parts)).replace("<|endoftext|>", "")
    assert len(taken) == len(whole)


def test_a_tokenizer_that_splits_at_random_does_not(tmp_path: Path, tokenizer: Path) -> None:
    made = variant(tokenizer, tmp_path / "made", lambda each: each["model"].update(dropout=0.5))
    source = write_lines(tmp_path / "docs.jsonl")
    one, two = (
        tokenize_text(options(each, source), tmp_path / f"{each.name} tokens", print) for each in (tokenizer, made)
    )
    assert one.index.shards == two.index.shards


def test_the_length_of_a_token_counts_only_what_was_taken(tmp_path: Path, tokenizer: Path) -> None:
    source = write_lines(tmp_path / "docs.jsonl", ["".join(TEXTS)] * 3)
    whole, part = (
        tokenize_text(options(tokenizer, source, most_tokens=most), tmp_path / f"tokens {most}", print)
        for most in (None, 100)
    )
    assert part.index.bytes_per_token == pytest.approx(whole.index.bytes_per_token, rel=0.05)
    assert part.taken[0].documents == 1


def test_each_document_ends_once_also_where_its_text_begins_with_the_end(tmp_path: Path, tokenizer: Path) -> None:
    texts = ["<|endoftext|>a", "b", "c<|endoftext|>"] * 400
    index = tokenize_text(
        options(tokenizer, write_lines(tmp_path / "d.jsonl", texts)), tmp_path / "tokens", print
    ).index
    assert total_tokens(index.shards) == 400 * (3 + 2 + 2)


def test_a_pattern_reads_each_file_once_and_folders_that_it_matches(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    write_lines(tmp_path / "in" / "a.jsonl")
    write_lines(tmp_path / "in" / "sub" / "b.jsonl")
    for number, pattern in enumerate(("**/**/*.jsonl", "in/*", "*")):
        made = tokenize_text(options(tokenizer, f"{tmp_path}/{pattern}"), tmp_path.with_name(f"t{number}"), print)
        assert (made.taken[0].files, made.taken[0].documents) == (2, 800), pattern


def test_weights_and_limits_are_kept_in_the_index(tmp_path: Path, tokenizer: Path) -> None:
    one, two = write_lines(tmp_path / "one.jsonl"), write_lines(tmp_path / "two.jsonl")
    index = tokenize_text(options(tokenizer, f"{one}=0.25", two, most_tokens=1000), tmp_path / "tokens", print).index
    assert [source.name for source in index.sources] == [str(one), str(two)]
    assert index.sources[0].weight == 0.25
    assert index.sources[1].weight == total_tokens(index.sources[1].shards)
    assert all(1000 <= total_tokens(source.shards) < 1100 for source in index.sources)


def test_a_long_text_fills_several_shards(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_diloco.app.text.tokenize_text.SHARD_TOKENS", 1000)
    source = write_lines(tmp_path / "docs.jsonl")
    index = tokenize_text(options(tokenizer, source), tmp_path / "tokens", print).index
    sizes = [shard.tokens for shard in index.sources[0].shards]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {1000}
    assert 1000 <= sizes[-1] < 2000
    assert SHARD_TOKENS >= 1 << 20


def test_the_end_token_can_be_chosen_or_left_out_and_is_an_end_of_an_export_too(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = write_lines(tmp_path / "docs.jsonl")
    for wanted, end, ends in ((None, 0, (0,)), ("", None, (0,)), ("<|end|>", 1, (0, 1))):
        folder = tmp_path / f"tokens {wanted}"
        assert tokenize_text(options(tokenizer, source, end_token=wanted), folder, print).index.end_token == end
        assert decode_tokenizer(TokenText(folder).tokenizer(), "it").special().ends == ends
    with pytest.raises(ConfigError, match='--end-token "</s>" is not a token of'):
        tokenize_text(options(tokenizer, source, end_token="</s>"), tmp_path / "other", print)


def test_what_is_wrong_with_sources_and_options_is_named(tmp_path: Path, tokenizer: Path) -> None:
    source = write_lines(tmp_path / "docs.jsonl")
    (tmp_path / "short.jsonl").write_text('{"text": "a word"}\n')
    (tmp_path / "none").mkdir()
    cases: list[tuple[list[object], dict[str, Any], str]] = [
        ([tmp_path / "short.jsonl"], {}, r"short.jsonl has too little text: \d+ tokens, all of them held out"),
        ([f"{source}=0"], {}, r"the weight of .*docs.jsonl is 0; expected a positive number"),
        ([tmp_path / "nowhere"], {}, r"text .*nowhere does not exist"),
        ([], {}, r"name at least one text"),
        ([""], {}, r"none may be empty"),
        (["=0.5"], {}, r"none may be empty"),
        (["~nobody-here/x.jsonl"], {}, r"text ~nobody-here/x.jsonl does not exist"),
        ([source], {"encoding": "undefined"}, r"--encoding is undefined; expected one such as latin-1"),
        ([source], {"held_out": 0.9}, r"--held-out is 0.9; expected more than 0 and at most 0.5"),
        ([source], {"most_tokens": 0}, r"--most-tokens is 0; expected at least 1"),
        ([source], {"encoding": "latin-99"}, r"--encoding is latin-99; expected one such as latin-1"),
        ([source], {"encoding": "hex"}, r"--encoding is hex; expected one such as latin-1"),
        ([source], {"tokenizer": tmp_path / "elsewhere"}, r"there is no tokenizer at .*elsewhere"),
        ([source], {"tokenizer": source}, r"docs.jsonl is not a tokenizer"),
        ([source], {"tokenizer": tmp_path / "none"}, r"has no tokenizer.json, nor files to make it of"),
    ]
    for number, (sources, more, sentence) in enumerate(cases):
        folder, place = tmp_path / f"tokens {number}", more.pop("tokenizer", tokenizer)
        with pytest.raises(ConfigError, match=sentence):
            tokenize_text(options(place, *sources, **more), folder, print)


def variant(tokenizer: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a tokenizer whose `tokenizer.json` differs."""
    shutil.copytree(tokenizer, folder)
    document = json.loads((tokenizer / TOKENIZER).read_text())
    change(document)
    (folder / TOKENIZER).write_text(json.dumps(document))
    return folder


def test_truncation_and_padding_of_a_tokenizer_change_nothing(tmp_path: Path, tokenizer: Path) -> None:
    """As many are published: set for sentences of 128 tokens. Texts were cut there, and padding was trained on."""
    cutting = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    filling = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1}
    filling |= {"pad_type_id": 0, "pad_token": "<|end|>"}
    made = variant(tokenizer, tmp_path / "made", lambda each: each.update(truncation=cutting, padding=filling))
    source = write_lines(tmp_path / "docs.jsonl")
    plain, other = (
        tokenize_text(options(each, source), tmp_path / f"tokens {number}", print).index
        for number, each in enumerate((tokenizer, made))
    )
    assert plain.shards == other.shards
    kept = decode_tokenizer(TokenText(tmp_path / "tokens 1").tokenizer(), "it").document(TOKENIZER)
    assert kept["truncation"] is None
    assert kept["padding"] is None


def test_ids_may_have_holes(tmp_path: Path, tokenizer: Path) -> None:
    """The library keeps those of a vocabulary, and numbers an added token anew; an export says what was used."""

    def make_holes(document: dict[str, Any]) -> None:
        document["model"]["vocab"]["~"] = 1100
        document["added_tokens"].append({**document["added_tokens"][0], "id": 2000, "content": "<|far|>"})

    made = variant(tokenizer, tmp_path / "made", make_holes)
    source = write_lines(tmp_path / "docs.jsonl", [*TEXTS, "~ is <|far|> away", "~"])
    index = tokenize_text(options(made, source, end_token="<|far|>"), tmp_path / "tokens", print).index
    text = TokenText(tmp_path / "tokens")
    seen = {int(token) for start, stop in (*text.held_out_parts, *text.train_parts) for token in text.read(start, stop)}
    kept = decode_tokenizer(text.tokenizer(), "it")
    assert {1100, index.end_token} <= seen
    assert index.vocabulary == max(seen) + 1 == kept.vocabulary
    assert kept.special().ends[-1] == kept.ids()["<|far|>"] == index.end_token


def test_first_and_last_tokens_of_a_tokenizer_are_added_once(tmp_path: Path, tokenizer: Path) -> None:
    """It puts a token before each text, and its own end behind."""

    def frame(document: dict[str, Any]) -> None:
        named = {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in enumerate(SPECIAL)}
        first, last = ({"SpecialToken": {"id": name, "type_id": 0}} for name in reversed(SPECIAL))
        template = [first, {"Sequence": {"id": "A", "type_id": 0}}, last]
        document["post_processor"] = {
            "type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": named
        }  # fmt: skip

    made = variant(tokenizer, tmp_path / "made", frame)
    source = write_lines(tmp_path / "docs.jsonl")
    index = tokenize_text(options(made, source), tmp_path / "tokens", print).index
    text = TokenText(tmp_path / "tokens")
    seen = np.concatenate([text.read(start, stop) for start, stop in (*text.held_out_parts, *text.train_parts)])
    assert [int((seen == token).sum()) for token in (0, 1)] == [len(TEXTS), len(TEXTS)]
    assert index.end_token == 0


def test_a_tokenizer_that_leaves_characters_out_is_refused_by_name(tmp_path: Path, tokenizer: Path) -> None:
    def without_accents(document: dict[str, Any]) -> None:
        left = [token for token in document["model"]["vocab"] if "Ã" not in token]
        document["model"] |= {"vocab": {token: number for number, token in enumerate(left)}, "merges": []}

    made = variant(tokenizer, tmp_path / "made", without_accents)
    source = write_lines(tmp_path / "docs.jsonl")
    with pytest.raises(ConfigError, match=r"cannot encode \d of \d+ characters that were tried: é ß .*; take one with"):
        tokenize_text(options(made, source), tmp_path / "tokens", print)
    anyway = tokenize_text(options(made, source, skip_bad=True), tmp_path / "tokens", print)
    assert sum(anyway.skipped.values()) == 1, "the tokenizer, not a record"


def test_a_class_that_encodes_otherwise_than_its_tokenizer_json_is_named(tmp_path: Path, tokenizer: Path) -> None:
    """That of Qwen splits numbers into digits, whatever the file says. What it saves says the same as the class."""
    texts = [f"{number * 12345} is a number.\n" for number in range(400)]
    source, config = write_lines(tmp_path / "docs.jsonl", texts), {"eos_token": "<|endoftext|>"}
    made = variant(tokenizer, tmp_path / "made", lambda each: None)
    (made / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))
    needs("transformers").AutoTokenizer.from_pretrained(made).save_pretrained(tmp_path / "saved")
    for place, expected in ((tokenizer, 0), (made, 1), (tmp_path / "saved", 0)):
        printed: list[str] = []
        tokenize_text(options(place, source), tmp_path / f"tokens of {place.name}", printed.append)
        named = [line for line in printed if re.match(r"Qwen2Tokenizer .* encodes \"in 2024.* otherwise than", line)]
        assert len(named) == expected, place


def test_a_chat_template_that_asks_for_the_date_gives_the_same_tokens_every_day(
    tmp_path: Path, tokenizer: Path
) -> None:
    made = variant(tokenizer, tmp_path / "made", lambda each: None)
    template = "\nToday is {{ strftime_now('%d %b %Y') }}. {{ messages[0].content }}"
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "chats.jsonl").write_text('{"text": [{"role": "user", "content": "Hello"}]}\n' * 400)
    tokens = tokenize_text(options(made, tmp_path / "chats.jsonl"), tmp_path / "tokens", print)
    text = TokenText(tmp_path / "tokens")
    assert decoded(text, text.train_parts).startswith("\nToday is 26 Jul 2024. Hello\nToday is")
    assert tokens.skipped == {"today's date in a chat, which became 26 Jul 2024": 400}


def test_a_tokenizer_that_changes_texts_is_named(tmp_path: Path, tokenizer: Path) -> None:
    """As those of BERT do: line ends and capitals are gone for good."""
    source, printed = write_lines(tmp_path / "docs.jsonl"), list[str]()
    made = variant(tokenizer, tmp_path / "made", lambda each: each.update(normalizer={"type": "Lowercase"}))
    tokenize_text(options(tokenizer, source), tmp_path / "tokens", printed.append)
    assert printed == []
    tokenize_text(options(made, source), tmp_path / "more tokens", printed.append)
    assert printed == [
        "this tokenizer does not give every text back, so a model will not write it either: "
        r'"if One:\n\tTwo  three,\n\n4.\n" becomes "if one:\n\ttwo  three,\n\n4.\n"'
    ]


def test_a_tokenizer_that_fails_on_what_it_does_not_know_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -1.0]], "byte_fallback": False}
    made = variant(tokenizer, tmp_path / "made", lambda each: each.update(model=model, added_tokens=[]))
    with pytest.raises(ConfigError, match=r"cannot encode \d+ of \d+ characters .* \(.*unk_id.*\); take one with"):
        tokenize_text(options(made, write_lines(tmp_path / "docs.jsonl")), tmp_path / "tokens", print)


def test_weights_are_not_read_as_a_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    with (tmp_path / "model.gguf").open("wb") as file:
        file.truncate(1 << 29)
    with pytest.raises(
        ConfigError, match=r"cannot read the tokenizer .*model.gguf \(it is longer than 268.4 MB; expected"
    ):
        tokenize_text(options(tmp_path / "model.gguf", write_lines(tmp_path / "docs.jsonl")), tmp_path / "it", print)


def test_an_export_has_the_files_of_a_tokenizer_but_for_what_names_code_or_this_machine(
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
