"""Peers on a GPU beside peers on the processor, in one run and with the same bytes. Skipped where there is no GPU.

`make own-loop` runs these and prints the figures.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.test_own_loop import Loops, end_together

pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch knows as cuda"),
]

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
PROGRAM = (sys.executable, "-m", "p2p_diloco")
HOME = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--no-port-mapping")
ROUNDS = "45"
PATIENCE_SECONDS = 240.0


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Loops]:
    loops = Loops(tmp_path, until_round=50)
    yield loops
    loops.close()


def test_loops_on_a_gpu_and_on_the_processor_train_together_and_one_returns_after_a_kill(loops: Loops) -> None:
    loops.start("processor", founds=True)
    loops.start("plain", via="processor", device="cuda")
    loops.start("halves", via="processor", device="cuda", autocast=True)
    loops.start("scaled", via="processor", device="cuda", autocast=True, scales=True)
    loops.start("compiled", via="processor", device="cuda", compiles=True, compiler="inductor")
    loops.wait_for("plain", "entries", beyond=4)
    loops.kill("plain")
    loops.start("plain", via="processor", device="cuda")
    end_together(loops, ["processor", "plain", "halves", "scaled", "compiled"])


def run_until(what: str, seconds: float, is_so: Any) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"waited {seconds:.0f} s in vain until {what}"
        time.sleep(0.2)


def test_the_join_command_selects_the_gpu_and_ends_with_the_bytes_of_a_processor(tmp_path: Path) -> None:
    """Train the built-in model with the commands of the README on one machine."""
    paths = filter(None, (str(PROJECT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run, running = tmp_path / "run.toml", []

    def start(name: str, *words: str) -> Path:
        log = tmp_path / f"{name}.log"
        place = ("--state-directory", str(tmp_path / name), *HOME)
        with log.open("w") as file:
            running.append(
                subprocess.Popen([*PROGRAM, *words, *place], stdout=file, stderr=file, env=environment, cwd=tmp_path)
            )
        return log

    def status(name: str) -> dict[str, Any]:
        words = ("status", "--state-directory", str(tmp_path / name), "--json")
        done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, env=environment)
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found

    subprocess.run(
        [*PROGRAM, "new", str(run), "--rounds.round-seconds", "2", "--rounds.fragments", "2",
         "--rounds.spans-per-fragment", "2"],
        check=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    try:
        log = start("bootstrap", "bootstrap", str(run), "--until-round", ROUNDS)
        run_until("the bootstrap prints the join command", 60.0, lambda: "\n" in log.read_text())
        invite = shlex.split(log.read_text().splitlines()[0])[-1]
        logs = {
            "gpu": start("gpu", "join", invite, "--until-round", ROUNDS),
            "cpu": start("cpu", "join", invite, "--device", "cpu", "--until-round", ROUNDS),
        }

        def story() -> str:
            return "\n\n".join(path.read_text()[-3000:] for path in (log, *logs.values()))

        rates: dict[str, float] = {}
        give_up = time.monotonic() + PATIENCE_SECONDS
        while any(process.poll() is None for process in running):
            for name in logs:
                rates[name] = max(rates.get(name, 0.0), status(name).get("tokens_per_second") or 0.0)
            time.sleep(2.0)
            assert time.monotonic() < give_up, story()
        assert [process.returncode for process in running] == [0, 0, 0], story()
        ended = {name: status(name) for name in logs}
        assert ended["gpu"]["state_digest"] == ended["cpu"]["state_digest"] != "", story()
        assert all(ended[name]["participation"] > 0.5 for name in logs), story()
        assert re.search(r"trains on cuda .*; contributions are encoded there", logs["gpu"].read_text()), story()
        assert "trains on the processor" in logs["cpu"].read_text()
        for name, rate in rates.items():
            print(f"{name}: {rate:,.0f} tokens/s at best, participation {100 * ended[name]['participation']:.1f} %")
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"width": 320, "layers": 8, "batch": 32, "uplink": "20mbit", "round_seconds": 4.0}, id="10M"),
        pytest.param({"width": 768, "layers": 14, "batch": 64, "uplink": "200mbit", "round_seconds": 4.0}, id="100M"),
    ],
)
def test_a_loop_on_a_gpu_keeps_its_speed_in_a_swarm(tmp_path: Path, kind: dict[str, Any]) -> None:
    """Print the share of its steps that a loop keeps, compared with those before it joins and after it leaves."""
    around = {**kind, "context": 256, "fragments": 2, "folder": str(tmp_path), "text": str(PROJECT / "p2p_diloco")}
    own = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "no_port_mapping": True, "max_upload": kind["uplink"]}
    orders = {
        "measured": {"measures": True, "device": "cuda", "seed": 1, "windows": 2},
        "partner": {"measures": False, "device": "cpu", "seed": 2, "batch": 1, "context": 256},
    }
    running = {}
    for name, order in orders.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**around, "settings": {**own, "state_directory": str(tmp_path / name)}, **order}))
        running[name] = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_speed_peer.py"), str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        said = {name: process.communicate(timeout=PATIENCE_SECONDS) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    assert [process.returncode for process in running.values()] == [0, 0], said
    figures = json.loads(said["measured"][0])
    print(f"{figures['parameters'] / 1e6:.0f}M parameters at {kind['uplink']}: {json.dumps(figures)}")
    assert figures["entries"] > 0
