"""The output of a running peer: files for other programs, a live table on a terminal, plain lines elsewhere."""

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
from p2p_diloco.peer.peer_plan import AskQuota
from p2p_diloco.status.event_log import PeerEvent, append_event, event_line
from p2p_diloco.status.status_file import PeerStatus, write_status
from p2p_diloco.status.table import status_line, status_table

# The status line already contains these.
_QUIET_TOPICS = frozenset({"round", "evaluation"})
_QUIET_SECONDS = 30.0


class _OutputConsole(Console):
    """A console that survives a closed pipe: the base class would exit the process."""

    def on_broken_pipe(self) -> None:
        """Raise instead of exiting."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class PeerOutput:
    """Observer that shows one peer. Enter it before the peer runs, so that the terminal is always restored.

    If the disk fills up while the peer runs, that is reported once and training continues. If the output itself is
    lost, as with `| head -1`, that is reported once on standard error and nothing more is printed.
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
        """Create the output of the peer whose state is in `folder`.

        Args:
            folder: state directory.
            announces_invite: print nothing before the join command, so that it is the first line.
            stream: where to print; standard output by default.
            now_seconds: returns the Unix time.
            soon: runs functions that write to the disk, one at a time: a slow disk must not block the peer.
        """
        self._folder = folder
        self._stream = stream or sys.stdout
        self._console = _OutputConsole(file=self._stream, soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._waiting: list[str] | None = [] if announces_invite else None
        self._now_seconds = now_seconds
        self._soon = soon
        self._shown: tuple[int, str] | None = None
        self._shown_at = 0.0
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
        """Write and show a status."""
        self._keep(lambda: write_status(self._folder, status))
        self._awaits_trainers = status.role == "bootstrap" and not status.num_members
        if (live := self._live) is not None:
            self._show(lambda: live.update(status_table(status), refresh=True))
            return
        said, now = (status.round, status.phase), self._now_seconds()
        if said != self._shown or now - self._shown_at >= _QUIET_SECONDS:
            self._shown, self._shown_at = said, now
            self.show(status_line(status))

    def event(self, event: PeerEvent) -> None:
        """Log and show an event."""
        self._keep(lambda: append_event(self._folder, event))
        # Until there is a trainer, every round is skipped, and the status shows that no trainer is listed yet.
        if event.topic not in _QUIET_TOPICS and not (self._awaits_trainers and event.topic == "skipped"):
            self.show(event_line(event))

    def while_asking(self, ask: AskQuota) -> AskQuota:
        """Return `ask` for a terminal: the live table is not drawn while the owner types."""

        def ask_without_table(sentence: str, month_bytes: float) -> str:
            if self._live is None:
                return ask(sentence, month_bytes)
            self._show(self._live.stop)
            try:
                return ask(sentence, month_bytes)
            finally:
                self._show(self._live.start)

        return ask_without_table

    def show(self, text: str) -> None:
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
            self._console.quiet = True  # for good: what a stream could not write cannot be taken back
            discard(self._stream)
            if self._live is not None:
                self._live.stop()  # it has redirected standard error
            print_to_stderr(
                f"p2p-diloco: the output can no longer be written ({error.strerror or error}); the peer continues "
                "without it; use p2p-diloco status to watch it"
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
                self.show(f"{error}; training continues")
        else:
            self._complained = False
