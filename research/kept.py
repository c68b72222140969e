"""File of outcomes, one per line, so that a table that takes hours can be interrupted, extended and derived again.

A line identifies its trial by a digest of the non-default fields of its setting (without the name), the seed and the
text. So a row of another table with the same trial finds it too, and a new field of settings does not invalidate old
outcomes. The digest does not cover the code: if an algorithm or a default changes, remove its lines.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import Digest, sha256
from research.setting import Outcome, Setting


class KeptOutcomes:
    """The outcomes in one file.

    Args:
        path: the file, created with the first outcome; None: outcomes are not stored.
        text: fingerprint of the text.
    Raises:
        ConfigError: the file cannot be read, or is not a file of outcomes.
    """

    def __init__(self, path: Path | None, text: Digest) -> None:
        self._path = path
        self._text = text
        self._found: dict[str, Outcome] = {}
        if path is None or not path.exists():
            return
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the outcomes in {path}: {error}") from None
        for number, line in enumerate(lines, 1):
            self._read(line, f"{path}, line {number}")

    def _read(self, line: str, where: str) -> None:
        try:
            fields = json.loads(line)
            name = fields.pop("trial")
            fields.pop("curve", None)  # trials had one until 2026-11-28; those that are kept have none
            blocks, shares = (tuple(map(float, fields.pop(key, ()))) for key in ("blocks", "sent_shares"))
            self._found[name] = Outcome(**fields, blocks=blocks, sent_shares=shares)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(f"{where}: this is not an outcome of a trial; remove it, or name another file") from None

    def find(self, setting: Setting, seed: int) -> Outcome | None:
        """Return the outcome of a trial, or None if the file has none."""
        found = self._found.get(self._name(setting, seed))
        return replace(found, name=setting.name) if found is not None else None

    def add(self, setting: Setting, outcome: Outcome) -> None:
        """Store an outcome.

        Raises:
            StateError: the file cannot be written.
        """
        if self._path is None:
            return
        name = self._name(setting, outcome.seed)
        self._found[name] = outcome
        line = json.dumps({"trial": name, **asdict(outcome)}, allow_nan=False)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise StateError(f"cannot keep outcomes in {self._path}: {error.strerror}") from None

    def _name(self, setting: Setting, seed: int) -> str:
        defaults = asdict(Setting(name=setting.name))
        figures = {name: value for name, value in asdict(setting).items() if value != defaults[name]}
        words = json.dumps(figures, sort_keys=True).encode()
        return sha256(words, seed.to_bytes(8, "little"), self._text)[:12].hex()
