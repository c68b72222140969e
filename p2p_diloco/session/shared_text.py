"""A text that is fetched from other peers, file by file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from p2p_diloco.errors import ConfigError
from p2p_diloco.storage.text_copy import TextStore

LOOK_SECONDS = 0.1


class SharedText:
    """The files of a text that are fetched. Callable from any thread."""

    def __init__(self, store: TextStore) -> None:
        self.store = store
        self._numbers: dict[str, int] = {}

    @property
    def root(self) -> Path:
        """Folder of the files. Read only those that are here: the others have gaps."""
        return self.store.root

    def names(self) -> tuple[str, ...]:
        """Return the names of all files; none before the list is here."""
        listed = self.store.listed
        return tuple(file.name for file in listed.files) if listed is not None else ()

    def want(self, names: Sequence[str]) -> None:
        """Have these files fetched before all others, instead of those wanted before.

        Raises:
            ConfigError: the text has no file of that name.
        """
        self.store.want(self._pieces_of(names))

    def has(self, names: Sequence[str]) -> bool:
        """Return whether all bytes of these files are here; False before the list is."""
        return self.store.listed is not None and not self._pieces_of(names) & ~self.store.held

    def is_whole(self) -> bool:
        listed = self.store.listed
        return listed is not None and self.store.held.bit_count() == listed.num_pieces

    async def fetch(self, names: Sequence[str]) -> Path:
        """Wait until these files are here, and return the folder that they are in."""
        while self.store.listed is None:  # noqa: ASYNC110  # a thread without a loop sets it
            await asyncio.sleep(LOOK_SECONDS)
        self.want(names)
        while not self.has(names):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        return self.root

    def _pieces_of(self, names: Sequence[str]) -> int:
        listed = self.store.listed
        self._numbers = known = self._numbers or {name: number for number, name in enumerate(self.names())}
        pieces = 0
        for name in names:
            if listed is None or name not in known:
                raise ConfigError(f"the run's text has no file {name}; expected one of its {len(known)} files")
            span = listed.pieces_of(known[name])
            pieces |= (1 << span.stop) - (1 << span.start)
        return pieces
