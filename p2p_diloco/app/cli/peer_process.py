"""Run one peer as a process: event loop, signals, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from p2p_diloco.app.cli.options import PeerOptions, StartOptions
from p2p_diloco.app.cli.output import print_to_stderr
from p2p_diloco.app.cli.page import page_beside
from p2p_diloco.app.cli.peer_output import PeerOutput, QuotaQuestion, line_from_terminal
from p2p_diloco.app.cli.ranks import Place, end_with_parent, follow, island_of_ranks
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import StateError
from p2p_diloco.session.peer_plan import PeerPlan
from p2p_diloco.storage.export_folder import ExportPlan

if TYPE_CHECKING:
    from p2p_diloco.island.island import Island
    from p2p_diloco.session.ending import StopRequest

STOPPED = 130
_HARD_STOP_SECONDS = 10.0
LOST_SECONDS = 10.0
"""Time for leaving after a rank was lost."""
SAME_SECONDS = 1.0


def run_trainer(plan: PeerPlan, options: PeerOptions, place: Place | None = None) -> int:
    """Run a peer that trains the model of the manifest, until interrupted or its last round; return the exit code.

    Args:
        place: the place of this process among the ranks of an island, of which only rank 0 has a peer; None: this
            process is the island.
    Raises:
        P2PDilocoError: the peer cannot go on.
    """
    _prepare(plan.settings, options, is_silent=place is not None and place.rank > 0)
    from p2p_diloco.app.training.built_in import BuiltInTraining

    if place is None:
        training = BuiltInTraining(evaluate_seconds=options.evaluate_seconds, founds=plan.founding is not None)
        return _run_to_end(replace(plan, training=training), options)
    with island_of_ranks(place, plan.settings) as (island, settings):
        if not island.leads:
            return follow(island, settings)
        training = BuiltInTraining(
            evaluate_seconds=options.evaluate_seconds, founds=plan.founding is not None, island=island
        )
        code = _run_to_end(replace(plan, settings=settings, training=training), options, island)
        if island.lost is not None:
            raise island.lost
        return code


def run_bootstrap_peer(plan: PeerPlan, options: StartOptions) -> int:
    """Run a peer that does not train; see `run_trainer`."""
    _prepare(plan.settings, options)
    return _run_to_end(plan, options)


def run_archivist(plan: PeerPlan, exports: ExportPlan, options: StartOptions) -> int:
    """Run a peer that exports the run's model; see `run_trainer`."""
    _prepare(plan.settings, options)
    from p2p_diloco.app.models.archivist import Archivist

    return _run_to_end(replace(plan, training=Archivist(exports)), options)


def _prepare(settings: PeerSettings, options: StartOptions, *, is_silent: bool = False) -> None:
    """Set process-wide options before torch is imported."""
    if options.with_parent:
        end_with_parent()
    check_folder(settings.state_directory)
    if sys.stderr.isatty() and not is_silent:
        # Importing torch takes seconds. On standard output a founder's first line must be the join command.
        print_to_stderr("starting …")
    if settings.threads is not None:
        # Read once, when torch is imported.
        os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    from p2p_diloco.memory.heap import share_one_arena

    share_one_arena()
    wake_politely()


def _run_to_end(plan: PeerPlan, options: StartOptions, island: Island | None = None) -> int:
    import uvloop

    from p2p_diloco.session.start import nothing_left_if_refused

    # A thread writes the status and the events: a slow disk must not block the event loop.
    with nothing_left_if_refused(plan), ThreadPoolExecutor(1, thread_name_prefix="files") as files:
        output = PeerOutput(
            plan.settings.state_directory, announces_invite=plan.founding is not None, soon=files.submit
        )
        with output, page_beside(plan.settings.state_directory if options.page else None, output.show):
            return uvloop.run(_run(plan, output, island))


def wake_politely() -> bool:
    """Use batch scheduling for this thread and everything it starts; return whether that is active.

    By default Linux preempts a running thread when another one wakes. On a slow connection, every packet thus wakes the
    libp2p daemon in the middle of an inner step, 11,000 times per cycle of ten million parameters. As a batch process,
    the daemon runs a few milliseconds later and finds several packets: it needs a third of the CPU time and does not
    slow steps down. On an idle core nothing changes.

    Call this before starting threads or children, which inherit it. A policy set by the user (`chrt`) is kept.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        is_others = os.sched_getscheduler(0) == os.SCHED_OTHER
        if is_others:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # forbidden in this container, or missing in the C library
        return False
    return is_others


def check_folder(folder: Path) -> None:
    """Refuse a state directory that cannot be written, before the slow part of the start.

    A missing directory is not created: a command that is refused later leaves no files.

    Raises:
        StateError: the directory cannot be written.
    """
    if folder.is_file():
        raise StateError(f"the state directory {folder} is a file; choose another place with --state-directory")
    present = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    probe = present / f".probe.{secrets.token_hex(4)}"
    try:
        probe.write_bytes(bytes(4096))
    except OSError as error:
        raise StateError(
            f"cannot write to the state directory {folder}: {error.strerror}; free some space, or choose another "
            "place with --state-directory"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


async def _run(plan: PeerPlan, output: PeerOutput, island: Island | None) -> int:
    from p2p_diloco.session.ending import StopRequest
    from p2p_diloco.session.start import run_peer

    stop = StopRequest()
    loop = asyncio.get_running_loop()
    interrupts = Interrupts(
        stop,
        show=output.show,
        exit_within=lambda seconds: loop.call_later(seconds, os._exit, STOPPED),
        # torchrun passes on a Ctrl-C that the terminal has already sent to this process.
        now=loop.time if island is not None else None,
    )
    if island is not None:

        def leave() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(partial(stop.leave, within_seconds=LOST_SECONDS))

        island.when_lost(leave)
    question = QuotaQuestion(output.show, lambda: stop.is_leaving, line_from_terminal())
    plan = replace(plan, ask_quota=output.while_asking(question.ask))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupts.interrupt)
    await run_peer(plan, output, stop)
    return interrupts.exit_code


class Interrupts:
    """Ctrl-C once: announce the leave, save, exit. Twice: stop now."""

    def __init__(
        self,
        stop: StopRequest,
        *,
        show: Callable[[str], None],
        exit_within: Callable[[float], object],
        now: Callable[[], float] | None = None,
    ) -> None:
        """Start with no interrupts counted.

        Args:
            stop: the peer to stop.
            show: prints a line.
            exit_within: exits this process after the given number of seconds, even if something hangs.
            now: returns seconds, if two interrupts within `SAME_SECONDS` may be one; None: each counts.
        """
        self._count = 0
        self._now = now
        self._counted_at = float("-inf")
        self._stop = stop
        self._show = show
        self._exit_within = exit_within

    @property
    def exit_code(self) -> int:
        """Exit code after the interrupts so far."""
        return STOPPED if self._count > 1 else 0

    def interrupt(self) -> None:
        if self._now is not None:
            before, self._counted_at = self._counted_at, self._now()
            if self._counted_at - before < SAME_SECONDS:
                return
        self._count += 1
        if self._count == 1:
            self._show("leaving after this round; Ctrl-C again stops at once")
            self._stop.leave()
        elif self._count == 2:
            self._show("stopping")
            self._stop.stop_now()
            self._exit_within(_HARD_STOP_SECONDS)
        else:
            self._exit_within(0.0)
