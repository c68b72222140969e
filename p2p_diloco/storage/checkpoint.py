"""Checkpoints: all spans with their heads and content digests in one safetensors file, written atomically."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from p2p_diloco.codec.vectors import Vector, is_vector
from p2p_diloco.errors import StateError
from p2p_diloco.ids import DIGEST_BYTES, ZERO_DIGEST, Digest, SpanId
from p2p_diloco.memory.slabs import copy_of
from p2p_diloco.outer.state import SpanState, content_digest
from p2p_diloco.span_log import SpanHead
from p2p_diloco.storage.whole_file import replace_file

_FILE_NAME = re.compile(r"checkpoint-(\d{9})\.safetensors", re.ASCII)
CHECKPOINTS = "checkpoint-*.safetensors"
_SET_ASIDE = "refused-"
_KINDS = ("anchor", "momentum")
_LENGTH_BYTES = _ALIGNMENT = 8


class CheckpointFolder:
    """The latest `keep` checkpoints of one peer in one run.

    A broken file is renamed to `refused-…`, so that it does not count as one of them. A file that cannot be read at the
    moment may be sound, so it is not moved.

    Args:
        elements: number of elements of each span, from the manifest.
    """

    def __init__(self, folder: Path, *, run: Digest, elements: Mapping[SpanId, int], keep: int) -> None:
        self._folder = folder
        self._run = run
        self._elements = dict(elements)
        self._keep = keep

    def keep_only(self, keep: int) -> None:
        """Change the number of checkpoints to keep, and remove those that are too many now."""
        self._keep = keep
        self._remove_old(self._numbers())

    def _remove_old(self, numbers: Sequence[int]) -> None:
        for old in numbers[: -self._keep]:
            self._path(old).unlink(missing_ok=True)

    def save(self, states: Mapping[SpanId, SpanState]) -> None:
        """Write a checkpoint, then remove the oldest ones.

        Raises:
            StateError: the write failed; earlier checkpoints are unchanged.
        """
        numbers = self._numbers()
        number = numbers[-1] + 1 if numbers else 0
        save_checkpoint(self._path(number), self._run, states)
        self._remove_old([*numbers, number])

    def load_newest(self) -> tuple[dict[SpanId, SpanState] | None, tuple[str, ...]]:
        """Return the newest sound checkpoint, or None, and a sentence for each that was refused.

        Raises:
            UnreadableCheckpoint: a checkpoint newer than any sound one cannot be read. Nothing is changed: continuing
                from an older one would eventually delete it.
            StateError: a refused checkpoint cannot be renamed.
        """
        states, refused = self._newest_of(self.paths())
        if refused:
            self._set_aside(list(refused))
        return states, tuple(refused.values())

    def read_newest(self) -> tuple[dict[SpanId, SpanState] | None, tuple[str, ...]]:
        """Return the same for a peer that may be running, without renaming anything.

        Raises:
            UnreadableCheckpoint: as for `load_newest`.
        """
        while True:
            paths = self.paths()
            states, refused = self._newest_of(paths)
            # A running peer may write a new checkpoint and remove these while they are read.
            if states is not None or paths == self.paths():
                return states, tuple(refused.values())

    def _newest_of(self, paths: Sequence[Path]) -> tuple[dict[SpanId, SpanState] | None, dict[Path, str]]:
        """Return the last sound checkpoint of `paths`, or None, and a sentence for each that was refused."""
        refused: dict[Path, str] = {}
        for path in reversed(paths):
            try:
                states = load_checkpoint(path, self._run, self._elements)
            except UnreadableCheckpoint:
                raise
            except StateError as error:
                refused[path] = str(error)
                continue
            if states is not None:
                return states, refused
        return None, refused

    def load_span(self, span: SpanId) -> Iterator[SpanState]:
        """Yield a span from each checkpoint, oldest first; broken ones are skipped."""
        for number in self._numbers():
            try:
                states = load_checkpoint(self._path(number), self._run, {span: self._elements[span]})
            except StateError:
                continue
            if states is not None:
                yield states[span]

    def paths(self) -> tuple[Path, ...]:
        """Return the files, oldest first."""
        return tuple(self._path(number) for number in self._numbers())

    def _numbers(self) -> list[int]:
        try:
            matches = [_FILE_NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreadableCheckpoint(
                f"cannot read the folder of checkpoints {self._folder}: {error.strerror}; give this user read access, "
                "or choose another place with --state-directory"
            ) from None
        return sorted(int(match[1]) for match in matches if match is not None)

    def _path(self, number: int) -> Path:
        return self._folder / f"checkpoint-{number:09d}.safetensors"

    def _set_aside(self, refused: Sequence[Path]) -> None:
        """Keep only the newest of `refused`, under another name, for inspection."""
        newest, *others = refused
        try:
            for old in [*self._folder.glob(f"{_SET_ASIDE}*"), *others]:
                if old.is_file():
                    old.unlink(missing_ok=True)
                elif old in others:
                    old.rename(old.with_name(_SET_ASIDE + old.name))
            newest.rename(newest.with_name(_SET_ASIDE + newest.name))
        except OSError as error:
            raise StateError(
                f"cannot rename the broken checkpoint {newest}: {error.strerror}; give this user write access to its "
                "folder"
            ) from None


def save_checkpoint(path: Path, run: Digest, states: Mapping[SpanId, SpanState]) -> None:
    """Write all spans, reading each from `states` when it is written.

    Spans may advance during the write, each along its own chain; a reader continues each from its stored position. So
    nothing has to be paused or copied.

    Raises:
        StateError: the write failed; an earlier checkpoint is unchanged.
    """
    spans = {f"{span.fragment}.{span.index}": span for span in sorted(states)}
    heads = dict.fromkeys(spans, LONGEST_HEAD)
    contents = {name: ZERO_DIGEST.hex() for name in spans}

    def metadata() -> dict[str, str]:
        return {"run": run.hex(), "heads": json.dumps(heads), "contents": json.dumps(contents)}

    def vectors() -> Iterator[Vector]:
        for name, span in spans.items():
            state = states[span]
            heads[name] = head_to_json(state.head)
            contents[name] = content_digest(state.anchor_N, state.momentum_N, state.head.digest).hex()
            yield state.anchor_N
            yield state.momentum_N

    elements = {f"{kind}.{name}": states[span].elements for name, span in spans.items() for kind in _KINDS}
    longest = metadata()
    try:
        replace_file(
            path,
            lambda draft: write_tensors(draft, elements, vectors(), metadata=metadata, longest_metadata=longest),
        )
    except OSError as error:
        raise StateError(
            f"cannot write the checkpoint {path}: {error}; the previous one is kept; free some space or choose another "
            "place with --state-directory"
        ) from None


def load_checkpoint(path: Path, run: Digest, elements: Mapping[SpanId, int]) -> dict[SpanId, SpanState] | None:
    """Read the spans named in `elements`; None if there is no checkpoint.

    Raises:
        UnreadableCheckpoint: the file cannot be read at the moment; it may be sound.
        StateError: it is broken, of another run, does not match the manifest, or its bytes have changed since it was
            written; the file is not touched.
    """
    try:
        # Open it directly first: safetensors reports a file without read permission as "not found".
        path.open("rb").close()
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("run", run.hex()) != run.hex():
                raise _ForeignCheckpointError
            heads, contents = json.loads(metadata["heads"]), json.loads(metadata["contents"])
            return {span: _read_span(file, span, heads, contents, count) for span, count in elements.items()}
    except _ForeignCheckpointError:
        raise StateError(f"the checkpoint {path} belongs to another run and is not used") from None
    except FileNotFoundError:
        return None
    except (
        SafetensorError,
        StateError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        IsADirectoryError,
    ) as error:
        raise StateError(f"the checkpoint {path} is broken ({error}) and is not used") from None
    except OSError as error:
        raise UnreadableCheckpoint(
            f"cannot read the checkpoint {path}: {error.strerror or error}; it was not changed; give this user read "
            "access and check the disk, or move it away to start without it, then start again"
        ) from None


class UnreadableCheckpoint(StateError):
    """A checkpoint cannot be read at the moment; it may be sound, so it is neither replaced nor moved."""


class _ForeignCheckpointError(Exception):
    """The file is sound but belongs to another run."""


def _read_span(
    file: Any, span: SpanId, heads: Mapping[str, Any], contents: Mapping[str, Any], elements: int
) -> SpanState:
    name = f"{span.fragment}.{span.index}"
    anchor_N, momentum_N = (_kept(file.get_tensor(f"{kind}.{name}")) for kind in _KINDS)
    if anchor_N.shape != (elements,) or not (np.isfinite(anchor_N).all() and np.isfinite(momentum_N).all()):
        raise ValueError(f"{span} has shape {anchor_N.shape}, expected {elements} finite numbers")
    state = SpanState(head=_head_from_json(heads[name]), anchor_N=anchor_N, momentum_N=momentum_N)
    if content_digest(anchor_N, momentum_N, state.head.digest).hex() != contents[name]:
        raise ValueError(f"the bytes of {span} have changed since they were written")
    return state


def _kept(vector_N: Any) -> Any:
    """Copy a vector into span memory; anything else is returned as it is and refused later."""
    return copy_of(vector_N) if is_vector(vector_N) else vector_N


def head_to_json(head: SpanHead) -> dict[str, Any]:
    """Return a head as a checkpoint holds it."""
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in asdict(head).items()}


LONGEST_HEAD = head_to_json(
    SpanHead(
        digest=ZERO_DIGEST,
        height=2**63,
        round=2**63,
        roster=ZERO_DIGEST,
        radius=-sys.float_info.min * (1.0 + sys.float_info.epsilon),
        median_weight=-sys.float_info.min * (1.0 + sys.float_info.epsilon),
    )
)
"""The longest possible head as text: these floats have 17 digits, a sign and a three-digit exponent."""


def _head_from_json(document: Mapping[str, Any]) -> SpanHead:
    head = SpanHead(
        digest=_digest(document["digest"]),
        height=int(document["height"]),
        round=int(document["round"]),
        roster=_digest(document["roster"]),
        radius=float(document["radius"]),
        median_weight=float(document["median_weight"]),
    )
    # Until protocol version 6 spans were founded without a radius; such checkpoints are refused.
    if head.height < 0 or not (0.0 < head.radius < math.inf and 0.0 < head.median_weight < math.inf):
        raise ValueError(
            f"invalid head: height {head.height}, radius {head.radius}, median weight {head.median_weight}"
        )
    return head


def _digest(text: str) -> Digest:
    raw = bytes.fromhex(text)
    if len(raw) != DIGEST_BYTES:
        raise ValueError(f"a digest of {len(raw)} bytes, expected {DIGEST_BYTES}")
    return Digest(raw)


def write_tensors(
    path: Path,
    elements: Mapping[str, int],
    vectors: Iterable[Vector],
    *,
    metadata: Callable[[], Mapping[str, str]],
    longest_metadata: Mapping[str, str],
) -> None:
    """Write float32 vectors, little-endian, to a safetensors file, one at a time.

    The library's writer needs all vectors at once and copies them, which would take as much memory again as φ and m.
    The format is simple: eight bytes for the length of the header, the header as JSON (padded with spaces), then each
    tensor's bytes.

    Args:
        elements: number of elements by tensor name, in the order of `vectors`.
        metadata: called after all vectors are written.
        longest_metadata: upper bound for the length of `metadata`; this much space is reserved.
    Raises:
        OSError: the write failed; a partial file may remain.
    """
    room = len(_header(elements, longest_metadata))
    room += -room % _ALIGNMENT
    with path.open("wb") as file:
        file.seek(_LENGTH_BYTES + room)
        for vector_N in vectors:
            file.write(np.ascontiguousarray(vector_N, dtype="<f4").data.cast("B"))
        header = _header(elements, metadata()).ljust(room)
        assert len(header) == room, "no metadata is longer than the longest"
        file.seek(0)
        file.write(room.to_bytes(_LENGTH_BYTES, "little") + header)


def _header(elements: Mapping[str, int], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, count in elements.items():
        begin, end = end, end + 4 * count
        header[name] = {"dtype": "F32", "shape": [count], "data_offsets": [begin, end]}
    return json.dumps(header, separators=(",", ":")).encode()
