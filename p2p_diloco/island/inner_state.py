"""An island's private state next to its checkpoints: its optimisers, and other objects passed by a training loop.

It is never sent. After a restart, a peer starts from the shared model and restores the last saved private state.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from p2p_diloco.errors import StateError
from p2p_diloco.island.parameters import Buffers, first_not_finite
from p2p_diloco.island.shards import is_sharded, local_part, with_part
from p2p_diloco.wording import first_line

INNER_FILE = "inner.pt"
_PART = "part of a sharded tensor"
_NOT_FINITE = "holds numbers that are not finite"


class Stateful(Protocol):
    """Anything with a state that can be saved and restored, such as an optimiser, a schedule or a data loader."""

    def state_dict(self) -> Any:
        """Return the state: numbers, strings, tensors, and lists and dicts of them."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state."""
        ...


class InnerState:
    """Saves and restores the state of named objects in a file. For the training thread.

    Args:
        folder: the run's folder on this machine.
        rank: the rank of this process in its island; each rank has its own file.
    """

    def __init__(self, folder: Path, parts: Mapping[str, Stateful], rank: int = 0) -> None:
        self.folder = folder
        self._path = folder / (INNER_FILE if not rank else f"inner-rank-{rank}.pt")
        self._parts = dict(parts)
        self._is_proved = False
        self._begun = {name for name, part in self._parts.items() if getattr(part, "state", None)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def label(self) -> str | None:
        """Return the label of the latest save; None if there is no file.

        Raises:
            StateError: the file cannot be read.
        """
        # Memory-mapped: only the label is read.
        return str(self._read(mmap=True)["label"]) if self._parts and self._path.exists() else None

    def save(self, label: str) -> None:
        """Replace the file with the current state of all parts.

        Moments that are not finite are not saved but cleared: they would keep parameters still, or break them.

        There is no fsync: after a power failure, a reset optimiser costs only some steps.

        Args:
            label: identifies this save; `load` returns it.
        Raises:
            StateError: the write failed, the state of a part could not be read back, or moments are not finite.
        """
        if not self._parts:
            return
        draft = self._path.with_name(f".{self._path.name}.part")
        try:
            parts = {name: _taken(part) for name, part in self._parts.items()}
            if broken := [name for name, part in self._parts.items() if _is_broken(part, parts[name]["state"])]:
                self.clear()
                raise ValueError(f"{', '.join(broken)} {_NOT_FINITE} and begins anew")
            torch.save({"label": label, "parts": parts}, draft)
            if not self._is_proved:
                torch.load(draft, map_location="cpu", weights_only=True, mmap=True)  # no second copy in memory
                self._is_proved = True
            os.replace(draft, self._path)
        except Exception as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise StateError(
                f"cannot save the optimiser and loop state ({first_line(error)}); after a restart it will be reset"
            ) from None

    def load(self) -> str | None:
        """Restore the parts from the file and return its label; None if there is no file.

        Raises:
            StateError: it cannot be read or does not match; the parts named in the text are reset.
        """
        if not self._parts or not self._path.exists():
            return None
        kept = self._read(mmap=False)
        label, parts = str(kept["label"]), kept["parts"]
        refused = [
            f"{name} ({reason})" for name, part in self._parts.items() if (reason := _put(part, parts.get(name)))
        ]
        if refused:
            raise StateError(f"{self._path} does not match, so these are reset: {', '.join(refused)}")
        return label

    def clear(self) -> None:
        """Let optimisers and buffers begin anew; objects of the user's loop stay as they are."""
        for name, part in self._parts.items():
            if not isinstance(part, torch.optim.Optimizer):
                getattr(part, "clear_state", lambda: None)()
            elif name not in self._begun:
                part.state.clear()
            else:  # it made its state when it was created, such as Adagrad, and would not make it again
                for tensor in _tensors_in(list(part.state.values())):
                    tensor.zero_()

    def _read(self, *, mmap: bool) -> dict[str, Any]:
        try:
            kept = torch.load(self._path, map_location="cpu", weights_only=True, mmap=mmap)
            return {"label": kept["label"], "parts": dict(kept["parts"])}
        except Exception as error:
            raise StateError(
                f"{self._path} cannot be read ({first_line(error)}); these are reset: {', '.join(self._parts)}"
            ) from None


def saved_buffers(folder: Path) -> dict[str, Tensor]:
    """Return the buffers of the model as this peer saved them last, by name; none without a readable file."""
    try:
        kept = torch.load(folder / INNER_FILE, map_location="cpu", weights_only=True, mmap=True)
        states = [(part["kind"], part["state"]) for part in kept["parts"].values()]
        named = [state if kind == _kind_of(Buffers) else state.get("buffers", {}) for kind, state in states]
        return {name: tensor for buffers in named for name, tensor in buffers.items()}
    except Exception:  # also a state of the user's own that is no dict
        return {}


def _taken(part: Stateful) -> dict[str, Any]:
    state = part.state_dict()
    if any(map(is_sharded, _tensors_of(part))):
        state = _with_own_parts(state)
    return {"kind": _kind(part), "shapes": _shapes(part), "state": state}


def _with_own_parts(value: Any) -> Any:
    """Return an optimiser's state in which each sharded tensor is replaced by this rank's part of it."""
    if isinstance(value, dict):
        return {key: _with_own_parts(held) for key, held in value.items()}
    if isinstance(value, Tensor) and is_sharded(value):
        return {_PART: local_part(value).clone(), "shape": list(value.shape)}
    return value


def _laid_out(part: Stateful, state: Any) -> Any:
    """Return an optimiser's state in which each part of a sharded tensor is laid out like its parameter again."""
    tensors = _tensors_of(part)
    if not any(map(is_sharded, tensors)) and not _holds_parts(state):
        return state
    return state | {"state": {at: _like(tensors[at], held) for at, held in state["state"].items()}}


def _holds_parts(value: Any) -> bool:
    return isinstance(value, dict) and (_PART in value or any(map(_holds_parts, value.values())))


def _like(tensor: Tensor, held: Any) -> Any:
    if not isinstance(held, dict):
        if isinstance(held, Tensor) and held.ndim and is_sharded(tensor):
            raise ValueError("its parameters are cut into shards now")
        return held
    if _PART not in held:
        return {key: _like(tensor, value) for key, value in held.items()}
    if not is_sharded(tensor) or list(tensor.shape) != held["shape"]:
        raise ValueError(f"a shard of a tensor of shape {held['shape']} does not have the layout of its parameter")
    return with_part(held[_PART], tensor)


def _put(part: Stateful, kept: Any) -> str:
    """Restore a part from its state; return why that failed, or an empty string."""
    if not isinstance(kept, dict):
        return "it was not saved"
    if kept["kind"] != _kind(part):
        return f"it was a {kept['kind']}"
    if kept["shapes"] != _shapes(part):
        return "its tensors had other shapes"
    if _is_broken(part, kept["state"]):
        return f"it {_NOT_FINITE}"
    try:
        part.load_state_dict(_laid_out(part, kept["state"]))
    except Exception as error:
        return first_line(error)
    return ""


def _is_broken(part: Stateful, state: Any) -> bool:
    """Return whether the state of an optimiser or of buffers is not finite; a loop's own objects may hold anything."""
    if not (hasattr(part, "param_groups") or hasattr(part, "clear_state")):
        return False
    tensors = [tensor for tensor in _tensors_in(state) if tensor.is_floating_point()]
    return bool(first_not_finite({str(place): tensor for place, tensor in enumerate(tensors)}))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for held in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(held)


def _kind(part: Stateful) -> str:
    return _kind_of(type(part))


def _kind_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _shapes(part: Stateful) -> list[list[int]]:
    """Return the shapes of an optimiser's parameters; a state of other shapes would load, but fail in a later step."""
    return [list(tensor.shape) for tensor in _tensors_of(part)]


def _tensors_of(part: Stateful) -> list[Tensor]:
    """Return an optimiser's parameters in the order in which its state counts them; none for another object."""
    groups: Sequence[dict[str, Any]] = getattr(part, "param_groups", ())
    return [tensor for group in groups for tensor in group["params"]]
