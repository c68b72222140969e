"""Run the demo's timeline: start peers, kill some, wait for the others to finish, and record what happened when."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from p2p_diloco.cli.child_processes import OUTPUT_FILE, Children
from p2p_diloco.cli.demo_plan import BOOTSTRAP, LONE, DemoPlan
from p2p_diloco.config.invite import SCHEME
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.rate import format_part
from p2p_diloco.status.status_file import PeerStatus, read_status
from p2p_diloco.wording import format_count, format_loss

START_SECONDS = 90.0
FINISH_SECONDS = 60.0
_STEP_SECONDS = 0.25
_LINE_SECONDS = 5.0
_MAX_WAIT_SHARE = 0.9
"""A kill waits until the swarm can survive it, but no longer than this share of the demo."""


class Clock(Protocol):
    """The time and a sleep function."""

    def time(self) -> float:
        """Return Unix seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One action of the demo; `time` in Unix seconds."""

    time: float
    text: str


@dataclass(slots=True, kw_only=True)
class DemoStory:
    """The story of a demo; filled in while it runs.

    Attributes:
        marks: the demo's actions, in order.
        started: start time of each process, Unix seconds.
        killed: kill time of each killed process, Unix seconds.
        exit_codes: exit codes of the processes that exited by themselves.
    """

    marks: list[Mark] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    killed: dict[str, float] = field(default_factory=dict)
    exit_codes: dict[str, int] = field(default_factory=dict)


class DemoSwarm:
    """One demo. `run` returns its story; everything else is in the children's folders."""

    def __init__(
        self, plan: DemoPlan, *, children: Children, clock: Clock, show: Callable[[str], None], run_files: RunFiles
    ) -> None:
        self._plan = plan
        self._children = children
        self._clock = clock
        self._show = show
        self._run_files = run_files
        self._story = DemoStory()
        self._last_line = clock.time()

    def run(self) -> DemoStory:
        """Run the whole timeline.

        Raises:
            P2PDilocoError: the bootstrap or a peer exited too early; the text includes its last line of output.
        """
        plan = self._plan
        self._start(BOOTSTRAP, ["bootstrap", str(self._run_files.swarm)])
        invite = self._wait_for_invite()
        if plan.options.with_lone:
            self._start(LONE, ["join", "--found", str(self._run_files.lone)])
        for name in plan.early:
            self._start(name, ["join", invite])
        self._wait_until(lambda: False, plan.late_at)
        self._start(plan.late, ["join", invite])
        self._wait_until(lambda: False, plan.kill_at)
        self._wait_until(self._victim_can_be_spared, _MAX_WAIT_SHARE * plan.end_at)
        self._kill(plan.victim)
        self._wait_until(lambda: False, plan.bootstrap_kill_at)
        self._wait_until(self._bootstrap_can_be_spared, _MAX_WAIT_SHARE * plan.end_at)
        self._kill(BOOTSTRAP)
        self._wait_until(lambda: False, plan.end_at)
        self._mark(f"round {plan.last_round} is over; waiting for the peers to agree on the final bytes")
        self._wait_until(lambda: not self._living(), plan.end_at + FINISH_SECONDS)
        self._check_all()
        for name in self._living():
            self._show(f"{name} did not finish within {FINISH_SECONDS:g} s")
        return self._story

    def _start(self, name: str, words: Sequence[str]) -> None:
        plan = self._plan
        arguments = [
            *words,
            *("--state-directory", str(self._children.folder(name))),
            *("--host-maddrs", "/ip4/127.0.0.1/tcp/0"),
            *("--until-round", str(plan.last_round)),
            *("--evaluate-seconds", f"{plan.evaluate_seconds:g}"),
            *("--threads", "1"),
            *("--device", "cpu"),
            "--with-parent",
        ]
        if plan.options.data is not None and name != BOOTSTRAP:
            arguments += ["--data", plan.options.data]
        self._children.start(name, arguments)
        self._story.started[name] = self._clock.time()
        self._mark(f"{name} starts" + (", late" if name == plan.late else ""))

    def _kill(self, name: str) -> None:
        if self._children.exit_code(name) is None:
            self._children.kill(name)
            self._story.killed[name] = self._clock.time()
            self._mark(f"{name} is killed (kill -9)")

    def _mark(self, text: str) -> None:
        now = self._clock.time()
        self._story.marks.append(Mark(time=now, text=text))
        self._show(f"{now - self._plan.clock_start:7.1f} s  {text}")

    def _wait_for_invite(self) -> str:
        deadline = self._clock.time() + START_SECONDS
        path = self._children.folder(BOOTSTRAP) / OUTPUT_FILE
        while self._clock.time() < deadline:
            first, complete, _ = path.read_text(encoding="utf-8", errors="replace").partition("\n")
            words = _words(first) if complete else []
            if words[-2:-1] == ["join"] and words[-1].startswith(f"{SCHEME}://"):
                return words[-1]
            self._check(BOOTSTRAP)
            self._clock.sleep(_STEP_SECONDS)
        raise P2PDilocoError(
            f"the bootstrap printed no join command within {START_SECONDS:g} s; {self._last_words(BOOTSTRAP)}"
        )

    def _wait_until(self, is_done: Callable[[], bool], at: float) -> None:
        """Wait until `is_done`, or until `at` seconds after round 0 began."""
        deadline = self._plan.clock_start + at
        while self._clock.time() < deadline and not is_done():
            self._check_all()
            self._print_progress()
            self._clock.sleep(_STEP_SECONDS)

    def _check_all(self) -> None:
        for name in self._story.started:
            self._check(name)

    def _check(self, name: str) -> None:
        """Record the exit of a process; one that exits before the last round fails the demo."""
        code = self._children.exit_code(name)
        if code is None or name in self._story.killed or name in self._story.exit_codes:
            return
        self._story.exit_codes[name] = code
        if self._clock.time() < self._plan.clock_start + self._plan.end_at:
            raise P2PDilocoError(f"{name} exited with code {code} before the last round; {self._last_words(name)}")

    def _print_progress(self) -> None:
        now = self._clock.time()
        if now - self._last_line < _LINE_SECONDS or now >= self._plan.clock_start + self._plan.end_at:
            return
        self._last_line = now
        seen = [status for name in self._volunteers() if (status := self._status(name)) is not None]
        if not seen:
            return
        rate = sum(status.tokens_per_second for status in seen)
        losses = [status.anchor_loss for status in seen if status.anchor_loss is not None]
        # All peers hold the same anchor; the lowest loss is the latest measurement.
        loss = min(losses) if losses else None
        ready = sum(status.ready for status in seen)
        self._show(
            f"{now - self._plan.clock_start:7.1f} s  round {max(status.round for status in seen)} of "
            f"{self._plan.last_round}, {format_part(ready, len(seen), 'volunteer')} ready, shared model "
            f"{format_loss(loss)}, "
            f"{format_count(rate)} tokens/s"
        )

    def _living(self) -> list[str]:
        names = (name for name in self._story.started if name != BOOTSTRAP)
        return [name for name in names if self._children.exit_code(name) is None]

    def _volunteers(self) -> list[str]:
        return [name for name in self._living() if name != LONE]

    def _status(self, name: str) -> PeerStatus | None:
        return read_status(self._children.folder(name))

    def _is_ready(self, name: str) -> bool:
        status = self._status(name)
        return status is not None and status.ready

    def _victim_can_be_spared(self) -> bool:
        return self._is_ready(self._plan.victim) and sum(map(self._is_ready, self._volunteers())) > 1

    def _bootstrap_can_be_spared(self) -> bool:
        """Return whether the swarm can go on without the bootstrap, and the late peer has found it."""
        return all(self._is_ready(name) for name in self._volunteers())

    def _last_words(self, name: str) -> str:
        path = self._children.folder(name) / OUTPUT_FILE
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()]
        return f"its last line: {lines[-1][:400]}" if lines else "it printed nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Paths of the run files; each has its key next to it."""

    swarm: Path
    lone: Path


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return []
