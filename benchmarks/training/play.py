"""Measurement of each system with each uplink: windows with the exchange alternate with windows without it.

Islands run in the same processes and never stop between windows. So windows differ only by the exchange, and compared
windows follow each other directly.
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
from benchmarks.new_run import order_of_new_run
from benchmarks.star_network import StarNetwork
from benchmarks.training.figures import OURS, TORCHFT, IslandWindow, Row, Setting, Turn, Window
from benchmarks.training.our_run import (
    BATCH,
    CONTEXT,
    CYCLE_TRANSMISSIONS,
    TRIAL_CYCLE_SECONDS,
    RunShape,
    plan_shape,
    run_values,
    sent_bytes,
)
from benchmarks.training.uplinks import Uplink
from benchmarks.worker_pool import Word, WorkerPool
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import NetworkError, P2PDilocoError

OUR_ISLAND, TORCHFT_ISLAND = "training.our_islands:OurIsland", "training.torchft_island:TorchftIsland"
START_SECONDS = 180.0
PATIENCE_SECONDS = 120.0
LEAD_SECONDS = 0.5
"""Time between the command for a window and its start, in which traffic of the previous window is delivered."""
WINDOW_SECONDS = 12.0
"""Minimum length of a window with the exchange, rounded up to whole cycles. Windows without it are half as long."""
MOST_GATHERING_CYCLES = 8
MOST_SETTLING = 32
NUM_TRANSMISSIONS = 3
_REFRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The measurements to make.

    Attributes:
        systems: names of the systems, ours first.
        cycle_seconds: length of a cycle; None: four times its transmission.
        repeats: windows with the exchange, for each system and uplink.
        torchft_interpreter: Python of the environment with torchft.
    """

    systems: tuple[str, ...]
    uplinks: tuple[Uplink, ...]
    num_islands: int
    shape: RunShape
    repeats: int
    cycle_seconds: float | None = None
    torchft_interpreter: str = ""

    def run_plan(self, cycle_seconds: float) -> RunPlan:
        """Return the plan of a run with this cycle length.

        Raises:
            ConfigError: the codec is unknown, or there are too many fragments.
        """
        return plan_shape(self.shape, cycle_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """All result rows, and a text for each system that failed with an uplink."""

    setting: Setting
    rows: tuple[Row, ...]
    failures: tuple[str, ...]


def play_training(plan: TrainingPlan, show: Callable[[str], None]) -> Played:
    """Start, measure and end each system with each uplink.

    Args:
        show: called with progress messages.
    Raises:
        ConfigError: this machine does not permit network namespaces.
        PeerError, StateError, NetworkError: one of our processes ended, failed or timed out; all are stopped.
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
    """Return the duration of the exchange of a whole cycle alone: from the rate, or measured if there is none."""
    if uplink.bits_per_second is not None:
        return 8.0 * sent_bytes(plan.run_plan(TRIAL_CYCLE_SECONDS), plan.num_islands) / uplink.bits_per_second
    show(f"{uplink.name}: timing the exchange by itself")
    with ready_islands(plan, OURS, TRIAL_CYCLE_SECONDS, show) as islands:
        taken = [seconds for _ in range(NUM_TRANSMISSIONS) if (seconds := islands.transmit()) is not None]
    if not taken:
        raise NetworkError(
            f"none of {NUM_TRANSMISSIONS} exchanges completed within {TRIAL_CYCLE_SECONDS:g} s without training; "
            "try again when the machine is less busy"
        )
    return float(median(taken))


class Islands:
    """All islands of a system with one uplink: their worker pool, and the index of the next round."""

    def __init__(self, pool: WorkerPool, network: StarNetwork, run: RunPlan) -> None:
        self._pool, self._run, self._next = pool, run, 0
        self.network = network
        self.longest_cycle_seconds = run.rules.clock.round_seconds * run.rules.clock.num_fragments

    def ask(self, word: Mapping[str, Any], seconds: float) -> list[Word]:
        """Send a command with a start time to all islands."""
        return self._pool.ask({**word, "at": time.monotonic() + LEAD_SECONDS}, seconds + PATIENCE_SECONDS)

    def gather(self) -> None:
        """Run rounds until contents are compared and the roster lists all islands, then go to the start of a cycle."""
        fragments = self._run.manifest.rounds.fragments
        missing = "no attempt was made"
        for _ in range(MOST_GATHERING_CYCLES):
            for _ in range(fragments):
                answers = self.ask({"do": "gather", "round": self._next}, START_SECONDS)
                self._next += 1
            missing = next((answer["missing"] for answer in answers if answer["missing"]), "")
            missing = missing or self._settle()
            if not missing:
                return
        raise NetworkError(f"the islands did not find each other in {MOST_GATHERING_CYCLES} cycles: {missing}")

    def _settle(self) -> str:
        """Run rounds until contents are compared, as after every start. Return what the roster then lacks, or nothing.

        Time jumps before a round, and an island that is busy with its steps may miss it and drop off the next roster.
        """
        fragments = self._run.manifest.rounds.fragments
        for _ in range(MOST_SETTLING):
            answers = self.ask({"do": "settle", "round": self._next}, START_SECONDS)
            self._next += 1
            if all(answer["is_settled"] for answer in answers):
                self._next += -self._next % fragments
                return next((answer["missing"] for answer in answers if answer["missing"]), "")
        raise NetworkError(f"the islands did not settle in {MOST_SETTLING} rounds without an exchange")

    def transmit(self) -> float | None:
        """Exchange for a cycle without training. Return the duration, or None if the exchange was incomplete.

        Time jumps from each round to the next, and an island that misses one may drop off the roster: gather again
        before an exchange.
        """
        clock, total = self._run.rules.clock, 0.0
        self.train(_REFRESH_SECONDS)  # an island contributes only after new steps
        for _ in range(clock.num_fragments):
            answers = self.ask({"do": "transmit", "round": self._next}, clock.round_seconds)
            self._next += 1
            taken = [answer["seconds"] for answer in answers]
            total += max((seconds for seconds in taken if seconds is not None), default=0.0)
            total = math.nan if None in taken else total
        return None if math.isnan(total) else total

    def warm_up(self) -> None:
        """Exchange for an unmeasured cycle, and repeat while the roster of the next round is incomplete.

        Time jumped before the first cycle, and an island that was busy with steps may be off the roster for a round.
        """
        missing = "no attempt was made"
        for _ in range(MOST_GATHERING_CYCLES):
            self.exchange(1)
            answers = self._pool.ask({"do": "roster", "round": self._next}, PATIENCE_SECONDS)
            missing = next((answer["missing"] for answer in answers if answer["missing"]), "")
            if not missing:
                return
        raise NetworkError(f"the roster stayed incomplete for {MOST_GATHERING_CYCLES} cycles of exchange: {missing}")

    def train(self, seconds: float) -> Window:
        """Let all islands train without an exchange."""
        return _window(self.ask({"do": "train", "seconds": seconds}, seconds))

    def exchange(self, num_cycles: int) -> Window:
        """Let all islands train and exchange for `num_cycles` cycles."""
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
    """Start the islands of a system and let them find each other. They then train, with uplinks not yet limited."""
    show(f"starting {plan.num_islands} islands of {system}")
    run = plan.run_plan(cycle_seconds)
    order = {"num_islands": plan.num_islands, **order_of_new_run(run_values(plan.shape, cycle_seconds)), **more}
    network = StarNetwork(plan.num_islands)
    orders = [{**order, "address": network.address_of(place)} for place in range(plan.num_islands)]
    worker: dict[str, Any] = {"worker": OUR_ISLAND}
    if system == TORCHFT:
        worker = {"worker": TORCHFT_ISLAND, "interpreter": plan.torchft_interpreter}
    # The name must be short: the daemons' sockets are in this folder, and a socket path has at most 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="p2pd-bench-", ignore_cleanup_errors=True) as root,
        WorkerPool(system, orders, Path(root), network=network, **worker) as pool,
    ):
        words = pool.ask({"do": "start"}, START_SECONDS)
        pool.ask({"do": "meet", "words": words}, START_SECONDS)
        islands = Islands(pool, network, run)
        if system != TORCHFT:  # its islands find each other when they exchange
            islands.gather()
        yield islands


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """An uplink, and the cycle length for it."""

    plan: TrainingPlan
    uplink: Uplink
    cycle_seconds: float
    transmission_seconds: float
    show: Callable[[str], None]

    def play(self, system: str, steps_per_cycle: float) -> Row:
        """Measure one system.

        Args:
            steps_per_cycle: inner steps of one of our islands, or 0 if unknown; torchft counts steps, not seconds.
        """
        more = {"sync_every": max(round(steps_per_cycle), 1)} if system == TORCHFT else {}
        with ready_islands(self.plan, system, self.cycle_seconds, self.show, **more) as islands:
            islands.network.set_uplinks(self.uplink.bits_per_second)
            if system == TORCHFT and self.uplink.bits_per_second is not None:
                # A ring all-reduce sends almost two float32 vectors, and the cycle waits for them.
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
        # torchft's cycle has no fixed length.
        seconds = fmean(island.seconds for turn in turns for island in turn.exchanging) / num_cycles
        return replace(row, cycle_seconds=seconds)
