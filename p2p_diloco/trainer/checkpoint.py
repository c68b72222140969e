"""Checkpoints: all spans with their heads in one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from p2p_diloco.errors import StateError
from p2p_diloco.ids import DIGEST_BYTES, Digest, SpanHead, SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.trainer.whole_file import replace_file

CHECKPOINT_FILE = "checkpoint.safetensors"


def save_checkpoint(path: Path, run: Digest, states: Mapping[SpanId, SpanState]) -> None:
    """Write all spans.

    Raises:
        StateError: the disk refuses; an earlier checkpoint stays as it was.
    """
    tensors = {}
    heads = {}
    for span, state in sorted(states.items()):
        name = f"{span.fragment}.{span.index}"
        tensors[f"anchor.{name}"] = state.anchor_N
        tensors[f"momentum.{name}"] = state.momentum_N
        heads[name] = _head_to_json(state.head)
    metadata = {"run": run.hex(), "heads": json.dumps(heads)}
    try:
        replace_file(path, lambda draft: save_file(tensors, draft, metadata=metadata))
    except (OSError, SafetensorError) as error:
        raise StateError(
            f"cannot write the checkpoint {path}: {error}; the one before is kept; free some space or choose another "
            "place with --state-directory"
        ) from None


def load_checkpoint(path: Path, run: Digest, elements: Mapping[SpanId, int]) -> dict[SpanId, SpanState] | None:
    """Read all spans; None when there is no checkpoint.

    Raises:
        StateError: it is broken, of another run, or does not fit the manifest; it is left as it is.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("run", run.hex()) != run.hex():
                raise _ForeignCheckpointError
            heads = json.loads(metadata["heads"])
            return {span: _read_span(file, span, heads, count) for span, count in elements.items()}
    except _ForeignCheckpointError:
        raise StateError(f"the checkpoint {path} belongs to another run; choose another --state-directory") from None
    except (SafetensorError, StateError, LookupError, TypeError, AttributeError, ValueError, OSError) as error:
        raise StateError(f"the checkpoint {path} is broken ({error}); move it away to fetch the state anew") from None


class _ForeignCheckpointError(Exception):
    """The file is sound, but of another run."""


def _read_span(file: Any, span: SpanId, heads: Mapping[str, Any], elements: int) -> SpanState:
    name = f"{span.fragment}.{span.index}"
    anchor_N, momentum_N = (file.get_tensor(f"{kind}.{name}") for kind in ("anchor", "momentum"))
    if anchor_N.shape != (elements,) or not (np.isfinite(anchor_N).all() and np.isfinite(momentum_N).all()):
        raise ValueError(f"{span} has shape {anchor_N.shape}, expected {elements} finite numbers")
    return SpanState(head=_head_from_json(heads[name]), anchor_N=anchor_N, momentum_N=momentum_N)


def _head_to_json(head: SpanHead) -> dict[str, Any]:
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in asdict(head).items()}


def _head_from_json(document: Mapping[str, Any]) -> SpanHead:
    head = SpanHead(
        digest=_digest(document["digest"]),
        height=int(document["height"]),
        round=int(document["round"]),
        roster=_digest(document["roster"]),
        radius=float(document["radius"]),
        median_weight=float(document["median_weight"]),
    )
    if head.height < 0 or not (math.isfinite(head.radius) and math.isfinite(head.median_weight)):
        raise ValueError(f"a head of height {head.height}, radius {head.radius}, median weight {head.median_weight}")
    return head


def _digest(text: str) -> Digest:
    raw = bytes.fromhex(text)
    if len(raw) != DIGEST_BYTES:
        raise ValueError(f"a digest of {len(raw)} bytes, expected {DIGEST_BYTES}")
    return Digest(raw)
