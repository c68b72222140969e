"""`run.toml`: a manifest as an editable file, with a comment for every value.

The comments are the field descriptions of the manifest. Names from other projects are accepted where they mean the
same, and explained where they do not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from p2p_diloco.config.decoder import MODEL_SIZES
from p2p_diloco.config.key_file import create_key_file, is_key_file, read_key_file
from p2p_diloco.config.manifest import MANIFEST_FORMAT, STANDARD_LIBRARY, SUITED_RATES, RunManifest, format_sentence
from p2p_diloco.config.new_file import write_new_file
from p2p_diloco.config.toml_document import Document, check_keys, given_keys, read_toml, validated, with_value
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId, format_peer_id
from p2p_diloco.signing import SigningKey

KEY_FILE = "organiser.key"
"""File name of the key that signs a run, in the same folder by default."""
TEXT_LEFT_OUT = "(left out of the export)"
"""Replaces the path of a text in the run file of an export, because the path is private to the organiser."""

# Names that torchft, OpenDiLoCo and similar projects use for the same thing.
ALIASES: Mapping[str, str] = {
    "outer_lr": "outer.learning_rate",
    "outer_momentum": "outer.momentum",
    "fragment_update_alpha": "outer.fragment_update_alpha",
    "inner_lr": "inner.learning_rate",
    "num_fragments": "rounds.fragments",
    "model": "model.source",
    "vocab_size": "model.vocabulary",
}
_COUNTS_STEPS = (
    "counts inner steps, but here the length of a cycle is a time, so that no peer waits: rounds.round_seconds x "
    "rounds.fragments seconds; set rounds.round_seconds"
)
_COUNTS_WINDOWS = (
    "counts windows, but here a step is counted in predicted tokens; set inner.step_tokens to windows x model.context, "
    "such as 256 for 4 windows of 64 tokens"
)
# Their names for things that do not exist here, with what to do instead.
EXPLAINED: Mapping[str, str] = {
    "lr": "names two rates here; set inner.learning_rate or outer.learning_rate",
    "sync_every": _COUNTS_STEPS,
    "inner_steps": _COUNTS_STEPS,
    "local_steps": _COUNTS_STEPS,
    "batch": _COUNTS_WINDOWS,
    "batch_size": _COUNTS_WINDOWS,
    "fragment_sync_delay": "counts inner steps, but here an exchange ends by the clock; set rounds.round_seconds",
}

_OF_ONE_RUN = frozenset({"format", "organiser", "founder", "created", "rounds.clock_start", "model.start"})
"""Keys that a run does not take over from the one that it continues."""
CHOSEN_ROUNDS = frozenset(
    f"rounds.{key}" for key in ("round_seconds", "fragments", "spans_per_fragment", "planned_steps", "retained_cycles")
)
CHOSEN_END = frozenset({"rounds.planned_cycles", "inner.schedule", "outer.final_share"})
"""Keys that the planned length of a run sets; those above follow from its islands, uplink and step."""
_SUITED_WINDOWS = 4
"""Windows of an inner step of a new run."""
_UNKNOWN_ORGANISER = SigningKey(bytes(32)).peer
_COMMENT_COLUMN = 44
_HEADER = """\
# Everything that the peers of this run must agree on. Edit it before the first peer joins: the run id is the digest of
# these values, so every change makes a different run. Comments and order do not matter.
"""


def draft_manifest(
    *,
    organiser: PeerId = _UNKNOWN_ORGANISER,
    now_seconds: float,
    name: str = "run",
    values: Mapping[str, Any] | None = None,
) -> RunManifest:
    """Make the manifest of a run that begins now.

    Without an inner rate or tokens of a step in `values`, it has those that suit the model. Islands of listed peers
    count by their tokens unless `values` says otherwise.

    Args:
        organiser: the signer; omitted in a draft that only checks values before a key exists.
        now_seconds: Unix time; start of round 0 unless `values` sets it.
        values: values that differ from the defaults; nested as in `run.toml`, or with dotted keys.
    Raises:
        ConfigError: a key is unknown or a value invalid.
    """
    document: Document = {
        "name": name,
        "organiser": format_peer_id(organiser),
        "created": int(now_seconds),
        "rounds": {"clock_start": float(int(now_seconds))},
    }
    manifest = manifest_of(_overridden(document, values or {}), "the new run")
    suited = {key: value for key, value in suited_inner(manifest).items() if key not in manifest.inner.model_fields_set}
    updated: dict[str, Any] = {"inner": manifest.inner.model_copy(update=suited)}
    if manifest.trust.mode == "listed" and "weights" not in manifest.trust.model_fields_set:
        updated["trust"] = manifest.trust.model_copy(update={"weights": "tokens"})
    return manifest.model_copy(update=updated)


def suited_inner(manifest: RunManifest) -> Document:
    """Return values of the inner rule that suit the model of a new run.

    A step has four windows. Rates of built-in models were tuned. Others get the rate of the built-in size that is
    nearest in parameters, and loaded weights the usual rates for training on.
    """
    window_tokens = manifest.model.window_tokens
    steps = {} if window_tokens is None else {"step_tokens": _SUITED_WINDOWS * window_tokens}
    return steps | _suited_optimizer(manifest)


def _suited_optimizer(manifest: RunManifest) -> Document:
    model, optimizer = manifest.model, manifest.inner.optimizer
    if model.weights == "loaded":
        return {"optimizer": "adamw", "embedding_rate": 1.0, "learning_rate": 2e-4 if model.lora_rank else 5e-5}
    if model.kind == "built-in":
        return {"learning_rate": SUITED_RATES[optimizer][model.size]}
    num_parameters = sum(math.prod(shape) for _, shape, _ in model.tensors)
    sizes = {size: abs(math.log(max(num_parameters, 1) / MODEL_SIZES[size].num_parameters)) for size in MODEL_SIZES}
    return {"embedding_rate": 1.0, "learning_rate": SUITED_RATES[optimizer][min(sizes, key=sizes.__getitem__)]}


def manifest_of(document: Mapping[str, Any], source: str) -> RunManifest:
    """Make a manifest from a nested document; `source` names its origin in errors.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid.
    """
    _check_format(document, source)
    return validated(RunManifest, _with_canonical_names(document, source), source)


def read_run_toml(path: Path, overrides: Mapping[str, Any] | None = None) -> RunManifest:
    """Read the manifest at `path` and apply `overrides` by dotted key.

    Raises:
        ConfigError: the file, a key or a value is invalid.
    """
    if is_key_file(path):
        raise ConfigError(f"{path} is a key; name the run that it signs, such as {path.with_name('run.toml')}")
    document = _with_canonical_names(read_toml(path), str(path))
    return manifest_of(_overridden(document, values_by_key(overrides or {}, "the command line")), str(path))


def _check_format(document: Mapping[str, Any], source: str) -> None:
    """Refuse a file of another format, before its keys would be reported as unknown."""
    found = document.get("format")
    if type(found) is int and found != MANIFEST_FORMAT:
        raise ConfigError(f"{source} is of {format_sentence(found)}")


def values_by_key(document: Mapping[str, Any], source: str) -> Document:
    """Return the values of a nested document by dotted key, so that layers can be merged.

    Raises:
        ConfigError: the document is of another format, or a key is unknown, means something else here, or is given
            together with its alias.
    """
    canonical = _with_canonical_names(document, source)
    _check_format(canonical, source)
    check_keys(RunManifest, canonical, source)
    return dict(_leaves(canonical))


def canonical_key(key: str, source: str) -> str:
    """Return this project's name for the dotted `key`; `outer.lr` counts as other projects' `outer_lr`.

    Raises:
        ConfigError: it is another project's name for something that does not exist here.
    """
    section, _, last = key.rpartition(".")
    if last in EXPLAINED and key.replace(".", "_") not in ALIASES:
        raise ConfigError(f"{key} in {source} {EXPLAINED[last]}")
    target = ALIASES.get(last) or ALIASES.get(key.replace(".", "_"), key)
    return target if section in ("", target.partition(".")[0]) else key


def changed_keys(old: RunManifest, new: RunManifest) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each key in which two runs differ, by dotted key."""
    before, after = (dict(_leaves(manifest.model_dump(mode="json"))) for manifest in (old, new))
    return {key: (value, after[key]) for key, value in before.items() if value != after[key]}


