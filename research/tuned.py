"""File of tuned values: for each row and scale the best try, with all others and the commands that found them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from p2p_diloco.errors import ConfigError, StateError
from research.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """Values by field of a setting, and the loss of a trial of the tuning stage with them."""

    values: Mapping[str, float]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The search for the values of one row at one scale.

    Attributes:
        row: name of the row, with its cycle.
        size, islands, optimizer, inner_schedule: scale that the values are for.
        steps, windows: length of a trial, and windows per step of all islands together.
        text: first digits of the fingerprint of the text.
        tries: all tries, the default first.
    """

    row: str
    size: str
    islands: int
    optimizer: str
    inner_schedule: str
    steps: int
    windows: int
    text: str
    tries: tuple[Try, ...]

    @property
    def best(self) -> Try:
        """The try with the lowest loss."""
        return best_of(self.tries)

    def fits(self, row: str, scope: Scope) -> bool:
        """Return whether the values are for this row and scale. A shorter trial uses them too."""
        return self._key() == (row, scope.size, scope.islands, scope.optimizer, scope.inner_schedule)

    def note(self) -> str:
        """Return the number and length of the tries, and the chosen values, in words."""
        values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(self.best.values.items()))
        return f"best of {len(self.tries)} tries of {self.steps} steps: {values}"

    def _key(self) -> tuple[str, str, int, str, str]:
        return (self.row, self.size, self.islands, self.optimizer, self.inner_schedule)


def best_of(tries: Sequence[Try]) -> Try:
    """Return the try with the lowest loss."""
    return min(tries, key=lambda one: one.loss)


def read_searches(path: Path) -> tuple[Search, ...]:
    """Return the searches in a file; none if there is no file.

    Raises:
        ConfigError: the file cannot be read, or is not a file of tuned values.
    """
    if not path.exists():
        return ()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, list):
            raise TypeError("expected a list of searches")
        return tuple(_search(fields) for fields in found)
    except OSError as error:
        raise ConfigError(f"cannot read the tuned values in {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path} is not a file of tuned values; name another one with --tuned") from None


def write_search(path: Path, search: Search) -> None:
    """Add a search to a file, in place of an earlier one of the same row and scale.

    Raises:
        ConfigError: as `read_searches`.
        StateError: the file cannot be written.
    """
    others = [one for one in read_searches(path) if one._key() != search._key()]
    searches = sorted([*others, search], key=Search._key)
    lines = ",\n".join(json.dumps(asdict(one), allow_nan=False) for one in searches)
    try:
        path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    except OSError as error:
        raise StateError(f"cannot write the tuned values to {path}: {error.strerror}") from None


def find_search(searches: Sequence[Search], row: str, scope: Scope) -> Search:
    """Return the search of a row at a scale.

    Raises:
        ConfigError: there is none.
    """
    for search in searches:
        if search.fits(row, scope):
            return search
    raise ConfigError(
        f"row {row} has no tuned values for {scope.size}, {scope.islands} islands, {scope.optimizer}, "
        f"{scope.inner_schedule}; run python -m research tune --rows {row} with these flags first"
    )


def _search(fields: dict[str, Any]) -> Search:
    tries = tuple(Try(values=dict(one["values"]), loss=float(one["loss"])) for one in fields.pop("tries"))
    if not tries:
        raise ValueError("no tries")
    return Search(**fields, tries=tries)
