"""Plays the demo's timeline: starts peers, kills some, waits for the others to finish, and notes what happened when."""

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
"""Kills wait until they can be survived, but no longer than this share of the time."""


class Clock(Protocol):
    """Time and waiting."""

    def time(self) -> float:
        """Return Unix seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that the demo did; `time` in Unix seconds."""

    time: float
    text: str


@dataclass(slots=True, kw_only=True)
class DemoStory:
    """What happened; filled while the demo runs.

    Attributes:
        marks: in order.
        started: when each process was started, Unix seconds.
        killed: when each of the killed was, Unix seconds.
        exit_codes: of those that ended by themselves.
    """

    marks: list[Mark] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    killed: dict[str, float] = field(default_factory=dict)
    exit_codes: dict[str, int] = field(default_factory=dict)


class DemoSwarm:
    """One demo. `run` returns its story; the folders of the children hold the rest."""

    def __init__(
        self, plan: DemoPlan, *, children: Children, clock: Clock, say: Callable[[str], None], run_files: RunFiles
    ) -> None:
        self._plan = plan
        self._children = children
        self._clock = clock
        self._say = say
        self._run_files = run_files
        self._story = DemoStory()
        self._last_line = clock.time()

    def run(self) -> DemoStory:
        """Play the whole timeline.

        Raises:
            P2PDilocoError: the bootstrap or a peer ended before its time; the text holds its last words.
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
        self._mark(f"round {plan.last_round} is over; the peers agree on the last bytes")
        self._wait_until(lambda: not self._living(), plan.end_at + FINISH_SECONDS)
        self._check_all()
        for name in self._living():
            self._say(f"{name} did not finish within {FINISH_SECONDS:g} s")
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
        self._say(f"{now - self._plan.clock_start:7.1f} s  {text}")

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
        """Note the end of a process; one that ended before the last round ends the demo, with its last words."""
        code = self._children.exit_code(name)
        if code is None or name in self._story.killed or name in self._story.exit_codes:
            return
        self._story.exit_codes[name] = code
        if self._clock.time() < self._plan.clock_start + self._plan.end_at:
            raise P2PDilocoError(f"{name} ended with exit code {code} before its time; {self._last_words(name)}")

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
        # All hold the same anchor; whoever measured last says how good it is.
        loss = min(losses) if losses else None
        ready = sum(status.ready for status in seen)
        self._say(
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
        """Say whether the members of the first roster live on without it, and the late one has found them."""
        return all(self._is_ready(name) for name in self._volunteers())

    def _last_words(self, name: str) -> str:
        path = self._children.folder(name) / OUTPUT_FILE
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()]
        return f"its last words: {lines[-1][:400]}" if lines else "it said nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Where the run files lie, each with its key beside it."""

    swarm: Path
    lone: Path


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return []
