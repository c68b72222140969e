"""The tokenizer of an exported model, as files that `AutoTokenizer` loads."""

from __future__ import annotations

import json
from typing import Any

NUM_BYTES = 256
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Usual names of the token that ends a document."""


def tokenizer_files(tokenizer: bytes | None, context: int) -> dict[str, bytes]:
    """Return the files of a tokenizer, by name.

    Args:
        tokenizer: content of `tokenizer.json`; None: each byte of UTF-8 is a token.
        context: maximum length of a text in tokens.
    """
    raw = tokenizer if tokenizer is not None else _json(byte_tokenizer())
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer is not None and (end := _end_token(tokenizer)) is not None:
        config["eos_token"] = end
    return {"tokenizer.json": raw, "tokenizer_config.json": _json(config)}


def _end_token(tokenizer: bytes) -> str | None:
    added = {token.get("content") for token in json.loads(tokenizer).get("added_tokens") or ()}
    return next((name for name in END_TOKENS if name in added), None)


def byte_tokenizer() -> dict[str, Any]:
    """Return `tokenizer.json`: each byte of UTF-8 is a token, whose id is the byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """Return the ByteLevel character of each byte: itself if printable in Latin-1, otherwise one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(others)) for byte in range(NUM_BYTES)]


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
