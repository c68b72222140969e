"""The tokenizer that makes a text's tokens: the one that an export will load, without truncation and padding."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from p2p_diloco.app.extra import import_extra
from p2p_diloco.app.text.hub import HUB, fetch_tokenizer
from p2p_diloco.app.text.tokenizer_files import (
    FILES_OF_TOKENIZER,
    TOKENIZER,
    TokenizerFiles,
    exported_files,
    read_tokenizer_folder,
)
from p2p_diloco.errors import ConfigError
from p2p_diloco.wording import first_line, format_bytes

_OLDER_FILES = ("vocab.json", "vocab.txt", "merges.txt", "*.model", "config.json")
"""Files that a `tokenizer.json` can be made from."""
PROBE = "".join(map(chr, range(0x21, 0x7F))) + "éßñøŁЖяλאبहकไทქ漢字한。€∑→—“😀"
"""Characters of many scripts, of which each must leave a token."""
_SPACED = "if One:\n\tTwo  three,\n\n4.\n"
CHAT_DATE = datetime(2024, 7, 26, tzinfo=UTC)
"""The date that templates get instead of today's, because the same chats must always give the same tokens. Llama's name
it themselves where they cannot ask."""
_REPLACED = "".join(f"|replace('%{code}','{CHAT_DATE.strftime('%' + code)}')" for code in "aAbBdFHIjmMpSTyY")
_FIXED_DATE = f"{{% macro strftime_now(form) %}}{{{{ form{_REPLACED} }}}}{{% endmacro %}}\n"
"""Goes before a template: transformers takes no function for it."""
_TEXTS = ("Hello world", "  two  spaces", " a", "in 2024, 12345", "a\n\n  b\n", "\tif x:\r\n", "I'M, can't", PROBE, "")
"""Texts on which rules of tokenizers differ."""
_NOTHING = "\U0010fffd"
"""A character that no vocabulary has, nor bytes that mean anything."""
_MOST_BYTES = 1 << 28
"""Length of a lone file that can be a tokenizer; one of a model's weights is longer."""


