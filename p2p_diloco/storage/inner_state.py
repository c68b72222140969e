"""State that an island keeps for itself beside its checkpoints: its optimisers, and anything else that a loop hands in.

It is private and never sent. After a restart, a peer begins at the shared model and restores the state saved last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from p2p_diloco.errors import StateError

INNER_FILE = "inner.pt"


class Stateful(Protocol):
    """Anything with a state that can be taken and put back, such as an optimiser, a schedule or a data loader."""

    def state_dict(self) -> Any:
        """Return the state: numbers, texts, tensors, and lists and dicts of them."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from a state."""
        ...


class InnerState:
    """Things with a state, by name, and the file in which they are kept. For the thread that trains.

    Args:
        folder: the run's folder on this machine.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Stateful]) -> None:
        self._path = folder / INNER_FILE
        self._parts = dict(parts)
        self._is_proved = False

    def save(self, label: str) -> None:
        """Write all parts in place of what was there.

        The disk is not waited for: after a power cut an optimiser that begins anew costs some steps and no more.

        Args:
            label: of this moment, for `load`.
        Raises:
            StateError: the disk refuses, or a part has a state that could not be read again.
        """
        if not self._parts:
            return
        draft = self._path.with_name(f".{self._path.name}.part")
        try:
            torch.save({"label": label, "parts": {name: _taken(part) for name, part in self._parts.items()}}, draft)
            if not self._is_proved:
                torch.load(draft, map_location="cpu", weights_only=True, mmap=True)  # no second copy in memory
                self._is_proved = True
            os.replace(draft, self._path)
        except Exception as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise StateError(
                f"optimiser and loop state cannot be kept ({_first_line(error)}); after a restart they begin anew"
            ) from None

    def load(self) -> str | None:
        """Let the parts go on from what was kept, and return its label; None where nothing was.

        Raises:
            StateError: it cannot be read, or is of other things; the parts named in the text begin anew.
        """
        if not self._parts or not self._path.exists():
            return None
        try:
            kept = torch.load(self._path, map_location="cpu", weights_only=True)
            label, parts = str(kept["label"]), dict(kept["parts"])
        except Exception as error:
            raise StateError(
                f"{self._path} cannot be read ({_first_line(error)}); these begin anew: {', '.join(self._parts)}"
            ) from None
        refused = [
            f"{name} ({reason})" for name, part in self._parts.items() if (reason := _put(part, parts.get(name)))
        ]
        if refused:
            raise StateError(f"{self._path} does not fit, and these begin anew: {', '.join(refused)}")
        return label


def _taken(part: Stateful) -> dict[str, Any]:
    return {"kind": _kind(part), "shapes": _shapes(part), "state": part.state_dict()}


def _put(part: Stateful, kept: Any) -> str:
    """Let a part go on from its state; return why not, or nothing."""
    if not isinstance(kept, dict):
        return "it was not kept"
    if kept["kind"] != _kind(part):
        return f"it was a {kept['kind']}"
    if kept["shapes"] != _shapes(part):
        return "its tensors had other shapes"
    try:
        part.load_state_dict(kept["state"])
    except Exception as error:
        return _first_line(error)
    return ""


def _kind(part: Stateful) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _shapes(part: Stateful) -> list[list[int]]:
    """Return the shapes of what an optimiser steps: loading one of other shapes fails steps later, in its step."""
    groups: Sequence[dict[str, Any]] = getattr(part, "param_groups", ())
    return [list(tensor.shape) for group in groups for tensor in group["params"]]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