def continued_values(old: RunManifest, given: Mapping[str, Any], chosen_anew: Collection[str] = ()) -> Document:
    """Return the values of a run that continues `old`, by dotted key: `given`, and the old ones where none are given.

    Args:
        chosen_anew: keys that are chosen to suit the new run, unless they are given.
    Raises:
        ConfigError: `given` changes the model, or the text is not known.
    """
    without = {*_OF_ONE_RUN, *chosen_anew}
    if "data.path" in given:
        without |= {"data.fingerprint", "data.tokenizer"}
    if given.keys() & {"data.path", "data.share"}:
        without.add("data.files")
    if given.keys() & {"trust.mode", "trust.peers"}:
        without.add("trust.weights")
    taken = {key: value for key, value in _leaves(old.model_dump(mode="json")) if value is not None}
    for key, value in given.items():
        if key.startswith("model.") and key not in _OF_ONE_RUN and value != taken.get(key):
            raise ConfigError(f"a run that continues another keeps its model; leave {key} out, or do not continue it")
    if taken["data.path"] == TEXT_LEFT_OUT and "data.path" not in given and not old.model.is_own_loop:
        raise ConfigError("an export does not name the text of its run; name your copy with --data.path PATH")
    return {key: value for key, value in taken.items() if key not in without} | dict(given)


