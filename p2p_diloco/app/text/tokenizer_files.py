"""The files of a tokenizer as its publisher wrote them, in one file that a run can name by its digest.

A tokenizer is more than `tokenizer.json`: the chat template and the tokens that begin and end a text or a turn are in
files beside it. A folder of tokens holds them all as one bundle, a JSON object of texts by file name, so an export has
them whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_diloco.errors import ConfigError

NUM_BYTES = 256
TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
FILES_OF_TOKENIZER = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    GENERATION_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files that are kept, if they are there; of `generation_config.json`, only the tokens count."""
_OF_ONE_MACHINE = ("auto_map", "name_or_path", "tokenizer_file", "tokenizer_class", "processor_class", "padding_side")
"""Keys of `tokenizer_config.json` that are left out of an export: they name code or files, or a class that could build
other tokens from the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens with a meaning.

    Attributes:
        begin: precedes a text; None: nothing does.
        document_end: follows a document in the text; None: nothing does.
        ends: end what a model generates, such as a turn.
        pad: fills batches; None: none.
    """

    begin: int | None = None
    document_end: int | None = None
    ends: tuple[int, ...] = ()
    pad: int | None = None


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer, as texts by name; `tokenizer.json` is always among them."""

    texts: Mapping[str, str]

    def encode(self) -> bytes:
        """Return the bundle, canonical JSON."""
        return json.dumps(dict(self.texts), sort_keys=True, separators=(",", ":")).encode("ascii")

    def document(self, name: str) -> dict[str, Any]:
        """Return a file that holds a JSON object; an empty one if it is missing or is no object."""
        try:
            found = json.loads(self.texts.get(name, "{}"))
        except (ValueError, RecursionError):
            found = {}
        return found if isinstance(found, dict) else {}

    def ids(self) -> dict[str, int]:
        """Return the ids of all tokens, by their text."""
        whole = self.document(TOKENIZER)
        model = whole.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
            vocabulary = {each[0]: number for number, each in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in whole.get("added_tokens") or ()}
        return {**(vocabulary or {}), **added}

    @property
    def vocabulary(self) -> int:
        """The highest id + 1; ids may have holes."""
        return max(self.ids().values(), default=-1) + 1

    def special(self) -> SpecialTokens:
        """Return the tokens with a meaning, as the tokenizer's own files name them; none are guessed."""
        ids, config, generation = self.ids(), self.document(TOKENIZER_CONFIG), self.document(GENERATION_CONFIG)
        config = {**self.document("special_tokens_map.json"), **config}
        begin, end, pad = (_id_of(ids, config.get(f"{kind}_token")) for kind in ("bos", "eos", "pad"))
        ends = [end, *_listed(generation.get("eos_token_id"))]
        return SpecialTokens(
            begin=begin,
            document_end=end,
            ends=tuple(dict.fromkeys(token for token in ends if token is not None and token in ids.values())),
            pad=pad,
        )

    def with_end(self, token: str) -> TokenizerFiles:
        """Return the files with a token that ends documents, beside the tokenizer's own end if it has one.

        Raises:
            ConfigError: it is not a token.
        """
        number = self.ids().get(token)
        if number is None:
            raise ConfigError(f'--end-token "{token}" is not a token of the tokenizer')
        if self.special().document_end is None:
            changed = {TOKENIZER_CONFIG: _json({**self.document(TOKENIZER_CONFIG), "eos_token": token})}
        else:
            ends = [*self.special().ends, number]
            changed = {GENERATION_CONFIG: _json({**self.document(GENERATION_CONFIG), "eos_token_id": ends})}
        return TokenizerFiles({**self.texts, **changed})


def decode_tokenizer(encoded: bytes, place: str) -> TokenizerFiles:
    """Parse a bundle.

    Args:
        place: name of the file, for errors.
    Raises:
        ConfigError: it is none.
    """
    try:
        texts = json.loads(encoded)
        names = {str(name) for name, text in texts.items() if isinstance(text, str)}
        if len(names) < len(texts) or TOKENIZER not in names or names.difference(FILES_OF_TOKENIZER):
            raise ValueError("it holds other files")
        found = TokenizerFiles(texts)
        found.ids()
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ConfigError(
            f"{place} does not hold a tokenizer's files ({error}); make the tokens again with p2p-diloco tokenize"
        ) from None
    return found


def read_tokenizer_folder(folder: Path) -> TokenizerFiles:
    """Read the files of a tokenizer from a folder with `tokenizer.json`.

    Raises:
        ConfigError: a file cannot be read, or is not text.
    """
    texts = {}
    for name in FILES_OF_TOKENIZER:
        try:
            texts[name] = (folder / name).read_text(encoding="utf-8")
            if name.endswith(".json") and not isinstance(json.loads(texts[name]), dict):
                raise ValueError("it is no JSON object")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {folder / name} of the tokenizer ({error})") from None
    return TokenizerFiles(texts)


def exported_files(tokenizer: TokenizerFiles | None, positions: int | None) -> dict[str, bytes]:
    """Return the files of a tokenizer that `AutoTokenizer` loads, by name.

    Args:
        tokenizer: its files; None: each byte of UTF-8 is a token.
        positions: longest text that the model takes in tokens; None: as the tokenizer's own files say.
    """
    tokenizer = tokenizer or TokenizerFiles({TOKENIZER: _json(byte_tokenizer())})
    config = {key: value for key, value in tokenizer.document(TOKENIZER_CONFIG).items() if key not in _OF_ONE_MACHINE}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.setdefault("clean_up_tokenization_spaces", False)
    if positions is not None:
        config["model_max_length"] = positions
    texts = {name: text for name, text in tokenizer.texts.items() if name != GENERATION_CONFIG}
    return {name: text.encode() for name, text in {**texts, TOKENIZER_CONFIG: _json(config)}.items()}


def token_ids(tokenizer: TokenizerFiles | None, vocabulary: int) -> dict[str, Any]:
    """Return the values of `config.json` that name the begin, end and padding tokens of a run's tokenizer.

    A configuration comes with the ids of another tokenizer, or with its architecture's defaults, so all three are
    always set: None where the tokenizer names no such token.

    Args:
        tokenizer: the files of the run's tokenizer; None: each byte is a token, and none has a meaning.
        vocabulary: number of tokens of the model; ids beyond them are left out.
    """
    if tokenizer is None:
        return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    special = tokenizer.special()
    begin, pad = (one if one is not None and one < vocabulary else None for one in (special.begin, special.pad))
    ends = [one for one in special.ends if one < vocabulary]
    return {
        "bos_token_id": begin,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": pad,
    }


def _id_of(ids: Mapping[str, int], token: Any) -> int | None:
    """Return the id of a token that a configuration names, as text or as an object with its text."""
    content = token.get("content") if isinstance(token, dict) else token
    return ids.get(content) if isinstance(content, str) else None


def _listed(value: Any) -> list[int]:
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


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


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"
