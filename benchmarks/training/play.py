"""Plays each system on each line: windows with the exchange between windows without it, in the same processes.

Islands never stop between windows. What differs between two of them is the exchange alone, and windows that are
compared share a minute of the machine.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.training.figures import OURS, TORCHFT, IslandWindow, Row, Setting, Turn, Window
from benchmarks.training.our_run import (
    BATCH,
    CONTEXT,
    CYCLE_TRANSMISSIONS,
    TRIAL_CYCLE_SECONDS,
    RunShape,
    draft_run,
    run_order,
    sent_bytes,
)
from benchmarks.training.star_network import StarNetwork
from benchmarks.training.uplinks import Uplink
from benchmarks.worker_pool import Word, WorkerPool
from p2p_diloco.errors import NetworkError, P2PDilocoError
from p2p_diloco.peer.run_plan import RunPlan, plan_run
from p2p_diloco.signing import SigningKey

WORKER = ("-m", "benchmarks.training.worker")
START_SECONDS = 180.0
PATIENCE_SECONDS = 120.0
LEAD_SECONDS = 0.5
"""Between the word to begin a window and its begin: what the one before left on the line has passed by then."""
WINDOW_SECONDS = 12.0
"""A window with the exchange lasts at least so long, in whole cycles; one without it half as long as that."""
MOST_GATHERING_CYCLES = 8
MOST_SETTLING = 32
NUM_TRANSMISSIONS = 3
_REFRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The measurements to make.

    Attributes:
        systems: by name, ours the first.
        cycle_seconds: None: four times its own transmission.
        repeats: windows with the exchange, of each system on each line.
        torchft_interpreter: Python of the environment in which torchft is.
    """

    systems: tuple[str, ...]
    uplinks: tuple[Uplink, ...]
    num_islands: int
    shape: RunShape
    repeats: int
    cycle_seconds: float | None = None
    torchft_interpreter: str = ""

    def run_plan(self, cycle_seconds: float) -> RunPlan:
        """Return what a run of such cycles is.

        Raises:
            ConfigError: no such codec, or parts that the model has not.
        """
        nobody = SigningKey(bytes(32))
        return plan_run(draft_run(self.shape, cycle_seconds=cycle_seconds, organiser=nobody, now_seconds=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """All rows that came out, and a sentence for each system that failed on a line."""

    setting: Setting
    rows: tuple[Row, ...]
    failures: tuple[str, ...]


def play_training(plan: TrainingPlan, show: Callable[[str], None]) -> Played:
    """Start, measure and end each system on each line.

    Args:
        say: told how it goes on.
    Raises:
        ConfigError: this machine lets nobody make networks.
        PeerError, StateError, NetworkError: a process of ours ended, failed or fell silent; none is left behind.
    """
    setting = _setting(plan)  # before anything adds to the machine's load
    rows: list[Row] = []
    failures: list[str] = []
    for uplink in plan.uplinks:
        transmission = _transmission_seconds(plan, uplink, show)
        cycle = plan.cycle_seconds if plan.cycle_seconds is not None else CYCLE_TRANSMISSIONS * transmission
        show(f"{uplink.name}: a transmission takes {transmission:.2f} s, a cycle {cycle:.2f} s")
        stage = _Stage(plan=plan, uplink=uplink, cycle_seconds=cycle, transmission_seconds=transmission, show=show)
        steps = 0.0
        for system in plan.systems:
            try:
                row = stage.play(system, steps)
            except P2PDilocoError as error:
                if system == OURS:
                    raise
                failures.append(f"{system} at {uplink.name}: {error}")
                show(failures[-1])
                continue
            steps = row.steps_per_cycle if system == OURS else steps
            kept = row.speed_kept
            show(f"{uplink.name}, {system}: speed kept {kept.middle:.1%}, participation {row.participation:.1%}")
            rows.append(row)
    return Played(setting=setting, rows=tuple(rows), failures=tuple(failures))


def _setting(plan: TrainingPlan) -> Setting:
    run = plan.run_plan(TRIAL_CYCLE_SECONDS)
    return Setting(
        islands=plan.num_islands,
        parameters=run.num_parameters,
        model=plan.shape.model,
        batch=BATCH,
        context=CONTEXT,
        codec=plan.shape.codec,
        fragments=plan.shape.fragments,
        spans_per_fragment=plan.shape.spans_per_fragment,
        repeats=plan.repeats,
        machine=describe_machine(),
    )


def _transmission_seconds(plan: TrainingPlan, uplink: Uplink, show: Callable[[str], None]) -> float:
    """Return how long the exchange of a whole cycle takes by itself: by the rate, or measured where there is none."""
    if uplink.bits_per_second is not None:
        return 8.0 * sent_bytes(plan.run_plan(TRIAL_CYCLE_SECONDS), plan.num_islands) / uplink.bits_per_second
    show(f"{uplink.name}: timing the exchange by itself")
    with ready_islands(plan, OURS, TRIAL_CYCLE_SECONDS, show) as islands:
        taken = [seconds for _ in range(NUM_TRANSMISSIONS) if (seconds := islands.transmit()) is not None]
    if not taken:
        raise NetworkError(
            f"none of {NUM_TRANSMISSIONS} exchanges was whole within {TRIAL_CYCLE_SECONDS:g} s while nobody trained; "
            "try again on a machine with less to do"
        )
    return float(median(taken))


class Islands:
    """All islands of a system on a line: their pool, and the round that comes next."""

    def __init__(self, pool: WorkerPool, network: StarNetwork, run: RunPlan) -> None:
        self._pool, self._run, self._next = pool, run, 0
        self.network = network
        self.longest_cycle_seconds = run.rules.clock.round_seconds * run.rules.clock.num_fragments

    def ask(self, word: Mapping[str, Any], seconds: float) -> list[Word]:
        """Send an order with a moment to begin at."""
        return self._pool.ask({**word, "at": time.monotonic() + LEAD_SECONDS}, seconds + PATIENCE_SECONDS)

    def gather(self) -> None:
        """Play rounds until contents are compared and the roster still lists everybody; go on to a cycle's begin."""
        fragments = self._run.manifest.rounds.fragments
        missing = "nothing was tried"
        for _ in range(MOST_GATHERING_CYCLES):
            for _ in range(fragments):
                answers = self.ask({"do": "gather", "round": self._next}, START_SECONDS)
                self._next += 1
            missing = next((answer["missing"] for answer in answers if answer["missing"]), "")
            missing = missing or self._settle()
            if not missing:
                return
        raise NetworkError(f"the islands did not find together in {MOST_GATHERING_CYCLES} cycles: {missing}")

    def _settle(self) -> str:
        """Have contents compared as after every start; say what the roster lacks then, or nothing.

        Time jumps before a round, and who is not heard in time, for it is busy with its steps, is off the next roster.
        """
        fragments = self._run.manifest.rounds.fragments
        for _ in range(MOST_SETTLING):
            answers = self.ask({"do": "settle", "round": self._next}, START_SECONDS)
            self._next += 1
            if all(answer["is_settled"] for answer in answers):
                self._next += -self._next % fragments
                return next((answer["missing"] for answer in answers if answer["missing"]), "")
        raise NetworkError(f"the islands did not come to rest in {MOST_SETTLING} rounds without an exchange")

    def transmit(self) -> float | None:
        """Exchange a cycle while nobody trains; return how long it took, None if it was not whole.

        Time jumps from each round to the next one, and who is not heard in between may be off the roster: gather again
        before an exchange.
        """
        clock, total = self._run.rules.clock, 0.0
        self.train(_REFRESH_SECONDS)  # nobody contributes who has nothing new
        for _ in range(clock.num_fragments):
            answers = self.ask({"do": "transmit", "round": self._next}, clock.round_seconds)
            self._next += 1
            taken = [answer["seconds"] for answer in answers]
            total += max((seconds for seconds in taken if seconds is not None), default=0.0)
            total = math.nan if None in taken else total
        return None if math.isnan(total) else total

    def warm_up(self) -> None:
        """Exchange a cycle that does not count, and another one while the roster of the next round lacks somebody.

        Time jumped before the first, and who was not heard in time, busy with its steps, is off for a round.
        """
        missing = "nothing was tried"
        for _ in range(MOST_GATHERING_CYCLES):
            self.exchange(1)
            answers = self._pool.ask({"do": "roster", "round": self._next}, PATIENCE_SECONDS)
            missing = next((answer["missing"] for answer in answers if answer["missing"]), "")
            if not missing:
                return
        raise NetworkError(f"in {MOST_GATHERING_CYCLES} cycles with the exchange {missing}")

    def train(self, seconds: float) -> Window:
        """Have all train without an exchange."""
        return _window(self.ask({"do": "train", "seconds": seconds}, seconds))

    def exchange(self, num_cycles: int) -> Window:
        """Have all train and exchange so many cycles."""
        clock = self._run.rules.clock
        num_rounds = num_cycles * clock.num_fragments
        word = {"do": "exchange", "round": self._next, "num_rounds": num_rounds, "num_cycles": num_cycles}
        self._next += num_rounds
        return _window(self.ask(word, num_cycles * self.longest_cycle_seconds))


def _window(answers: Sequence[Word]) -> Window:
    return tuple(map(IslandWindow.of_answer, answers))


@contextmanager
def ready_islands(
    plan: TrainingPlan, system: str, cycle_seconds: float, show: Callable[[str], None], **more: Any
) -> Iterator[Islands]:
    """Start a system's islands and let them find each other; they train then, on a line that is not thin yet."""
    show(f"starting {plan.num_islands} islands of {system}")
    run = plan.run_plan(cycle_seconds)
    order = {"num_islands": plan.num_islands, **run_order(plan.shape, cycle_seconds=cycle_seconds), **more}
    network = StarNetwork(plan.num_islands)
    orders = [{**order, "address": network.address_of(place)} for place in range(plan.num_islands)]
    python = {"interpreter": plan.torchft_interpreter} if system == TORCHFT else {}
    # The short name matters: sockets of the daemons lie within, and their paths may have 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="p2pd-bench-", ignore_cleanup_errors=True) as root,
        WorkerPool(system, orders, Path(root), command=WORKER, network=network, **python) as pool,
    ):
        words = pool.ask({"do": "start"}, START_SECONDS)
        pool.ask({"do": "meet", "words": words}, START_SECONDS)
        islands = Islands(pool, network, run)
        if system != TORCHFT:  # its islands find each other when they exchange
            islands.gather()
        yield islands


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A line, and the cycle that goes with it."""

    plan: TrainingPlan
    uplink: Uplink
    cycle_seconds: float
    transmission_seconds: float
    show: Callable[[str], None]

    def play(self, system: str, steps_per_cycle: float) -> Row:
        """Measure one system.

        Args:
            steps_per_cycle: of an island of ours, where that is known; who counts steps instead of seconds goes by it.
        """
        more = {"sync_every": max(round(steps_per_cycle), 1)} if system == TORCHFT else {}
        with ready_islands(self.plan, system, self.cycle_seconds, self.show, **more) as islands:
            islands.network.set_uplinks(self.uplink.bits_per_second)
            if system == TORCHFT and self.uplink.bits_per_second is not None:
                # A ring sends almost two float32 vectors, and its cycle waits for them.
                bits = 64.0 * self.plan.run_plan(self.cycle_seconds).num_parameters
                islands.longest_cycle_seconds += 2.0 * bits / self.uplink.bits_per_second
            return self._row(system, tuple(self._turns(system, islands)))

    def _turns(self, system: str, islands: Islands) -> Iterator[Turn]:
        num_cycles = math.ceil(WINDOW_SECONDS / self.cycle_seconds)
        alone_seconds = num_cycles * self.cycle_seconds / 2
        islands.warm_up()
        before = islands.train(alone_seconds)
        for repeat in range(self.plan.repeats):
            exchanging = islands.exchange(num_cycles)
            after = islands.train(alone_seconds)
            turn = Turn(before=before, exchanging=exchanging, after=after)
            self.show(f"{self.uplink.name}, {system}, {repeat + 1} of {self.plan.repeats}: {turn.speed_kept:.1%}")
            yield turn
            before = after

    def _row(self, system: str, turns: tuple[Turn, ...]) -> Row:
        num_cycles = math.ceil(WINDOW_SECONDS / self.cycle_seconds)
        steps = fmean(island.steps for turn in turns for island in turn.exchanging) / num_cycles
        row = Row(
            system=system,
            uplink=self.uplink.name,
            cycle_seconds=self.cycle_seconds,
            transmission_seconds=self.transmission_seconds,
            steps_per_cycle=steps,
            turns=turns,
        )
        if system != TORCHFT:
            return row
        # Its cycle is as long as it takes.
        seconds = fmean(island.seconds for turn in turns for island in turn.exchanging) / num_cycles
        return replace(row, cycle_seconds=seconds)