def start_file(path: Path) -> Path:
    """Return the file beside the run file `path` that holds the initial values of a run that continues another."""
    return path.with_name(f"{path.stem}.start.safetensors")


def exported_run(manifest: RunManifest) -> bytes:
    """Return the run file of an export, which a new run can continue: without the path of the text."""
    if manifest.data.path != STANDARD_LIBRARY:
        manifest = manifest.model_copy(update={"data": manifest.data.model_copy(update={"path": TEXT_LEFT_OUT})})
    return format_run_toml(manifest).encode()


def check_new_run(path: Path, key_path: Path) -> None:
    """Check up front that `write_new_run` can write, before its values are computed.

    Raises:
        ConfigError: `path` exists, a folder is missing, or the existing key is invalid.
    """
    for file in (path, start_file(path)):
        if file.exists():
            raise ConfigError(f"{file} already exists and is never overwritten; move it away, or name another file")
    for file in (path, key_path):
        if not file.parent.is_dir():
            raise ConfigError(f"there is no folder {file.parent} for {file.name}; create it, or name another place")
    if key_path.exists():
        read_key_file(key_path)


def write_new_run(
    path: Path, key_path: Path, *, now_seconds: float, values: Mapping[str, Any], start: bytes | None = None
) -> RunManifest:
    """Write the run of `values` to a new file; create the key that signs it, unless it exists from an earlier run.

    Args:
        path: path of the run file; its stem is the name of the run, unless `values` has one.
        now_seconds, values: as for `draft_manifest`.
        start: content of the file of initial values, whose digest is in `values`; None: the run needs none.
    Raises:
        ConfigError: as `check_new_run`, or a value is invalid.
        StateError: a file cannot be written.
    """
    if start is not None:
        write_new_file(start_file(path), start, mode=0o644)
    try:
        key = read_key_file(key_path) if key_path.exists() else create_key_file(key_path)
        manifest = draft_manifest(organiser=key.peer, now_seconds=now_seconds, name=path.stem, values=values)
        write_run_toml(path, manifest)
    except BaseException:
        if start is not None:
            start_file(path).unlink(missing_ok=True)
        raise
    return manifest


def write_run_toml(path: Path, manifest: RunManifest) -> None:
    """Write `manifest` with comments to a new file at `path`.

    Raises:
        ConfigError: the file already exists; it is not changed.
        StateError: the file cannot be written.
    """
    write_new_file(path, format_run_toml(manifest).encode("utf-8"), mode=0o644)


def format_run_toml(manifest: RunManifest) -> str:
    """Return the text of `run.toml`; parsing it gives `manifest`."""
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
        # Rows of a table, such as tensors, get one line each.
        is_table = any(isinstance(row, tuple) for row in value) and not isinstance(value[0], str)
        parts = [_toml_value(row) for row in value]
        return "[\n  {}\n]".format(",\n  ".join(parts)) if is_table else f"[{', '.join(parts)}]"
    if isinstance(value, str) and '"' in value and "'" not in value and value.isprintable():
        return f"'{value}'"  # literal, without backslashes
    # JSON strings, numbers and booleans are valid TOML.
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
    """Rename keys to this project's names; a name together with its alias is an error."""
    result: Document = {}
    present = set(given_keys(document))
    for key, value in _leaves(document):
        target = canonical_key(key, source)
        if target != key and target in present:
            raise ConfigError(f"{target} and its other name {key} are both in {source}; use only one of them")
        result = with_value(result, target, value)
    return result
