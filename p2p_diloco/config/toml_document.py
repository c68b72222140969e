"""TOML documents with known keys: read, override, check, and describe errors in one sentence.

Manifest and settings share this module. An unknown key is an error that suggests the nearest known one: an ignored typo
could cost a night of training.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from p2p_diloco.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_DOCUMENT_BYTES = 256 * 1024

Document = dict[str, Any]
ModelT = TypeVar("ModelT", bound=BaseModel)


def read_toml(path: Path) -> Document:
    """Read the TOML file at `path`.

    Raises:
        ConfigError: it is missing, cannot be read, is too long, or is not TOML (with line and column).
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_DOCUMENT_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_DOCUMENT_BYTES} bytes; is it the right file?")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {str(error) or 'nested too deeply'}") from None


def parse_value(text: str) -> Any:
    """Parse a value from a command line: as TOML if valid (`4`, `0.5`, `true`, `["a"]`), otherwise as plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def with_value(document: Mapping[str, Any], key: str, value: Any) -> Document:
    """Return `document` with `value` at the dotted `key`; missing sections are created.

    Raises:
        ConfigError: a word of `key` before the last names a value, not a section.
    """
    head, dot, rest = key.partition(".")
    if not dot:
        return {**document, head: value}
    section = document.get(head, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"cannot set {key}: {head} is a value, not a section")
    return {**document, head: with_value(section, rest, value)}


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all values in `model`, in the order of their declaration."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def given_keys(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from given_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the known dotted key that was most likely meant by `key`."""
    names = list(known)
    last = key.rpartition(".")[2]
    # The same word in another section is more likely than a similar word in the same section.
    homes = [name for name in names if name.rpartition(".")[2] == last]
    close = homes or difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if not close:
        lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
        close = [lasts[near] for near in difflib.get_close_matches(last, lasts, n=1, cutoff=0.6)]
    return close[0] if close else None


def validated(model: type[ModelT], document: Mapping[str, Any], source: str) -> ModelT:
    """Validate `document`, which came from `source`, and return it as a `model`.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid; describes the first problem.
    """
    check_keys(model, document, source)
    try:
        # Via JSON: its strict mode accepts lists for tuples and integers for floats, and nothing else.
        return model.model_validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors(include_url=False)[0], source)) from None


def check_keys(model: type[BaseModel], document: Mapping[str, Any], source: str) -> None:
    """Refuse a key that `model` does not have, and suggest the nearest one.

    Raises:
        ConfigError: describes the first such key.
    """
    known = tuple(known_keys(model))
    sections = {key.rpartition(".")[0] for key in known}
    for key in given_keys(document):
        if key not in known and key not in sections:
            raise ConfigError(_unknown_key(key, known, source))


def _unknown_key(key: str, known: tuple[str, ...], source: str) -> str:
    near = nearest_key(key, known)
    section = key.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    shown = siblings if section and siblings else dict.fromkeys(name.partition(".")[0] for name in known)
    hint = f"did you mean {near}?" if near else f"known are: {', '.join(shown)}"
    return f"unknown key {key} in {source}; {hint}"


def _sentence(error: ErrorDetails, source: str) -> str:
    key = ".".join(str(part) for part in error["loc"] if not str(part).startswith("function-"))
    if error["type"] == "missing":
        return f"{key} is missing in {source}"
    if error["type"] == "model_type":
        return f"{key} in {source} is a value; expected a section, [{key}]"
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ").rstrip(".")
    if not key:
        return f"{source}: {reason}"
    value = cast(object, error["input"])
    if error["type"] == "value_error" or isinstance(value, Mapping):
        return f"{key} in {source}: {reason}"
    return f"{key} = {json.dumps(value, default=str, ensure_ascii=False)[:80]} in {source}: {reason}"
