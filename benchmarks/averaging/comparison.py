"""Comparison of averaging systems: each exchanges once per repeat, in turn, and each turn is measured.

All turns are measured in the same way and from outside: by the monotonic clock, the kernel's clocks of all processes,
and the counter of the network interface. The work before an exchange (filling vectors, finding a group) and after it
(hashing results) is done by all systems and measured for none.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.averaging.figures import Comparison, Turn
from benchmarks.averaging.our_run import our_orders
from benchmarks.averaging.systems import GLOO, HIVEMIND_FLOAT16, HIVEMIND_FLOAT32, OURS, can_all_stay
from benchmarks.meters import cpu_seconds, forget_peaks, loopback_bytes, peak_rss_bytes
from benchmarks.worker_pool import WorkerPool
from p2p_diloco.errors import NetworkError, P2PDilocoError

WORKERS = {
    OURS: "averaging.our_peer:OurPeer",
    HIVEMIND_FLOAT32: "averaging.hivemind_peer:HivemindPeer",
    HIVEMIND_FLOAT16: "averaging.hivemind_peer:HivemindPeer",
    GLOO: "averaging.gloo_peer:GlooPeer",
}
"""Peers of the systems. Between commands they must use almost no CPU."""
START_SECONDS = 180.0
PREPARE_SECONDS = 300.0
HASH_SECONDS = 120.0
LEAD_SECONDS = 0.1
"""Time between sending a command and the start that it names; all workers must have received it by then."""
MOST_TRIALS = 16
MOST_SETTLING = 32
MOST_FAILURES = 3
"""Maximum number of failures of another system in a run; hivemind sometimes finds no group on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """The measurements to make.

    Attributes:
        systems: names of the systems, ours first.
        codec: codec of p2p_diloco; the other systems ignore it.
        spans: pieces in which p2p_diloco exchanges the vector.
        repeats: number of measured turns of each system.
    """

    systems: tuple[str, ...]
    num_peers: int
    parameters: int
    codec: str
    spans: int
    repeats: int

    @property
    def turn_seconds(self) -> float:
        """Timeout of a turn; a hundred times what it should take on one core."""
        return 60.0 + 1e-6 * self.parameters * self.num_peers


def run_comparison(plan: ComparisonPlan, show: Callable[[str], None]) -> Comparison:
    """Start all processes, run all turns, end the processes, and return the results.

    Args:
        show: called with progress messages.
    Raises:
        PeerError, StateError, NetworkError: a process ended, failed or timed out; all processes are stopped.
    """
    available = psutil.virtual_memory().available
    stays = can_all_stay(plan.systems, plan.num_peers, plan.parameters, available)
    turns: dict[str, list[Turn]] = {system: [] for system in plan.systems}
    with _scratch_folder() as root, _Stage(plan, root, show, stays=stays) as stage:
        for repeat in range(plan.repeats):
            for system in plan.systems:
                turn = stage.play(system)
                show(f"repeat {repeat + 1} of {plan.repeats}: {system} {turn.wall_seconds:.3f} s")
                turns[system].append(turn)
        is_private = stage.is_private
    return Comparison(
        num_peers=plan.num_peers,
        parameters=plan.parameters,
        codec=plan.codec,
        turns=turns,
        on_own_network=is_private,
        kept_alive=stays,
        num_cores=len(os.sched_getaffinity(0)),
    )


