"""`p2p-diloco new`: write `run.toml` and make the key that signs it."""

from __future__ import annotations

import re
import time
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from p2p_diloco.cli.flags import Surroundings
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId
from p2p_diloco.key_file import create_key_file, read_key_file
from p2p_diloco.manifest import STANDARD_LIBRARY, RunManifest
from p2p_diloco.outer.fragments import suited_spans
from p2p_diloco.own_command import own_command
from p2p_diloco.run_file import KEY_FILE, draft_manifest, values_by_key, write_run_toml
from p2p_diloco.signing import SigningKey
from p2p_diloco.toml_document import Document, read_toml

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""Matches the id of a dataset on a model hub."""
_OF_ONE_RUN = frozenset({"organiser", "created"})
_CLOCK_START = "rounds.clock_start"
_NOT_CHOSEN = frozenset({"format", "name", "organiser", "created"})


def make_run(
    path: Path, *, name: str | None, islands: int | None = None, key_path: Path | None, around: Surroundings
) -> int:
    """Write a new run to `path`; an organiser's key that is there already signs this run too.

    Args:
        name: for people; None: as the files say, or else that of `path`.
        islands: expected at a time; None: as many as average in one group.

    Raises:
        ConfigError: there is a run at `path` or no folder for it, or a key or a value does not fit.
        StateError: the folder cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already and is never overwritten; move it away, or name another file")
    key_path = key_path or path.with_name(KEY_FILE)
    for file in (path, key_path):
        if not file.parent.is_dir():
            raise ConfigError(f"there is no folder {file.parent} for {file.name}; make it first, or name another place")
    values = _values_of(around) | ({} if name is None else {"name": name})
    is_new_key = not key_path.exists()
    # The values are checked before a key is made, so that a typo leaves nothing behind.
    draft = draft_manifest(organiser=_anybody(), now_seconds=time.time(), name=path.stem, values=values)
    _check_text(draft.data.path)
    if islands is not None:
        values = {"rounds.spans_per_fragment": _spans_for(draft, islands)} | values
    key = create_key_file(key_path) if is_new_key else read_key_file(key_path)
    manifest = draft_manifest(organiser=key.peer, now_seconds=time.time(), name=path.stem, values=values)
    write_run_toml(path, manifest)
    print(f"wrote {path}; edit it before the first peer joins")
    print(f"{'wrote' if is_new_key else 'uses'} {key_path}; it signs the run, so keep it secret and keep a copy")
    print(f"next: {_next_command(path, key_path)}")
    return 0


def print_keys() -> None:
    """Print what `new` can change: every key of a manifest with what it is set to and what it means, by section."""
    draft = draft_manifest(organiser=_anybody(), now_seconds=time.time())
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(
        f"\nThe run, as {draft.name}.toml has it. Change any of it here, as --rounds.round_seconds 10, or in the file "
        "before the first peer joins:"
    )
    for title, prefix, section in (("", "", draft), *_sections(draft)):
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False, title_justify="left", title_style="")
        table.title = f"\n{title}" if title else None
        table.add_column(no_wrap=True, min_width=31)
        table.add_column()
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            if isinstance(value, BaseModel) or (section is draft and key in _NOT_CHOSEN):
                continue
            setting = "" if value in (None, ()) else "the moment of writing" if key == "clock_start" else str(value)
            default = f" [default: {setting}]" if setting else ""
            table.add_row(f"--{prefix}{key}", f"{field.description}{default}")
        console.print(table)


def _sections(manifest: RunManifest) -> list[tuple[str, str, BaseModel]]:
    """Return each section with what it is about and the beginning of its keys."""
    sections = [(name, getattr(manifest, name)) for name in type(manifest).model_fields]
    return [
        (f"{name}: {(type(section).__doc__ or '').partition(chr(10))[0]}", f"{name}.", section)
        for name, section in sections
        if isinstance(section, BaseModel)
    ]


def _next_command(path: Path, key_path: Path) -> str:
    words = ["bootstrap", str(path)]
    if key_path != path.with_name(KEY_FILE):
        words += ["--organiser-key", str(key_path)]
    return own_command(*words)


def _values_of(around: Surroundings) -> Document:
    """Return what differs from the defaults, by dotted key: a later file wins over an earlier one, a flag over both.

    A file may be another run's: what only that run can be, its organiser and when it began, does not come along.
    """
    values: Document = {}
    for file in around.files:
        layer = values_by_key(read_toml(file), str(file))
        if _OF_ONE_RUN & layer.keys():
            layer = {key: value for key, value in layer.items() if key not in {*_OF_ONE_RUN, _CLOCK_START}}
        values |= layer
    return values | values_by_key(around.overrides, "the command line")


def _check_text(path: str) -> None:
    """Refuse a text that is not here; whoever makes a run without it may write its path into the file afterwards."""
    if path == STANDARD_LIBRARY:
        return
    from p2p_diloco.island.corpus_files import list_corpus_files  # only here, for it brings NumPy

    try:
        list_corpus_files(path)
    except ConfigError as error:
        if not _HUB_NAME.fullmatch(path):
            raise ConfigError(f"data.path: {error}") from None
        raise ConfigError(
            f"data.path: there is no folder {path} here, and nothing is fetched from a hub; download the text, then "
            "name its file or folder"
        ) from None


def _spans_for(manifest: RunManifest, islands: int) -> int:
    from p2p_diloco.trainer.run_plan import plan_run  # only here, for it brings PyTorch

    if islands < 1:
        raise ConfigError(f"--islands is {islands}; expected at least 1")
    longest = max(fragment.elements for fragment in plan_run(manifest).fragments)
    return suited_spans(longest, min(islands, manifest.membership.group_size))


def _anybody() -> PeerId:
    return SigningKey(bytes(32)).peer
