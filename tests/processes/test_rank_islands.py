"""Islands of several ranks by `join --ranks` and `torchrun`, beside islands of one process: real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from p2p_diloco.ids import Digest
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.storage.entry_log import EntryLog
from tests.processes.machines import Machines, wait_for_end
from tests.status.kept_events import read_events

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("RANKS_SECONDS", "300"))
ROUND_SECONDS = 3.0
BATCH, CONTEXT = 8, 64
RUN = [
    *("--model.size", "tiny", "--model.context", str(CONTEXT), "--inner.step_tokens", str(BATCH * CONTEXT)),
    *("--step-seconds", "0.1"),
    *("--rounds.round_seconds", str(ROUND_SECONDS), "--rounds.fragments", "2"),
]
SAME_BATCH = ["--batch", "planned"]
"""Steps of equally many tokens, from which the weights of an entry can be computed again."""
ISLANDS = {
    "plain": [],
    "copies": ["--ranks", "2", "--shards", "never"],
    "shards": ["--ranks", "2", "--shards", "always"],
    "slow": ["--gpu-duty", "0.2"],
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    machines.run("new", *RUN)
    yield machines
    machines.close()


def rank_process(machines: Machines, name: str, rank: int) -> psutil.Process:
    """Return the process of a rank."""
    for child in psutil.Process(machines.peers[name].pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank) and "p2p_diloco" in child.cmdline():
            return child
    raise AssertionError(f"{name} has no rank {rank}")


def follows_from_tokens(entry: Entry) -> bool:
    """Return whether the weights of an entry are the tokens of whole steps, all of as many tokens."""
    are_steps = all(weight > 0 and weight % (BATCH * CONTEXT) == 0 for weight in entry.weights)
    return are_steps and sum(entry.weights) == entry.tokens


def test_four_kinds_of_islands_train_one_run_to_the_same_bytes(machines: Machines) -> None:
    """A plain island, one of copies, one of shards and a slow one; the shards lose a rank in the middle."""
    last = int(SECONDS / ROUND_SECONDS)
    flags = ["--evaluate-seconds", "10", "--until-round", str(last), *SAME_BATCH]
    machines.start("boot", "bootstrap", "run.toml", "--until-round", str(last))
    invite = machines.invite("boot")
    for name, own in ISLANDS.items():
        machines.start(name, "join", invite, *flags, *own)
    machines.wait("steps everywhere", lambda: all(machines.status(name).inner_steps > 5 for name in ISLANDS))
    first = {name: machines.status(name).loss or 0.0 for name in ISLANDS}
    seen: dict[Digest, Entry] = {}
    killed_at, back_at = 0.0, 0.0
    began = time.time()
    while any(machines.peers[name].poll() is None for name in ISLANDS):
        for folder in machines.folder.glob("state-boot/*/entries"):
            seen |= {entry.digest(): entry for entry in EntryLog(folder, keep_cycles=99, mends=False).kept()}
        if not killed_at and time.time() - began > 0.3 * SECONDS:
            rank_process(machines, "shards", 1).kill()
            killed_at = time.time()
        elif killed_at and not back_at:
            ready = [event for event in read_events(machines.state("shards"), "ready") if event.time > killed_at]
            back_at = ready[0].time if ready else 0.0
        time.sleep(1.0)
    machines.wait("the end of the bootstrap peer", lambda: machines.peers["boot"].poll() is not None)
    wait_for_end(machines, list(ISLANDS))
    assert back_at, machines.story()
    left = [event.time for event in read_events(machines.state("shards"), "finished") if event.time > killed_at]
    print(
        f"shards: left {left[0] - killed_at:.1f} s after the loss of a rank, was back after {back_at - killed_at:.1f} s"
    )
    for name in ISLANDS:
        status = machines.status(name)
        print(
            f"{name}: {status.inner_steps} steps, participation {status.participation}, training loss "
            f"{first[name]:.2f} → {status.loss:.2f}, shared model {status.anchor_loss}"
        )
        assert status.loss is not None
        assert status.loss < first[name] - 0.5, machines.story()
    # In the first cycle of a roster, newcomers and islands that have just come back count at most the median.
    rosters = {(entry.span, entry.height): entry.roster for entry in seen.values()}
    settled = [entry for entry in seen.values() if rosters.get((entry.span, entry.height - 1)) == entry.roster]
    several = [entry for entry in settled if len(entry.weights) >= 3]
    by_rule = [entry for entry in several if follows_from_tokens(entry)]
    print(f"{len(by_rule)} of {len(several)} entries of three or more islands have the weights of their tokens")
    assert len(several) >= 20
    assert len(by_rule) >= 0.9 * len(several)


def test_the_ranks_of_torchrun_are_one_island_that_leaves_at_ctrl_c(machines: Machines) -> None:
    machines.start("boot", "bootstrap", "run.toml")
    invite = machines.invite("boot")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    machines.start("island", "join", invite, program=(*torchrun, "-m", "p2p_diloco"))
    machines.wait("steps", lambda: machines.status("island").inner_steps > 20)
    island = psutil.Process(machines.peers["island"].pid)
    family = [island, *island.children(recursive=True)]
    for process in family:  # as a terminal does: the signal is for the whole group
        if process.name().startswith("python"):
            process.send_signal(2)
    began = time.monotonic()
    psutil.wait_procs(family, timeout=60.0)
    print(f"left {time.monotonic() - began:.1f} s after Ctrl-C")
    assert not [process for process in family if process.is_running()]
    assert [event.text for event in read_events(machines.state("island"), "finished")], machines.story()


def test_ranks_that_cannot_share_a_step_are_refused_once(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    try:
        machines.run("new", *RUN, "--inner.step_tokens", str(2 * CONTEXT))
        machines.start("boot", "bootstrap", "run.toml")
        machines.start("island", "join", machines.invite("boot"), "--ranks", "3")
        code = machines.peers["island"].wait(240.0)
    finally:
        machines.close()
    said = machines.log("island").read_text()
    assert code == 2, said
    assert said.count("error: a step of this run has 2 windows, too few for the 3 ranks of this island; start at") == 1