class _Stage:
    """The processes of all systems. Another system that fails is restarted, so that it does not end the benchmark.

    Args:
        stays: whether all systems run until the end; otherwise each is started for its turn.
    Attributes:
        is_private: whether each system has had a private network so far.
    """

    def __init__(self, plan: ComparisonPlan, root: Path, show: Callable[[str], None], *, stays: bool) -> None:
        self._plan, self._root, self._show, self._stays = plan, root, show, stays
        self._pools: dict[str, WorkerPool] = {}
        self._ends = {system: ExitStack() for system in plan.systems}
        self._failures = dict.fromkeys(plan.systems, 0)
        self.is_private = True

    def __enter__(self) -> Self:
        try:
            for system in self._plan.systems if self._stays else ():
                self._pool(system)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        with ExitStack() as all_ends:
            for system in self._plan.systems:
                all_ends.callback(self._end, system)

    def play(self, system: str) -> Turn:
        """Run one exchange of a system.

        Raises:
            PeerError, StateError, NetworkError: our system failed, or another one failed too often.
        """
        for other in () if self._stays else self._plan.systems:
            self._end(other)
        while True:
            try:
                pool = self._pool(system)
                others = [other for name, other in self._pools.items() if name != system]
                return play_turn(pool, others, self._plan.turn_seconds)
            except P2PDilocoError as error:
                self._end(system)
                self._failures[system] += 1
                if system == OURS or self._failures[system] > MOST_FAILURES:
                    raise
                self._show(f"{error}; starting {system} again")

    def _pool(self, system: str) -> WorkerPool:
        if system not in self._pools:
            pool = self._ends[system].enter_context(ready_pool(self._plan, system, self._root, self._show))
            self._pools[system] = pool
            self.is_private = self.is_private and pool.network.is_private
        return self._pools[system]

    def _end(self, system: str) -> None:
        self._pools.pop(system, None)
        self._ends[system].close()


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    # The name must be short: the daemons' sockets are in this folder, and a socket path has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="p2pd-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def ready_pool(plan: ComparisonPlan, system: str, root: Path, show: Callable[[str], None]) -> Iterator[WorkerPool]:
    """Start a system and warm it up with turns until an exchange is complete."""
    show(f"starting {plan.num_peers} peers of {system}")
    place = Path(tempfile.mkdtemp(prefix="c", dir=root))
    with WorkerPool(system, _orders(plan, system), place, worker=WORKERS[system]) as pool:
        words = pool.ask({"do": "start"}, START_SECONDS)
        pool.ask({"do": "meet", "words": words}, START_SECONDS)
        for _ in range(MOST_TRIALS):
            _prepare(pool)
            trouble = _play(pool, plan.turn_seconds, is_trial=True).trouble
            if not trouble:
                break
        else:
            raise NetworkError(f"{system} completed no exchange in {MOST_TRIALS} turns: {trouble}")
        _settle(pool, plan.turn_seconds)
        yield pool


def _settle(pool: WorkerPool, turn_seconds: float) -> None:
    """Run turns without an exchange until the system has done what it does once after a start."""
    for _ in range(MOST_SETTLING):
        word = {"do": "settle", "turn": pool.num_plays, "at": time.monotonic() + LEAD_SECONDS}
        pool.num_plays += 1
        answers = pool.ask(word, turn_seconds)
        # Swarm time stops between turns: a peer without the newest roster would start the next turn without it.
        if all(answer["is_settled"] for answer in answers) and len({answer["roster"] for answer in answers}) == 1:
            return
    raise NetworkError(f"{pool.system} did not settle in {MOST_SETTLING} turns without an exchange")


def _orders(plan: ComparisonPlan, system: str) -> Sequence[Mapping[str, Any]]:
    common = {"num_peers": plan.num_peers, "parameters": plan.parameters}
    if system != OURS:
        return [common] * plan.num_peers
    ours = our_orders(codec=plan.codec, spans=plan.spans, turn_seconds=plan.turn_seconds)
    return [{**common, **ours}] * plan.num_peers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Played:
    began_at: float
    applied_at: float
    trouble: str


def _prepare(pool: WorkerPool) -> None:
    pool.ask({"do": "prepare", "turn": pool.num_plays}, PREPARE_SECONDS)


def _play(pool: WorkerPool, turn_seconds: float, *, is_trial: bool) -> _Played:
    at = time.monotonic() + LEAD_SECONDS
    word = {"do": "play", "turn": pool.num_plays, "at": at, "is_trial": is_trial}
    pool.num_plays += 1
    answers = pool.ask(word, turn_seconds)
    troubles = [f"peer {place}: {answer['trouble']}" for place, answer in enumerate(answers) if answer["trouble"]]
    return _Played(
        began_at=at,
        applied_at=max(answer["applied_at"] for answer in answers),
        trouble="; ".join(troubles[:1]),
    )


def play_turn(pool: WorkerPool, others: Sequence[WorkerPool], turn_seconds: float) -> Turn:
    """Measure one exchange of a warm system.

    Raises:
        NetworkError: the exchange did not include all peers.
    """
    _prepare(pool)
    pids_by_peer = pool.pids_by_peer()
    pids = [pid for peer in pids_by_peer for pid in peer]
    waiting = [pid for other in others for peer in other.pids_by_peer() for pid in peer]
    forget_peaks(pids)
    before = (cpu_seconds(pids), cpu_seconds(waiting), loopback_bytes(pool.network.pid))
    played = _play(pool, turn_seconds, is_trial=False)
    after = (cpu_seconds(pids), cpu_seconds(waiting), loopback_bytes(pool.network.pid))
    peak = max(peak_rss_bytes(peer) for peer in pids_by_peer)
    if played.trouble:
        raise NetworkError(
            f"an exchange of {pool.system} was incomplete: {played.trouble}; try again when the machine is less busy"
        )
    digests = {answer["digest"] for answer in pool.ask({"do": "digest"}, HASH_SECONDS)}
    return Turn(
        wall_seconds=played.applied_at - played.began_at,
        cpu_seconds=after[0] - before[0],
        others_cpu_seconds=after[1] - before[1],
        wire_bytes=after[2] - before[2],
        peak_rss_bytes=peak,
        results_equal=len(digests) == 1,
    )
