"""`p2p-diloco new`: write `run.toml` and make the key that signs it."""

from __future__ import annotations

import time
from pathlib import Path

from p2p_diloco.cli.flags import Surroundings
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId
from p2p_diloco.key_file import create_key_file, read_key_file
from p2p_diloco.manifest import RunManifest
from p2p_diloco.outer.fragments import suited_spans
from p2p_diloco.own_command import own_command
from p2p_diloco.run_file import draft_manifest, values_by_key, write_run_toml
from p2p_diloco.signing import SigningKey
from p2p_diloco.toml_document import Document, read_toml

KEY_FILE = "organiser.key"
_OF_ONE_RUN = frozenset({"organiser", "created"})
_CLOCK_START = "rounds.clock_start"


def make_run(
    path: Path, *, name: str | None, islands: int | None = None, key_path: Path | None, around: Surroundings
) -> int:
    """Write a new run to `path`; an organiser's key that is there already signs this run too.

    Args:
        name: for people; None: as the files say, or else that of `path`.
        islands: expected at a time; None: as many as average in one group.

    Raises:
        ConfigError: there is a run at `path`, or a key or a value does not fit.
        StateError: the folder cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already and is never overwritten; move it away, or name another file")
    key_path = key_path or path.with_name(KEY_FILE)
    values = _values_of(around) | ({} if name is None else {"name": name})
    is_new_key = not key_path.exists()
    # The values are checked before a key is made, so that a typo leaves nothing behind.
    draft = draft_manifest(organiser=_anybody(), now_seconds=time.time(), name=path.stem, values=values)
    if islands is not None:
        values = {"rounds.spans_per_fragment": _spans_for(draft, islands)} | values
    key = create_key_file(key_path) if is_new_key else read_key_file(key_path)
    manifest = draft_manifest(organiser=key.peer, now_seconds=time.time(), name=path.stem, values=values)
    write_run_toml(path, manifest)
    print(f"wrote {path}; edit it before the first peer joins")
    print(f"{'wrote' if is_new_key else 'uses'} {key_path}; it signs the run, so keep it secret and keep a copy")
    print(f"next: {_next_command(path, key_path)}")
    return 0


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


def _spans_for(manifest: RunManifest, islands: int) -> int:
    from p2p_diloco.trainer.run_plan import plan_run  # only here, for it brings PyTorch

    if islands < 1:
        raise ConfigError(f"--islands is {islands}; expected at least 1")
    longest = max(fragment.elements for fragment in plan_run(manifest).fragments)
    return suited_spans(longest, min(islands, manifest.membership.group_size))


def _anybody() -> PeerId:
    return SigningKey(bytes(32)).peer
