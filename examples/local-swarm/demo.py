"""A swarm on this machine that loses a volunteer and its bootstrap peer, and trains on; `make demo` runs it.

It does what you could do in six terminals: it types commands of `p2p-diloco`, and reads what each peer writes into its
state directory (`status.json`, `events.jsonl`). The exit code is 0 only if every check holds.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROUND_SECONDS = 2.5
LATE, KILL, BOOTSTRAP_KILL, PATIENCE = 0.35, 0.5, 0.65, 0.7
"""When things happen, and how long the demo waits for a peer at most; in shares of its length."""
BOOTSTRAP, LOOPBACK = "bootstrap", "/ip4/127.0.0.1/tcp/0"
INVITE = re.compile(r'"(p2pdiloco://[^"]+)"')


class DemoError(Exception):
    """A reason why the demo cannot go on."""


def main() -> int:
    """Run the demo, print its report and return the exit code."""
    parser = argparse.ArgumentParser(description="Train in a swarm on this machine: two peers are killed, one is late.")
    parser.add_argument("--peers", type=int, default=5, help="number of volunteers, at least 3")
    parser.add_argument("--seconds", type=float, default=85.0, help="time from the first join to the last round")
    parser.add_argument("--duty", default="1", help="share of its time that each volunteer trains, such as 1,0.1,0.1")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    if options.peers < 3 or options.seconds < 30.0:
        parser.error("expected at least 3 peers and 30 seconds")
    volunteers = [f"volunteer-{number}" for number in range(1, options.peers + 1)]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # like Ctrl-C
    swarm, code = (
        Swarm(options.seconds, dict(zip(volunteers, itertools.cycle(options.duty.split(",")), strict=False))),
        0,
    )
    try:
        with contextlib.closing(swarm):
            play(swarm, volunteers)
            report(swarm, options.json)
    except DemoError as error:
        print(f"FAILED: {error}; the peers' logs are in {swarm.folder}")
        return 1
    except KeyboardInterrupt:
        code = 130
    shutil.rmtree(swarm.folder, ignore_errors=True)
    return code


def play(swarm: "Swarm", volunteers: list[str]) -> None:
    """Start a run, let others join, kill one of them and the bootstrap peer, and go on until the last round."""
    *early, late = volunteers
    victim, others = early[1], [name for name in volunteers if name != early[1]]
    swarm.mark(f"{len(volunteers)} volunteers will train a small model on the source of Python's standard library")
    rounds = {"clock_start": swarm.began, "round_seconds": ROUND_SECONDS, "fragments": 2}
    keys = [f"--rounds.{key}={value}" for key, value in rounds.items()]
    swarm.command("new", "run.toml", "--name", "demo", "--step-seconds", "0.1", *keys)
    swarm.start(BOOTSTRAP, "bootstrap", "run.toml")
    swarm.wait(0.0, "the join command", lambda: bool(INVITE.search(swarm.output(BOOTSTRAP))))
    swarm.joining_began = swarm.now()
    (invite,) = INVITE.findall(swarm.output(BOOTSTRAP))
    for name in early:
        swarm.start(name, "join", invite)
    swarm.start_page(volunteers)
    swarm.wait(LATE)
    swarm.start(late, "join", invite)
    swarm.wait(KILL, "volunteers that can spare one", lambda: swarm.are_ready(early))
    swarm.kill(victim)
    swarm.wait(BOOTSTRAP_KILL, "volunteers that need no introduction", lambda: swarm.are_ready(others))
    swarm.kill(BOOTSTRAP)
    swarm.wait(1.0)
    swarm.mark("the last round is over; the peers agree on the final bytes")
    swarm.wait(1.0, "the end of every peer", lambda: not swarm.living())


class Swarm:
    """Peers as processes, each with a state directory in a temporary folder. Times are seconds since the beginning."""

    def __init__(self, seconds: float, duty: dict[str, str]) -> None:
        # The name is short because sockets are inside, and the path of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="p2pd-demo-"))
        self.seconds, self.began, self.joining_began, self.duty = seconds, time.time(), 0.0, duty
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.started: dict[str, float] = {}
        self.killed: dict[str, float] = {}
        self.peak_memory = 0
        # Settings in this shell's environment are not for these peers, which share the cores of one machine.
        kept = {key: value for key, value in os.environ.items() if not key.startswith("P2P_DILOCO_")}
        self.environment = {**kept, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def now(self) -> float:
        return time.time() - self.began

    def mark(self, text: str) -> None:
        print(f"{self.now():5.0f} s  {text}", flush=True)

    def command(self, *words: str) -> str:
        """Run a command of p2p-diloco to its end and return what it printed."""
        line = [sys.executable, "-m", "p2p_diloco", *words]
        done = subprocess.run(line, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise DemoError(f"p2p-diloco {words[0]} exited with code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def start(self, name: str, *words: str) -> None:
        """Start a peer. All volunteers stop after the same round, so that they end with the same bytes."""
        shares = 2.0 if name == BOOTSTRAP else 1.0  # so that it ends even if the demo cannot kill it
        last_round = str(math.ceil((self.joining_began + shares * self.seconds) / ROUND_SECONDS) - 1)
        line = [sys.executable, "-m", "p2p_diloco", *words, "--state-directory", name, "--until-round", last_round]
        line += ["--evaluate-seconds", "8", "--threads", "1", "--device", "cpu", "--host-maddrs", LOOPBACK]
        if name in self.duty:
            line += ["--gpu-duty", self.duty[name]]
        (self.folder / name).mkdir()
        with (self.folder / name / "output.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                line, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.started[name] = self.now()
        self.mark(f"{name} starts")

    def start_page(self, names: list[str]) -> None:
        """Serve a page about these peers while the demo runs, and print its address."""
        line = [sys.executable, "-m", "p2p_diloco", "page", *names, "--no-samples"]
        with (self.folder / "page.log").open("wb") as log:
            subprocess.Popen(
                line, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        give_up_at = time.monotonic() + 10.0
        while not (text := (self.folder / "page.log").read_text(errors="replace").strip()):
            if time.monotonic() > give_up_at:
                return
            time.sleep(0.1)
        self.mark(text)

    def kill(self, name: str) -> None:
        if self.processes[name].poll() is not None:
            raise DemoError(f"{name} exited before it was killed")
        self.processes[name].kill()
        self.processes[name].wait()
        self.killed[name] = self.now()
        self.mark(f"{name} is killed (kill -9)")

    def wait(self, share: float, what: str = "", until: Callable[[], bool] = lambda: True) -> None:
        """Show the progress until this share of the demo is over and what it waits for is there."""
        begin, next_line = self.joining_began + share * self.seconds, self.now() + 3.0
        while self.now() < begin or not until():
            self.check()
            if self.now() > begin + PATIENCE * self.seconds:
                raise DemoError(f"waited in vain for {what}")
            if self.living() and next_line < self.now() < self.joining_began + self.seconds:
                next_line = self.now() + 6.0
                seen = [self.status(name) for name in self.living()]
                ready = sum(status.get("ready", False) for status in seen)
                losses = [status["anchor_loss"] for status in seen if status.get("anchor_loss")]
                loss = f"; loss of the shared model: {min(losses):.2f}" if losses else ""
                self.mark(f"  {ready} of {len(seen)} volunteers train{loss}")
            time.sleep(1.0)

    def check(self) -> None:
        """Note the memory, and refuse to go on without a peer that has failed."""
        memory = 0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just exited
                used = process.memory_full_info()
                memory += getattr(used, "pss", used.rss)  # pss, if the system has it, counts shared pages once
        self.peak_memory = max(self.peak_memory, memory)
        for name, peer in self.processes.items():
            if name not in self.killed and peer.poll() not in (None, 0):
                last = self.output(name)[-400:]
                raise DemoError(f"{name} exited with code {peer.returncode} after printing {last!r}")

    def living(self) -> list[str]:
        return [name for name, peer in self.processes.items() if name != BOOTSTRAP and peer.poll() is None]

    def are_ready(self, names: list[str]) -> bool:
        return all(self.status(name).get("ready") for name in names)

    def status(self, name: str) -> dict[str, Any]:
        """Return what `p2p-diloco status --json` would print; empty before the peer's first status."""
        path = self.folder / name / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def losses(self, *names: str) -> list[tuple[float, float]]:
        """Return when these peers measured the shared model on held-out text, and its loss, oldest first."""
        paths = [self.folder / name / "events.jsonl" for name in names]
        events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        measured = [event for event in events if event["topic"] == "evaluation"]
        return sorted((event["time"] - self.began, event["figures"]["anchor_loss"]) for event in measured)

    def output(self, name: str) -> str:
        return (self.folder / name / "output.log").read_text(errors="replace")

    def close(self) -> None:
        """Kill everything that still runs."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while left := psutil.Process().children(recursive=True):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)


def report(swarm: Swarm, json_path: Path | None) -> None:
    """Print a table, a plot, generated text and what the demo took, and write the figures.

    Raises:
        DemoError: the volunteers that were not killed hold different bytes, or the model has learnt too little.
    """
    swarm.check()
    peers = {name: swarm.status(name) for name in swarm.started if name != BOOTSTRAP}
    survivors = [name for name in peers if name not in swarm.killed]
    digests = {peers[name]["state_digest"] for name in survivors}
    sent = sum((Counter(peer["bytes_sent"]) for peer in peers.values()), Counter[str]())
    losses = swarm.losses(*peers)
    parameter_cycles = sum(peer["parameters"] * peer["vector_cycles"] for peer in peers.values())
    peer_seconds = sum(peer["updated"] - swarm.began - swarm.started[name] for name, peer in peers.items())
    loss, bigrams = max(swarm.losses(name)[-1][1] for name in survivors), bigram_entropy(standard_library())
    figures = {
        "heads_equal": len(digests) == 1 and "" not in digests,
        "participation": peers[survivors[0]]["participation"],
        "bytes_sent_per_parameter_per_cycle": sent["vectors"] / parameter_cycles,
        "control_bytes_per_second": sent["control"] / peer_seconds,
        "loss_first": losses[0][1],
        "loss_last": loss,
        "bigram_entropy": bigrams,
        "planned_steps": peers[survivors[0]]["planned_steps"],
        "cycle_steps": {name: peer["cycle_steps"] for name, peer in peers.items()},
        "inner_steps": sum(peer["inner_steps"] for peer in peers.values()),
        "megabytes_sent": sent.total() / 1e6,
        "peak_memory_megabytes": swarm.peak_memory / 1e6,
    }
    print(f"\n{'':14}{'end':18}{'steps':>6}{'a cycle':>9}{'own loss':>10}{'included':>10}   final bytes")
    for name, peer in peers.items():
        end = f"killed at {swarm.killed[name]:.0f} s" if name in swarm.killed else peer["phase"]
        keys = ("cycle_steps", "local_loss", "participation")
        pace, own, share = (peer[key] if peer[key] is not None else math.nan for key in keys)
        print(
            f"{name:14}{end:18}{peer['inner_steps']:6}{pace:9.0f}{own:10.2f}{share:10.0%}   {peer['state_digest'][:12]}"
        )
    moments = {swarm.started[name]: f"{name} starts" for name in [*peers][-1:]}
    moments |= {when: f"{name} is killed" for name, when in swarm.killed.items()}
    print("\nheld-out loss of the shared model, nats per byte", *plot(losses, bigrams, moments), sep="\n")
    words = ("--bytes", "300", "--seed", "0", "--state-directory", survivors[0])
    print(f"\ntext that the model generates after 'def ':\n{swarm.command('sample', 'def ', *words)}")
    memory, traffic = f"{swarm.peak_memory / 1e9:.1f} GB of memory", f"{sent.total() / 1e6:.0f} MB of traffic"
    print(f"{len(swarm.started)} peers took {swarm.now():.0f} s, {memory} and {traffic} between them.")
    if json_path:
        json_path.write_text(json.dumps(figures | {"seconds": swarm.now()}, indent=2) + "\n")
    if not figures["heads_equal"]:
        raise DemoError(f"the {len(survivors)} survivors hold different bytes")
    if loss >= bigrams:
        raise DemoError(f"the loss is {loss:.2f}, and a model of pairs of bytes reaches {bigrams:.2f}")
    print(f"The {len(survivors)} survivors hold the same bytes; the loss is {loss:.2f}, below that of pairs of bytes.")


def plot(losses: list[tuple[float, float]], bigrams: float, moments: dict[float, str], width: int = 80) -> list[str]:
    """Return the lines of a plot of loss over time, with the bigram entropy and what happened when."""
    times, heights = zip(*losses, strict=True)
    begin, end = min(*times, *moments), max(times)
    columns = np.interp(np.linspace(begin, end, width), times, heights, left=0.0)
    lines = []
    for low in np.arange(math.ceil(max(heights)) - 0.5, math.floor(min(heights)) - 0.5, -0.5):
        blank, label = ("╌", f" pairs of bytes: {bigrams:.2f}") if low <= bigrams < low + 0.5 else (" ", "")
        eighths = np.rint(np.clip((columns - low) * 16, 0, 8)).astype(int)
        lines.append(f"{low:5.1f} │{''.join(f'{blank}▁▂▃▄▅▆▇█'[height] for height in eighths)}{label}")
    places = {round((when - begin) / (end - begin) * (width - 1)) for when in moments}
    lines.append(f"      └{''.join('▲' if place in places else '─' for place in range(width))}")
    legend = ", ".join(f"{what} ({when:.0f} s)" for when, what in moments.items())
    return [*lines, f"       {begin:.0f} s … {end:.0f} s; ▲ {legend}"]


def standard_library() -> bytes:
    """Return source of the standard library, on which the model trains; its top folder is enough for statistics."""
    return b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def bigram_entropy(text: bytes) -> float:
    """Return H(next byte | byte) in nats: the least loss of a model that knows only pairs of bytes."""
    codes = np.frombuffer(text, np.uint8).astype(int)
    pairs = np.bincount(codes[:-1] * 256 + codes[1:], minlength=65_536).reshape(256, 256)
    first, second = np.nonzero(pairs)
    counts = pairs[first, second]
    return float(counts @ np.log(pairs.sum(axis=1)[first] / counts) / counts.sum())


if __name__ == "__main__":
    sys.exit(main())
