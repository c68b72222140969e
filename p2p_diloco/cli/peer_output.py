"""What a running peer shows: files for other programs, a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live

from p2p_diloco.cli.lost_stream import discard, print_to_stderr
from p2p_diloco.config.own_command import join_line
from p2p_diloco.errors import StateError
from p2p_diloco.status.event_log import PeerEvent, append_event, event_line
from p2p_diloco.status.status_file import PeerStatus, write_status
from p2p_diloco.status.table import status_line, status_table

# The status line says these already.
_QUIET_TOPICS = frozenset({"round", "evaluation"})
_QUIET_SECONDS = 30.0


class _OutputConsole(Console):
    """A console whose reader may go: the base class would end the process."""

    def on_broken_pipe(self) -> None:
        """Say so to the caller."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class PeerOutput:
    """Observes one peer. Enter before it runs, so that the terminal is put right whatever happens.

    A disk that fills up while the peer runs is said once; training goes on. So it does when the output itself is lost,
    as to `| head -1`: that is said once on standard error, and nothing is printed any more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        announces_invite: bool,
        stream: TextIO | None = None,
        now_seconds: Callable[[], float] = time.time,
        soon: Callable[[Callable[[], None]], object] = lambda write: write(),
    ) -> None:
        """Make the output of the peer whose state lies in `folder`.

        Args:
            folder: state directory.
            announces_invite: nothing is printed before the join command, so that it is the first line.
            stream: where to print; standard output if not named.
            now_seconds: Unix time.
            soon: runs a function that writes to the disk, one after the other: a slow disk must not hold the peer.
        """
        self._folder = folder
        self._stream = stream or sys.stdout
        self._console = _OutputConsole(file=self._stream, soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._waiting: list[str] | None = [] if announces_invite else None
        self._now_seconds = now_seconds
        self._soon = soon
        self._said: tuple[int, str] | None = None
        self._said_at = 0.0
        self._complained = False
        self._awaits_trainers = False

    def __enter__(self) -> Self:
        if self._live is not None:
            self._show(self._live.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._show(self._live.stop)
        self._release()

    def listening(self, invite: str, *, own_model: bool) -> None:
        """Print the whole join command, once, as the first line."""
        self._print_now(join_line(invite, own_model=own_model))
        self._release()

    def status(self, status: PeerStatus) -> None:
        """Keep and show a status."""
        self._keep(lambda: write_status(self._folder, status))
        self._awaits_trainers = status.role == "bootstrap" and not status.num_members
        if (live := self._live) is not None:
            self._show(lambda: live.update(status_table(status), refresh=True))
            return
        said, now = (status.round, status.phase), self._now_seconds()
        if said != self._said or now - self._said_at >= _QUIET_SECONDS:
            self._said, self._said_at = said, now
            self.say(status_line(status))

    def event(self, event: PeerEvent) -> None:
        """Keep and show an event."""
        self._keep(lambda: append_event(self._folder, event))
        # Until somebody trains, each round is skipped, and the status says that no trainer is listed yet.
        if event.topic not in _QUIET_TOPICS and not (self._awaits_trainers and event.topic == "skipped"):
            self.say(event_line(event))

    def say(self, text: str) -> None:
        """Print one line with the time of day, above the table if there is one."""
        line = f"{time.strftime('%H:%M:%S', time.localtime(self._now_seconds()))} {text}"
        if self._waiting is not None:
            self._waiting.append(line)
        else:
            self._print_now(line)

    def _print_now(self, line: str) -> None:
        self._show(lambda: self._console.print(line))

    def _show(self, show: Callable[[], None]) -> None:
        if self._console.quiet:
            return
        try:
            show()
            self._stream.flush()
        except OSError as error:
            self._console.quiet = True  # for good: a stream gives no way to take back what it could not write
            discard(self._stream)
            if self._live is not None:
                self._live.stop()  # it has taken standard error
            print_to_stderr(
                f"p2p-diloco: the output cannot be written any more ({error.strerror or error}); the peer goes on "
                "without it; p2p-diloco status shows how it does"
            )

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, None
        for line in waiting or ():
            self._print_now(line)

    def _keep(self, write: Callable[[], None]) -> None:
        self._soon(lambda: self._write(write))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except StateError as error:
            if not self._complained:
                self._complained = True
                self.say(f"{error}; training goes on")
        else:
            self._complained = False
