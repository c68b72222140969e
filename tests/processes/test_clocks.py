"""Wrong clocks of real processes: the first peer's wall clock is far ahead and then corrected; a process is stopped.

`make clocks` runs these and prints the time until the next entry. It is measured from the moment at which a clock is
set, a peer is restarted, or a stopped one resumes. The run keeps the founder's time line, whatever clocks show.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence

import pytest

from tests.swarm.process_swarm import FRAGMENTS, ProcessSwarm

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

ROUND_SECONDS = float(os.environ.get("CLOCKS_ROUND_SECONDS", "1"))
"""Round time; a machine that is busy with something else needs longer rounds."""
SET_RIGHT_AFTER_SECONDS = 120.0
ASLEEP_SECONDS = 90.0
TWO_CYCLES_SECONDS = 2 * FRAGMENTS * ROUND_SECONDS
BUSY_SECONDS = 2.0
"""Time that a busy machine may need after a round to record its end."""
PATIENCE_SECONDS = 150.0
"""Time for all to start and to train together, even on a busy machine."""
STARTED_SECONDS = 20.0
"""Time for a process to start on a busy machine; of two voters both must run."""
DAY_SECONDS = 86_400.0


def longest_gap(swarm: ProcessSwarm, names: Sequence[str], seconds: float) -> float:
    """Return the longest recent time without an entry; a busy machine has such gaps even without an event."""
    now = time.time()
    ends = {each.time for name in names for each in swarm.peers[name].rounds(now - seconds) if each.num_entries}
    marks = [now - seconds, *sorted(ends), now]
    return max(after - before for before, after in itertools.pairwise(marks))


def require_quiet(swarm: ProcessSwarm, names: Sequence[str]) -> None:
    """Skip if gaps of two cycles do not indicate a problem with clocks."""
    seconds = longest_gap(swarm, names, 8 * FRAGMENTS * ROUND_SECONDS)
    if seconds > TWO_CYCLES_SECONDS:
        pytest.skip(f"before the event there was no entry for {seconds:.1f} s: this machine is too busy for the rounds")


def seconds_to_entry(swarm: ProcessSwarm, names: Sequence[str], since: float, patience: float) -> float:
    """Return the time from `since` to the end of a round that started later and got entries, as seen by any of `names`.

    It is measured by the clock of the test, which these peers share, so it does not depend on swarm time.
    """

    def ends() -> list[float]:
        closed = (each for name in names for each in swarm.peers[name].rounds(since))
        return [each.time for each in closed if each.num_entries and each.time - ROUND_SECONDS >= since]

    swarm.wait("an entry", ends, patience + 15.0)
    return min(ends()) - since


@pytest.mark.parametrize("volunteers", [["ann"], ["ann", "bob"]], ids=["a joiner", "two volunteers"])
@pytest.mark.parametrize("ahead", [600.0, DAY_SECONDS], ids=["600 s", "a day"])
def test_entries_continue_after_the_first_peers_wall_clock_was_ahead_and_is_corrected(
    ahead: float, volunteers: list[str]
) -> None:
    """With one joiner the first peer trains; with two volunteers it is a bootstrap peer."""
    trains = len(volunteers) == 1
    crowd = len(volunteers) + trains
    with ProcessSwarm(round_seconds=ROUND_SECONDS, patience_seconds=PATIENCE_SECONDS) as swarm:
        began = time.time()
        swarm.start("first", founds=True, trains=trains, wall_ahead=ahead)
        for name in volunteers:
            swarm.start(name)
        swarm.wait_for_whole_round(volunteers, 2 if trains else crowd, began)
        time.sleep(max(began + SET_RIGHT_AFTER_SECONDS - time.time(), 0.0))
        assert swarm.peers["ann"].rounds()[-1].round >= swarm.round_at(began + ahead), (
            "the run keeps the founder's time"
        )

        require_quiet(swarm, volunteers)
        since = swarm.set_wall_clock("first", 0.0)
        entry = seconds_to_entry(swarm, volunteers, since, TWO_CYCLES_SECONDS)
        print(f"{ahead:.0f} s ahead, {crowd} train, set right while it runs: next entry after {entry:.1f} s")
        assert entry <= TWO_CYCLES_SECONDS + BUSY_SECONDS, swarm.story()

        swarm.sleep_rounds(5 * FRAGMENTS)
        require_quiet(swarm, volunteers)
        killed = swarm.kill("first")
        swarm.start("first", founds=True, trains=trains, wall_ahead=0.0)
        again = seconds_to_entry(swarm, volunteers, killed, STARTED_SECONDS + TWO_CYCLES_SECONDS)
        print(f"{ahead:.0f} s ahead, {crowd} train, started again: next entry after {again:.1f} s with the start")
        assert again <= STARTED_SECONDS + TWO_CYCLES_SECONDS, swarm.story()
        swarm.wait_for_whole_round(volunteers, crowd, time.time())
        last = swarm.peers["ann"].rounds()[-1].round
        assert abs(last - swarm.round_at(time.time() + ahead)) <= 3, "the run keeps its founding time line"


@pytest.mark.parametrize("ahead", [-7200.0, DAY_SECONDS], ids=["two hours behind", "a day ahead"])
def test_a_wrong_clock_is_named_on_both_sides_and_its_owner_takes_part(ahead: float) -> None:
    amount = "2 h 00 min behind those of" if ahead < 0 else "24 h 00 min ahead of those of"
    with ProcessSwarm(round_seconds=2 * ROUND_SECONDS, patience_seconds=PATIENCE_SECONDS) as swarm:
        began = time.time()
        swarm.start("boot", founds=True, trains=False)
        swarm.start("ann")
        swarm.start("bob")
        swarm.wait_for_whole_round(["ann", "bob"], 2, began)
        cleo = swarm.start("cleo", wall_ahead=ahead)
        swarm.wait("a link", lambda: cleo.status.peers, PATIENCE_SECONDS)
        linked = time.time()
        swarm.wait("the clock to be named here", lambda: amount in cleo.status.clock, PATIENCE_SECONDS)
        for name in ("ann", "boot"):
            swarm.wait(
                "the clock to be named there",
                lambda name=name: amount in swarm.peers[name].status.clock,
                PATIENCE_SECONDS,
            )
        named = time.time() - linked
        assert "this machine" in cleo.status.clock
        assert "this machine" not in swarm.peers["ann"].status.clock
        swarm.wait_for_whole_round(["ann", "bob"], 3, linked)
        since = time.time()
        time.sleep(30 * 2 * ROUND_SECONDS)
        rounds = swarm.peers["ann"].rounds(since)
        share = sum(each.is_whole(3) for each in rounds) / len(rounds)
        print(
            f"{amount} others: named on both sides after {named:.1f} s, all three in {100 * share:.0f} % of the rounds"
        )
        assert named <= 10.0
        assert share >= 0.9, swarm.story()
        assert not [event for event in swarm.peers["ann"].events("roster", since=since) if "gone" in event.text]


@pytest.mark.parametrize("sleeper", ["boot", "ann"])
def test_a_run_of_three_processes_continues_after_one_was_stopped_for_a_while(sleeper: str) -> None:
    with ProcessSwarm(round_seconds=ROUND_SECONDS, patience_seconds=PATIENCE_SECONDS) as swarm:
        began = time.time()
        swarm.start("boot", founds=True, trains=False)
        swarm.start("ann")
        swarm.start("bob")
        swarm.wait_for_whole_round(["ann", "bob"], 2, began)
        swarm.sleep_rounds(6 * FRAGMENTS)  # volunteers vote once they were in entries for four cycles
        swarm.wait_for_whole_round(["ann", "bob"], 2, time.time())

        require_quiet(swarm, ["ann", "bob"])
        asleep = swarm.freeze(sleeper)
        left = [name for name in ("ann", "bob") if name != sleeper]
        without = seconds_to_entry(swarm, left, asleep, ASLEEP_SECONDS)
        time.sleep(max(asleep + ASLEEP_SECONDS - time.time(), 0.0))

        since = swarm.wake(sleeper)
        entry = seconds_to_entry(swarm, left, since, TWO_CYCLES_SECONDS)
        swarm.wait_for_whole_round(["ann", "bob"], 2, since)
        print(
            f"{sleeper} stopped for {ASLEEP_SECONDS:.0f} s: next entry {without:.1f} s after it was stopped, "
            f"{entry:.1f} s after it went on, all in one round after {time.time() - since:.1f} s"
        )
        assert entry <= TWO_CYCLES_SECONDS + BUSY_SECONDS, swarm.story()
