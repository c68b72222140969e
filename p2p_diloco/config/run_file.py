"""`run.toml`: a manifest that people write, with a comment beside every value.

The file is made from the manifest's own descriptions, so it cannot fall behind them. Names that this community knows
from other projects are understood where they mean the same, and explained where they do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from p2p_diloco.config.key_file import create_key_file, is_key_file, read_key_file
from p2p_diloco.config.manifest import MANIFEST_FORMAT, SUITED_RATES, RunManifest, format_sentence
from p2p_diloco.config.new_file import write_new_file
from p2p_diloco.config.toml_document import Document, check_keys, given_keys, read_toml, validated, with_value
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId, format_peer_id
from p2p_diloco.signing import SigningKey
from p2p_diloco.training.shape import MODEL_SIZES

KEY_FILE = "organiser.key"
"""The key that signs a run, beside its file unless another is named."""

# What torchft, OpenDiLoCo and their kin call the same thing.
ALIASES: Mapping[str, str] = {
    "outer_lr": "outer.learning_rate",
    "outer_momentum": "outer.momentum",
    "fragment_update_alpha": "outer.fragment_update_alpha",
    "inner_lr": "inner.learning_rate",
    "num_fragments": "rounds.fragments",
}
_COUNTS_STEPS = (
    "counts inner steps, and here a cycle is set by time so that nobody waits: it lasts rounds.round_seconds x "
    "rounds.fragments seconds; set rounds.round_seconds"
)
# What they call something that does not exist here, with what to do instead.
EXPLAINED: Mapping[str, str] = {
    "sync_every": _COUNTS_STEPS,
    "inner_steps": _COUNTS_STEPS,
    "local_steps": _COUNTS_STEPS,
    "fragment_sync_delay": "counts inner steps, and here an exchange ends by the clock; set rounds.round_seconds",
    "model": f"cannot be set: `new` makes runs of the built-in decoder; set model.size, one of "
    f"{', '.join(MODEL_SIZES)}, or call p2p_diloco.new_run for a model of your own",
    "vocabulary": "cannot be set: the built-in model reads bytes, so it has 256 tokens; leave it out",
    "vocab_size": "cannot be set: the built-in model reads bytes, so it has 256 tokens; leave it out",
}

_UNKNOWN_ORGANISER = SigningKey(bytes(32)).peer
_COMMENT_COLUMN = 44
_HEADER = """\
# All that the peers of this run must agree on. Edit it before the first peer joins: the run id is the digest of these
# values, so every change makes another run. Comments and order do not matter.
"""


def draft_manifest(
    *,
    organiser: PeerId = _UNKNOWN_ORGANISER,
    now_seconds: float,
    name: str = "run",
    values: Mapping[str, Any] | None = None,
) -> RunManifest:
    """Make the manifest of a new run that begins now. Where `values` has no inner rate, it is one that suits the model.

    Args:
        organiser: whoever will sign it; not named in a draft that only checks values, before a key is made.
        now_seconds: Unix time; round 0 begins then unless `values` says otherwise.
        name: for people.
        values: what differs from the defaults; nested as in `run.toml`, or with dotted keys.
    Raises:
        ConfigError: an unknown key or a value that does not fit.
    """
    document: Document = {
        "name": name,
        "organiser": format_peer_id(organiser),
        "created": int(now_seconds),
        "rounds": {"clock_start": float(int(now_seconds))},
    }
    manifest = manifest_of(_overridden(document, values or {}), "the new run")
    if "learning_rate" in manifest.inner.model_fields_set:
        return manifest
    rate = SUITED_RATES[manifest.inner.optimizer][manifest.model.size]
    return manifest.model_copy(update={"inner": manifest.inner.model_copy(update={"learning_rate": rate})})


def manifest_of(document: Mapping[str, Any], source: str) -> RunManifest:
    """Make a manifest of a nested document that came from `source`.

    Raises:
        ConfigError: an unknown key, a missing one, or a value that does not fit.
    """
    _check_format(document, source)
    return validated(RunManifest, _with_canonical_names(document, source), source)


def read_run_toml(path: Path, overrides: Mapping[str, Any] | None = None) -> RunManifest:
    """Read the manifest at `path`, with `overrides` by dotted key on top.

    Raises:
        ConfigError: the file or a key or a value is wrong.
    """
    if is_key_file(path):
        raise ConfigError(f"{path} is a key; name the run that it signs, such as {path.with_name('run.toml')}")
    document = _with_canonical_names(read_toml(path), str(path))
    return manifest_of(_overridden(document, values_by_key(overrides or {}, "the command line")), str(path))


def _check_format(document: Mapping[str, Any], source: str) -> None:
    """Say that a file is an older or newer one before its keys are called unknown."""
    found = document.get("format")
    if type(found) is int and found != MANIFEST_FORMAT:
        raise ConfigError(f"{source} is of {format_sentence(found)}")


def values_by_key(document: Mapping[str, Any], source: str) -> Document:
    """Return the values of a nested document by dotted key, so that layers of them can be put together key by key.

    Raises:
        ConfigError: an unknown key, one that means something else here, or a name and its alias.
    """
    canonical = _with_canonical_names(document, source)
    check_keys(RunManifest, canonical, source)
    return dict(_leaves(canonical))


def canonical_key(key: str, source: str) -> str:
    """Return the name that this project has for the dotted `key`; `outer.lr` is `outer_lr`, for which others write it.

    Raises:
        ConfigError: other projects' name of something that does not exist here.
    """
    section, _, word = key.rpartition(".")
    if word in EXPLAINED:
        raise ConfigError(f"{key} in {source} {EXPLAINED[word]}")
    target = ALIASES.get(word) or ALIASES.get(key.replace(".", "_"), key)
    return target if section in ("", target.partition(".")[0]) else key


def check_new_run(path: Path, key_path: Path) -> None:
    """Refuse what `write_new_run` could not write, before anybody waits for its values.

    Raises:
        ConfigError: there is a file at `path` or no folder for one of the two, or the key that is there cannot sign.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already and is never overwritten; move it away, or name another file")
    for file in (path, key_path):
        if not file.parent.is_dir():
            raise ConfigError(f"there is no folder {file.parent} for {file.name}; make it first, or name another place")
    if key_path.exists():
        read_key_file(key_path)


