"""Datasets and tokenizers of the Hugging Face hub, or folders laid out as there.

`hf:PLACE:CONFIG[SPLIT]`: place is a folder or an id, with `@` and a revision if wanted. What was read is named by its
commit, because a branch moves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from p2p_diloco.app.extra import import_extra
from p2p_diloco.app.text.documents import shown
from p2p_diloco.errors import ConfigError
from p2p_diloco.wording import first_line

HUB = "hf:"
_NAME = re.compile(
    r"(?P<place>[^:@\[\]]+)(@(?P<revision>[^:\[\]]+))?(:(?P<config>[^\[\]]+))?(\[(?P<split>[^\[\]]+)\])?"
)
_COMMIT = re.compile(r"@([0-9a-f]{40})\b")


class Rows(NamedTuple):
    """The records of a dataset, and a name that fixes what they are."""

    name: str
    records: Iterable[Any]


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of datasets."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def open_dataset(name: str, column: str) -> Rows:
    """Open a dataset; of the hub, its records are streamed.

    Args:
        name: `PLACE:CONFIG[SPLIT]`.
        column: the column to read; dots lead into nested columns.
    Raises:
        ConfigError: there is no such dataset, configuration or split.
    """
    datasets = import_extra("datasets", f"reading {HUB}{name}")
    place, revision, config, split = _parts_of(name)
    datasets.disable_progress_bars()
    try:
        if is_saved_dataset(Path(place)):
            found = datasets.load_from_disk(place)
            if config is not None or (split is not None and not isinstance(found, datasets.DatasetDict)):
                raise ConfigError(f"{HUB}{place} has no such parts; name it without configuration and split")
            if isinstance(found, datasets.DatasetDict):
                found = found[_chosen(split, list(found), f"{HUB}{place}[%s]", "split", "train")]
            return Rows(name, _with_column(found, column))
        configs = datasets.get_dataset_config_names(place, revision=revision)
        default = datasets.get_dataset_default_config_name(place, revision=revision)
        config = _chosen(config, configs, f"{HUB}{place}:%s", "configuration", default)
        splits = datasets.get_dataset_split_names(place, config, revision=revision)
        split = _chosen(split, splits, f"{HUB}{place}:{config}[%s]", "split", "train")
        builder = datasets.load_dataset_builder(place, config, revision=revision)
        commit = _COMMIT.search(builder.base_path or "")
        place = place if commit is None else f"{place}@{commit[1]}"
        return Rows(f"{place}:{config}[{split}]", _with_column(builder.as_streaming_dataset(split), column))
    except ConfigError:
        raise
    except Exception as error:  # the library raises any
        raise ConfigError(f"cannot read the dataset {name} ({first_line(error)})") from None


def fetch_tokenizer(name: str, patterns: Sequence[str]) -> Path:
    """Return the folder with a model's tokenizer files, downloaded unless they are there.

    Args:
        name: id of a model, with `@` and a revision if wanted.
    Raises:
        ConfigError: they cannot be fetched.
    """
    hub = import_extra("huggingface_hub", f"fetching {HUB}{name}")
    place, _, revision = name.partition("@")
    try:
        return Path(hub.snapshot_download(place, revision=revision or None, allow_patterns=list(patterns)))
    except Exception as error:  # the library raises any
        raise ConfigError(f"cannot fetch the tokenizer {HUB}{name} ({first_line(error)})") from None


def _parts_of(name: str) -> tuple[str, str | None, str | None, str | None]:
    if os.path.exists(os.path.expanduser(name)):
        return os.path.expanduser(name), None, None, None
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise ConfigError(f"{HUB}{name!r} is no dataset; expected {HUB}owner/name:CONFIG[SPLIT] or {HUB}FOLDER")
    return os.path.expanduser(parts["place"]), parts["revision"], parts["config"], parts["split"]


def _chosen(wanted: str | None, names: Sequence[str], form: str, what: str, default: str | None) -> str:
    """Return the wanted name, or the only or usual one if none is wanted."""
    if wanted in names:
        return str(wanted)
    if wanted is None and (len(names) == 1 or default in names):
        return names[0] if len(names) == 1 else str(default)
    problem = f"there is no {what} {wanted}" if wanted is not None else f"choose a {what}"
    raise ConfigError(
        f"{problem}, such as {form % names[0] if names else form}; there are: {', '.join(names) or 'none'}"
    )


def _with_column(rows: Any, column: str) -> Any:
    """Return the rows with only the column that is read, so that no images are decoded, as plain objects."""
    rows = rows.with_format(None)  # a saved dataset may have another, such as tensors of some columns
    names = rows.column_names or []
    wanted = column if column in names else column.partition(".")[0]
    if names and wanted not in names:
        raise ConfigError(f"the dataset has no column {column}; name one with --column: {shown(names)}")
    return rows.select_columns([wanted]) if names else rows