class TextTokenizer:
    """Encodes documents as `AutoTokenizer` encodes them with the files of an export.

    Attributes:
        files: its files, with the ids that are used.
        first, last: ids that it adds before and after a text.
        unknown: id of what it cannot express; None: none.
        dates: number of chats whose template asks for today's date, and got `CHAT_DATE`.
    Raises:
        ConfigError: the files are no tokenizer.
    """

    def __init__(self, files: TokenizerFiles, place: str) -> None:
        transformers = import_extra("transformers", "tokenising")
        self.files = files
        self.dates = 0
        try:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in exported_files(files, None).items():
                    Path(folder, name).write_bytes(content)
                self._auto = transformers.AutoTokenizer.from_pretrained(folder)
            self._fast = self._auto.backend_tokenizer
            self._fast.no_truncation()
            self._fast.no_padding()
            self.first, self.last = self._added()
            if self._auto.get_vocab() != files.ids():  # the library numbers an added token anew if ids have a hole
                self.files = TokenizerFiles({**files.texts, TOKENIZER: self._fast.to_str()})
        except Exception as error:  # the library raises any
            raise ConfigError(f"{place} is not a tokenizer that this version reads ({first_line(error)})") from None
        model = self.files.document(TOKENIZER).get("model") or {}
        unknown = self._auto.unk_token_id
        named = model.get("unk_id") if unknown is None else unknown
        self.unknown = self._fast.token_to_id(model["unk_token"]) if named is None and model.get("unk_token") else named

    def encode(self, pieces: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Return the ids of pieces of text, each with the text before it, as they are in the whole.

        They are without those that it adds before and after a text.

        Raises:
            ValueError: it cannot encode one of them.
        """
        try:
            texts = [context + text for context, text in pieces]
            found = self._fast.encode_batch(texts, add_special_tokens=False)
            return [
                self._behind(each, context, text) if context else each.ids
                for (context, text), each in zip(pieces, found, strict=True)
            ]
        except Exception as error:  # the library raises any
            raise ValueError(first_line(error)) from None

    def _behind(self, encoded: Any, context: str, text: str) -> list[int]:
        """Return the ids of a text behind those of its context; alone, if a token has characters of both."""
        first = next((at for at, (_, stop) in enumerate(encoded.offsets) if stop > len(context)), len(encoded.ids))
        is_apart = first == len(encoded.ids) or encoded.offsets[first][0] >= len(context)
        ids: list[int] = encoded.ids[first:] if is_apart else self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=False))

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Return chat messages as a text, by its template.

        Raises:
            ValueError: it has no template, or the template refuses them.
        """
        if not self._auto.chat_template:
            raise ValueError("this tokenizer has none; take a tokenizer of a chat model")
        try:
            template = self._auto.get_chat_template()
            if "strftime_now" in template:
                template, self.dates = _FIXED_DATE + template, self.dates + 1
            return str(self._auto.apply_chat_template(messages, chat_template=template, tokenize=False))
        except Exception as error:  # a template raises any
            raise ValueError(first_line(error)) from None

    def lost(self) -> tuple[str, str]:
        """Return characters that it cannot encode or leaves out, of many scripts, and why; empty if there are none."""
        nothing: list[int] = []
        with suppress(ValueError):
            (nothing,) = self.encode([("", _NOTHING)])
        lost, why = "", ""
        for character in PROBE:
            try:
                (ids,) = self.encode([("", character)])
            except ValueError as error:
                lost, why = lost + character, str(error)
                continue
            is_broken = "\N{REPLACEMENT CHARACTER}" in self._fast.decode(ids)
            if not ids or (self.unknown not in ids and (is_broken or ids == nothing)):
                lost, why = lost + character, why or "they leave no tokens"
        return lost, why

    def changed(self) -> str:
        """Return what becomes of `_SPACED` if it is another text; empty if it stays, but for a space before it."""
        try:
            text = self.decode(self.encode([("", _SPACED)])[0])
        except ValueError:
            return ""
        return "" if text.removeprefix(" ") == _SPACED else f"{json.dumps(_SPACED)} becomes {json.dumps(text)}"

    def difference(self, path: Path) -> str:
        """Return how the class of transformers that its folder names encodes otherwise; empty if it does not.

        Such a class may build a tokenizer of its own from the vocabulary, with other rules than `tokenizer.json`.
        """
        import transformers

        special = [f"a {token}b" for token in self._auto.all_special_tokens]
        try:
            own = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            text = next(text for text in (*_TEXTS, *special) if own(text).input_ids != self._auto(text).input_ids)
        except (
            Exception
        ):  # they are the same, or the library cannot load the class and so nobody uses it: it raises any
            return ""
        return f"{type(own).__name__} of transformers encodes {json.dumps(text)} otherwise than {TOKENIZER}"

    def _added(self) -> tuple[list[int], list[int]]:
        """Return what it adds before and after a text."""
        whole, bare = (self._fast.encode("a", add_special_tokens=added).ids for added in (True, False))
        start = next(i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]


def find_tokenizer(place: str) -> Path:
    """Return the place of a tokenizer on this machine: a folder, or a lone file; a model's on the hub is fetched.

    Raises:
        ConfigError: it cannot be fetched.
    """
    path = Path(os.path.expanduser(place.removeprefix(HUB)))
    if place.startswith(HUB) and not path.exists():
        return fetch_tokenizer(place.removeprefix(HUB), (*FILES_OF_TOKENIZER, *_OLDER_FILES))
    return path.parent if path.is_file() and path.name == TOKENIZER else path


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Return the files of a tokenizer in a folder, or a `tokenizer.json` of another name.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if path.is_file():
        return _cleaned(TokenizerFiles({TOKENIZER: _text_of(path)}), path)
    if not path.is_dir():
        raise ConfigError(
            f"there is no tokenizer at {path}; expected tokenizer.json, a folder with it, or hf: and the id of a model"
        )
    if not (path / TOKENIZER).is_file():
        return _converted(path)
    return _cleaned(read_tokenizer_folder(path), path / TOKENIZER)


def _cleaned(files: TokenizerFiles, path: Path) -> TokenizerFiles:
    """Return the files without what cuts, fills and splits texts at random: truncation, padding and dropout."""
    document = files.document(TOKENIZER)
    try:
        if not isinstance(document["model"], dict) or files.vocabulary < 2:
            raise ValueError("it has no vocabulary")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a tokenizer ({error})") from None
    unwanted = [document.get("truncation"), document.get("padding"), document["model"].get("dropout")]
    if unwanted == [None, None, None]:
        return files
    document |= {"truncation": None, "padding": None}
    document["model"] |= {"dropout": None} if unwanted[2] is not None else {}
    return TokenizerFiles({**files.texts, TOKENIZER: json.dumps(document)})


def _converted(folder: Path) -> TokenizerFiles:
    """Return a tokenizer of older files, such as `vocab.json` or `tokenizer.model`, as transformers converts it."""
    transformers = import_extra("transformers", f"{folder} has no {TOKENIZER}; making it")
    try:
        with tempfile.TemporaryDirectory() as made:
            transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(made)
            return _cleaned(read_tokenizer_folder(Path(made)), folder)
    except Exception as error:  # the library raises any
        raise ConfigError(f"{folder} has no {TOKENIZER}, nor files to make it of ({first_line(error)})") from None


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it is longer than {format_bytes(_MOST_BYTES)}; expected {TOKENIZER}")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the tokenizer {path} ({first_line(error)})") from None