def write_new_run(path: Path, key_path: Path, *, now_seconds: float, values: Mapping[str, Any]) -> RunManifest:
    """Write the run of `values` to a new file; make the key that signs it, unless it is there from an earlier run.

    Args:
        path: of the run; the file's name is the run's, unless `values` has one.
        key_path: of its organiser.
        now_seconds, values: as for `draft_manifest`.
    Raises:
        ConfigError: as `check_new_run`, or a value does not fit.
        StateError: a file cannot be written.
    """
    key = read_key_file(key_path) if key_path.exists() else create_key_file(key_path)
    manifest = draft_manifest(organiser=key.peer, now_seconds=now_seconds, name=path.stem, values=values)
    write_run_toml(path, manifest)
    return manifest


def write_run_toml(path: Path, manifest: RunManifest) -> None:
    """Write `manifest` with comments to a new file at `path`.

    Raises:
        ConfigError: there is a file already; it is left as it was.
        StateError: the file cannot be written.
    """
    write_new_file(path, format_run_toml(manifest).encode("utf-8"), mode=0o644)


def format_run_toml(manifest: RunManifest) -> str:
    """Return the text of `run.toml`; reading it gives `manifest` again."""
    lines = [_HEADER]
    sections: list[tuple[str, BaseModel]] = []
    for name, field in type(manifest).model_fields.items():
        value = getattr(manifest, name)
        if isinstance(value, BaseModel):
            sections.append((name, value))
        else:
            lines.append(_line(name, value, field))
    for name, section in sections:
        purpose = (type(section).__doc__ or "").partition("\n")[0]
        lines += ["", f"# {purpose}", f"[{name}]"]
        lines += [_line(key, getattr(section, key), field) for key, field in type(section).model_fields.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, value: object, field: FieldInfo) -> str:
    setting = f"# {key} =" if value is None else f"{key} = {_toml_value(value)}"
    return f"{setting.ljust(_COMMENT_COLUMN)}  # {field.description}" if field.description else setting


def _toml_value(value: object) -> str:
    if isinstance(value, tuple):
        # Rows, such as those of a table of tensors, stand in lines of their own.
        is_table = any(isinstance(row, tuple) for row in value) and not isinstance(value[0], str)
        parts = [_toml_value(row) for row in value]
        return "[\n  {}\n]".format(",\n  ".join(parts)) if is_table else f"[{', '.join(parts)}]"
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, ensure_ascii=False)


def _overridden(document: Mapping[str, Any], values: Mapping[str, Any]) -> Document:
    result = dict(document)
    for key, value in _leaves(_with_canonical_names(values, "the overrides")):
        result = with_value(result, key, value)
    return result


def _leaves(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _with_canonical_names(document: Mapping[str, Any], source: str) -> Document:
    """Put values under the names of this project; a name and its alias together are an error."""
    result: Document = {}
    present = set(given_keys(document))
    for key, value in _leaves(document):
        target = canonical_key(key, source)
        if target != key and target in present:
            raise ConfigError(f"{target} and its other name {key} are both in {source}; keep one of them")
        result = with_value(result, target, value)
    return result
