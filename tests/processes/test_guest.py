"""A peer on somebody's machine obeys its owner: real processes, the real transport and the real command line.

`make guest` runs these and prints the figures.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from p2p_diloco.guest.owner_files import CONTROL_FILE, read_traffic
from tests.processes.guest_process import ROUND_SECONDS, GuestProcess, a_swarm, guest
from tests.status.kept_events import read_events
from tests.swarm.process_swarm import ProcessSwarm

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

SHARED_MEMORY = Path("/dev/shm")


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    return {
        (place.laddr.ip, place.laddr.port)
        for process in processes
        for place in process.net_connections("inet")
        if place.status == psutil.CONN_LISTEN
    }


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def step_times(found: GuestProcess, seconds: float) -> list[float]:
    """Return the times of each status within some seconds that showed another number of steps than the one before."""
    times, last, end = [], found.status.inner_steps, time.time() + seconds
    while time.time() < end:
        status = found.status
        if status.inner_steps != last:
            times.append(status.updated)
        last = status.inner_steps
        time.sleep(0.05)
    return times


def test_pause_takes_two_seconds_and_leave_ten_and_nothing_is_left(tmp_path: Path) -> None:
    with a_swarm() as swarm, guest(swarm, tmp_path, company=["bob"]) as found:
        steps = found.status.inner_steps
        found.until(lambda: found.status.inner_steps > steps, 5.0)
        pausing = found.begin("pause", "--for", "1h")
        stepped_at = step_times(found, seconds=12.0)
        said = found.end(pausing)
        assert said.startswith("paused until ")
        assert said.endswith("(asked); it follows the run, and makes no steps\n")
        asked_at = (found.state / CONTROL_FILE).stat().st_mtime
        obeyed_at = next(event.time for event in read_events(found.state, "pause"))
        last_at = max(stepped_at, default=asked_at)
        print(f"obeyed {obeyed_at - asked_at:.2f} s after the request, last step {last_at - asked_at:.2f} s after")
        assert last_at <= asked_at + 2.0
        entries, contributions = found.status.entries_absorbed, rounds_with_three(swarm)
        time.sleep(8 * ROUND_SECONDS)
        assert found.status.entries_absorbed > entries, "it no longer follows"
        assert found.status.phase == "paused"
        assert rounds_with_three(swarm) <= contributions + 1, "it still contributes"
        assert found.run("resume") == "running again\n"
        steps = found.status.inner_steps
        found.until(lambda: found.status.inner_steps > steps, 5.0)
        found.until(lambda: rounds_with_three(swarm) > contributions + 2, 30.0)
        family, ports = found.family(), listening(found.family())
        assert len(family) > 1, "it has a daemon"
        assert ports
        commands = " ".join(word for process in family for word in process.cmdline())
        sockets = {name for name in shared_memory() if name in commands}
        began = time.monotonic()
        said = found.run("leave")
        seconds = time.monotonic() - began
        assert found.process.wait(timeout=5.0) == 0, found.output.read_text()
        print(f"left {seconds:.1f} s after the command began: {said.strip()}")
        assert float(said.split(" after ")[1].split(" s")[0]) <= 10.0
        assert psutil.wait_procs(family, timeout=0.5)[1] == []
        left = [path.name for path in found.temporary.iterdir()]
        assert [name for name in left if not name.startswith("torchinductor_")] == [], "torch keeps a cache there"
        for host, port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        assert not sockets & shared_memory(), "the folder of its daemon's sockets is left"
        drafts = [path for path in found.state.rglob("*") if path.name.startswith(".") or path.suffix == ".part"]
        assert [path.name for path in drafts if path.is_file()] == []
        assert swarm.peers["bob"].events("good-bye"), "the swarm was not told"


def rounds_with_three(swarm: ProcessSwarm) -> int:
    """Return the number of rounds in which every entry includes both trainers."""
    return sum(closed.num_included >= 2 * closed.num_spans for closed in swarm.peers["bob"].rounds())


def test_limits_change_the_upload_and_the_priority_of_a_running_peer(tmp_path: Path) -> None:
    with a_swarm() as swarm, guest(swarm, tmp_path, "--nice", "7") as found:
        assert {process.nice() for process in found.family()} == {7}
        said = found.run("limits", "--max-upload", "200kbit", "--nice", "12", "--gpu-duty", "0.5", "--json")
        limits = json.loads(said)["limits"]
        assert limits == {"max_upload": "200kbit", "nice": "12", "gpu_duty": "0.5"}
        found.until(lambda: found.status.max_upload == 200e3, 5.0)
        assert {process.nice() for process in found.family()} == {12}
        said = found.run("limits")
        assert said.startswith("running\n  max-upload     200 kbit/s\n")


def test_a_duty_leaves_the_device_idle_for_the_rest(tmp_path: Path) -> None:
    with a_swarm() as swarm, guest(swarm, tmp_path) as found:
        whole = steps_per_second(found)
        found.run("limits", "--gpu-duty", "0.1")
        part = steps_per_second(found)
        print(f"steps a second: {whole:.0f}, with a duty of 0.1 {part:.0f}")
        assert part < 0.3 * whole


def steps_per_second(found: GuestProcess) -> float:
    first = found.status
    time.sleep(6.0)
    last = found.status
    return (last.inner_steps - first.inner_steps) / (last.updated - first.updated)


def test_a_quota_is_kept_over_the_real_transport_and_survives_a_kill(tmp_path: Path) -> None:
    quota_bytes = 3e6
    with a_swarm() as swarm, guest(swarm, tmp_path, "--monthly-quota", "3MB") as found:
        found.until(lambda: month_bytes(found) > 0.3 * quota_bytes, 120.0)
        shown = month_bytes(found)
        found.process.kill()
        found.process.wait()
        kept = read_traffic(found.state)
        assert kept is not None
        print(f"before a kill {shown / 1e6:.2f} MB, on the disk {kept.total / 1e6:.2f} MB")
        again = GuestProcess(swarm, tmp_path / "again", "--monthly-quota", "3MB", state=found.state)
        try:
            again.until(lambda: again.status.pause_reason == "monthly quota", 200.0)
            again.until(lambda: not again.status.peers, 20.0)
            time.sleep(3.0)
            used = month_bytes(again)
            lost = shown - kept.total
            print(f"offline with {used / 1e6:.3f} of 3 MB used, {100 * (used + lost) / quota_bytes:.1f} % in truth")
            assert 0.95 * quota_bytes <= used <= 1.05 * quota_bytes
            assert len(again.family()) == 1, "its daemon still runs"
            time.sleep(5.0)
            assert month_bytes(again) == used
            assert again.run("leave").startswith("the peer has left")
        finally:
            if again.process.poll() is None:
                again.process.kill()
            again.process.wait()


def month_bytes(found: GuestProcess) -> float:
    return float(found.status.month_sent + found.status.month_received)
