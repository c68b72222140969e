"""A running peer at the terminal: its table or lines, its files for other programs, and its question for a quota."""

from __future__ import annotations

import errno
import math
import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live

from p2p_diloco.app.cli.output import discard, print_to_stderr
from p2p_diloco.app.cli.status_table import StatusTable, line_key, shows_table, status_line
from p2p_diloco.app.cli.summary import Summary
from p2p_diloco.config.settings import NO_LIMIT, PeerSettings
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.session.peer_plan import AskQuota
from p2p_diloco.status.event_log import PeerEvent, event_line
from p2p_diloco.status.peer_files import PeerFiles
from p2p_diloco.status.status_file import PeerStatus
from p2p_diloco.wording import join_line, plain_words

# The status line already contains these.
_QUIET_TOPICS = frozenset({"round", "evaluation"})
_QUIET_SECONDS = 30.0
LOOK_SECONDS = 0.2
SPARE = 1.1
"""The suggested quota, as a multiple of what the run needs at full rate, if that is modest."""
MOST_SUGGESTED_GB = 500.0
"""Largest quota that Enter grants, so that nobody gives away a home's allowance for the month with one key."""


class _OutputConsole(Console):
    """A console that survives a closed pipe: the base class would exit the process."""

    def on_broken_pipe(self) -> None:
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
        self._folder, self._files = folder, PeerFiles(folder)
        self._summary = Summary()
        self._stream = stream or sys.stdout
        self._console = _OutputConsole(file=self._stream, soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False) if shows_table(self._console) else None
        self._waiting: list[str] | None = [] if announces_invite else None
        self._now_seconds = now_seconds
        self._soon = soon
        self._shown: tuple[object, ...] | None = None
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
        for line in self._summary.lines(self._folder.absolute()) if kind is None else ():
            self._print_now(line)

    def listening(self, invite: str, *, own_model: bool) -> None:
        """Print the whole join command, once, as the first line."""
        self._print_now(join_line(invite, own_model=own_model))
        self._release()

    def status(self, status: PeerStatus) -> None:
        self._keep(lambda: self._files.status(status))
        self._summary.status(status)
        self._awaits_trainers = status.role == "bootstrap" and not status.num_members
        if (live := self._live) is not None:
            self._show(lambda: live.update(StatusTable(status, self._console.height), refresh=True))
            return
        state, now = line_key(status), self._now_seconds()
        is_due = status.role != "bootstrap" and now - self._shown_at >= _QUIET_SECONDS
        if state != self._shown or is_due:
            self._shown, self._shown_at = state, now
            self.show(status_line(status))

    def event(self, event: PeerEvent) -> None:
        self._keep(lambda: self._files.event(event))
        # Until there is a trainer, every round is skipped, and the status shows that no trainer is listed yet.
        if event.topic not in _QUIET_TOPICS and not (self._awaits_trainers and event.topic == "skipped"):
            self.show(plain_words(event_line(event)))

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


class QuotaQuestion:
    """Asks with the terminal's own input, and gives up when the peer is asked to stop.

    Args:
        show: prints a line.
        has_stopped: returns whether the peer was asked to stop.
        read_line: returns a line of input, or None while there is none; None instead if there is no terminal.
    """

    def __init__(
        self,
        show: Callable[[str], None],
        has_stopped: Callable[[], bool],
        read_line: Callable[[], str | None] | None,
    ) -> None:
        self._show = show
        self._has_stopped = has_stopped
        self._read_line = read_line

    def ask(self, sentence: str, month_bytes: float) -> str:
        """Return the answer as a text for `monthly_quota`; empty if there was none.

        Args:
            sentence: the traffic of the run.
            month_bytes: bytes that it needs in a month at full rate.
        """
        if self._read_line is None:
            self._show(f"{sentence}; limit a month with --monthly-quota 500GB")
            return ""
        default = suggest_quota(month_bytes)
        self._show(f"{sentence}. How much may this machine send and receive in a calendar month?")
        lasts = MOST_SUGGESTED_GB * 1e9 / max(month_bytes, 1.0)
        pause = f", which lasts {30 * lasts:.0f} days; then it pauses until the next month" if lasts < 1.0 else ""
        self._show(f"an amount such as 500GB, {NO_LIMIT} for no limit, or Enter for {default}{pause}:")
        while True:
            line = self._wait_for_line()
            if line is None:
                return ""
            answer = line.strip() or default
            try:
                PeerSettings().with_limits({"monthly_quota": answer}, "the answer")
            except ConfigError as error:
                self._show(f"{error}:")
                continue
            return answer

    def _wait_for_line(self) -> str | None:
        assert self._read_line is not None
        while not self._has_stopped():
            line = self._read_line()
            if line is not None:
                return line
        return None


def suggest_quota(month_bytes: float) -> str:
    """Return a round amount above what the run needs, such as 200GB; at least 1GB and at most what a home can spare."""
    gigabytes = min(max(SPARE * month_bytes / 1e9, 1.0), MOST_SUGGESTED_GB)
    unit = 10.0 ** (math.floor(math.log10(gigabytes)) - 1)
    return f"{math.ceil(gigabytes / unit) * unit:.6g}GB" if gigabytes > 10.0 else f"{math.ceil(gigabytes)}GB"


def line_from_terminal() -> Callable[[], str | None] | None:
    """Return a function that reads a line if one is there, after a short wait; None if nobody sits at a terminal."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        return None

    def read_line() -> str | None:
        is_ready, _, _ = select.select([sys.stdin], [], [], LOOK_SECONDS)
        return sys.stdin.readline() if is_ready else None

    return read_line
