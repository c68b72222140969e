"""Plays systems in turn, each once in a repeat, and measures what each turn took of the machine.

A turn is measured from outside and alike for all: the monotonic clock, the kernel's clocks of all processes, the
counter of the network interface. What must come before an exchange (filling vectors, finding a group) and what comes
after it (hashing results) is done by all, and not measured of any.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from p2p_diloco.bench.averaging.crew import Crew
from p2p_diloco.bench.averaging.figures import Contest, Turn
from p2p_diloco.bench.averaging.meters import cpu_seconds, forget_peaks, loopback_bytes, peak_rss_bytes
from p2p_diloco.bench.averaging.our_run import our_orders
from p2p_diloco.bench.averaging.systems import OURS, can_all_stay
from p2p_diloco.errors import NetworkError

START_SECONDS = 180.0
PREPARE_SECONDS = 300.0
HASH_SECONDS = 120.0
LEAD_SECONDS = 0.1
"""Between the word to begin and the moment that it names: all must have heard it by then."""
MOST_TRIALS = 8
MOST_SETTLING = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestPlan:
    """What to measure.

    Attributes:
        systems: by name, ours the first.
        codec: ours alone goes by it.
        spans: pieces in which ours exchanges the vector.
        repeats: turns of each system that count.
    """

    systems: tuple[str, ...]
    num_peers: int
    parameters: int
    codec: str
    spans: int
    repeats: int

    @property
    def turn_seconds(self) -> float:
        """Longest turn that is waited for; a hundred times what it should take on one core."""
        return 60.0 + 1e-6 * self.parameters * self.num_peers


def play_contest(plan: ContestPlan, say: Callable[[str], None]) -> Contest:
    """Start all processes, play, end them, and return what came out.

    Args:
        say: told how it goes on.
    Raises:
        PeerError, StateError, NetworkError: a process ended, failed or fell silent; none is left behind.
    """
    available = psutil.virtual_memory().available
    stays = can_all_stay(plan.systems, plan.num_peers, plan.parameters, available)
    turns: dict[str, list[Turn]] = {system: [] for system in plan.systems}
    are_private: list[bool] = []
    with _scratch_folder() as root, ExitStack() as crews:
        kept = {system: crews.enter_context(ready_crew(plan, system, root, say)) for system in plan.systems if stays}
        for repeat in range(plan.repeats):
            for system in plan.systems:
                with ExitStack() as brief:
                    crew = kept.get(system) or brief.enter_context(ready_crew(plan, system, root, say))
                    others = [other for name, other in kept.items() if name != system]
                    turn = play_turn(crew, others, plan.turn_seconds)
                    are_private.append(crew.network.is_private)
                    say(f"repeat {repeat + 1} of {plan.repeats}: {system} {turn.wall_seconds:.3f} s")
                turns[system].append(turn)
    return Contest(
        num_peers=plan.num_peers,
        parameters=plan.parameters,
        codec=plan.codec,
        turns=turns,
        on_own_network=all(are_private),
        kept_alive=stays,
        num_cores=len(os.sched_getaffinity(0)),
    )


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    # The short name matters: sockets of the daemons lie within, and their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="p2pd-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def ready_crew(plan: ContestPlan, system: str, root: Path, say: Callable[[str], None]) -> Iterator[Crew]:
    """Start a system and let it play until a turn was whole: it is warm then, and its turns count."""
    say(f"starting {plan.num_peers} peers of {system}")
    place = Path(tempfile.mkdtemp(prefix="c", dir=root))
    with Crew(system, _orders(plan, system), place) as crew:
        words = crew.ask({"do": "start"}, START_SECONDS)
        crew.ask({"do": "meet", "words": words}, START_SECONDS)
        for _ in range(MOST_TRIALS):
            _prepare(crew)
            trouble = _play(crew, plan.turn_seconds, is_trial=True).trouble
            if not trouble:
                break
        else:
            raise NetworkError(f"{system} came to no whole exchange in {MOST_TRIALS} turns: {trouble}")
        _settle(crew, plan.turn_seconds)
        yield crew


def _settle(crew: Crew, turn_seconds: float) -> None:
    """Have done what a system does once after its start, before turns count."""
    for _ in range(MOST_SETTLING):
        word = {"do": "settle", "turn": crew.num_plays, "at": time.monotonic() + LEAD_SECONDS}
        crew.num_plays += 1
        if all(answer["is_settled"] for answer in crew.ask(word, turn_seconds)):
            return
    raise NetworkError(f"{crew.system} did not come to rest in {MOST_SETTLING} turns without an exchange")


def _orders(plan: ContestPlan, system: str) -> Sequence[Mapping[str, Any]]:
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


def _prepare(crew: Crew) -> None:
    crew.ask({"do": "prepare", "turn": crew.num_plays}, PREPARE_SECONDS)


def _play(crew: Crew, turn_seconds: float, *, is_trial: bool) -> _Played:
    at = time.monotonic() + LEAD_SECONDS
    word = {"do": "play", "turn": crew.num_plays, "at": at, "is_trial": is_trial}
    crew.num_plays += 1
    answers = crew.ask(word, turn_seconds)
    troubles = [f"peer {place}: {answer['trouble']}" for place, answer in enumerate(answers) if answer["trouble"]]
    return _Played(
        began_at=at,
        applied_at=max(answer["applied_at"] for answer in answers),
        trouble="; ".join(troubles[:1]),
    )


def play_turn(crew: Crew, others: Sequence[Crew], turn_seconds: float) -> Turn:
    """Let a system that is warm exchange once, and measure it.

    Raises:
        NetworkError: the exchange was not one of all among all.
    """
    _prepare(crew)
    pids_by_peer = crew.pids_by_peer()
    pids = [pid for peer in pids_by_peer for pid in peer]
    waiting = [pid for other in others for peer in other.pids_by_peer() for pid in peer]
    forget_peaks(pids)
    before = (cpu_seconds(pids), cpu_seconds(waiting), loopback_bytes(crew.network.pid))
    played = _play(crew, turn_seconds, is_trial=False)
    after = (cpu_seconds(pids), cpu_seconds(waiting), loopback_bytes(crew.network.pid))
    peak = max(peak_rss_bytes(peer) for peer in pids_by_peer)
    if played.trouble:
        raise NetworkError(
            f"an exchange of {crew.system} was not whole: {played.trouble}; try again on a machine with less to do"
        )
    digests = {answer["digest"] for answer in crew.ask({"do": "digest"}, HASH_SECONDS)}
    return Turn(
        wall_seconds=played.applied_at - played.began_at,
        cpu_seconds=after[0] - before[0],
        others_cpu_seconds=after[1] - before[1],
        wire_bytes=after[2] - before[2],
        peak_rss_bytes=peak,
        results_equal=len(digests) == 1,
    )
