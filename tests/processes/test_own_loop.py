"""Custom loops in real processes over libp2p, with only public names."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import p2p_diloco
from p2p_diloco.session.start import MOST_RESTARTS
from tests.processes.own_loop_peer import make_model

pytestmark = [pytest.mark.wall_clock, pytest.mark.long]

HERE = Path(__file__).parent
ROUND_SECONDS = 1.0
PATIENCE_SECONDS = 120.0


class Loops:
    """Processes that train one small model, each with its own folder."""

    def __init__(self, folder: Path, until_round: int) -> None:
        self._folder = folder
        self._until_round = until_round
        self.run = folder / "run.toml"
        rounds = {"round_seconds": ROUND_SECONDS, "fragments": 2, "spans_per_fragment": 2}
        p2p_diloco.new_run(self.run, make_model(), rounds=rounds)
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *, founds: bool = False, via: str | None = None, **order: Any) -> None:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        words = {
            "folder": str(folder),
            "run": str(self.run) if founds else None,
            "invite": self.wait_for(via, "invite") if via is not None else None,
            "seed": len(self._processes),
            "until_round": self._until_round,
            **order,
        }
        (folder / "order.json").write_text(json.dumps(words))
        self._processes[name] = subprocess.Popen(
            [sys.executable, str(HERE / "own_loop_peer.py"), str(folder / "order.json")],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def said(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name / "said.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, name: str | None, key: str, beyond: int = 0) -> Any:
        """Wait until a loop has reported a value that is not empty (and greater); return it."""
        assert name is not None
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            found = [line[key] for line in self.said(name) if line.get(key)]
            if found and (not beyond or found[-1] > beyond):
                return found[-1]
            if self._processes[name].poll() is not None:
                raise AssertionError(f"{name} ended: {self.errors(name)}")
            time.sleep(0.1)
        raise AssertionError(f"{name} did not say {key} beyond {beyond}: {self.said(name)[-3:]}")

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.communicate()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def errors(self, name: str) -> str:
        return self._processes[name].communicate(timeout=PATIENCE_SECONDS)[1]

    def end(self, name: str) -> tuple[int, str]:
        """Wait for a loop's end; return its exit code and its output."""
        said = self.errors(name)
        return self._processes[name].returncode, said

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Loops]:
    loops = Loops(tmp_path, until_round=90)
    yield loops
    loops.close()


def trained_loop(run: Path, rate: float, **ends: Any) -> list[float]:
    """Found a run of a model with BatchNorm and train it; return the shared model's first and last held-out loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 1))
    numbers = 3 * torch.rand(4096, 8)
    batches = itertools.cycle(numbers.split(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    p2p_diloco.new_run(run, model, rounds={"round_seconds": 1.0, "fragments": 2}, **ends)

    def held_out(swarm: p2p_diloco.Swarm) -> float:
        with swarm.anchor(), torch.no_grad():
            loss = nn.functional.mse_loss(model.eval()(numbers), numbers.sum(dim=1, keepdim=True)).item()
            model.train()
        return loss

    settings = {"state_directory": run.with_suffix(""), "host_maddrs": "/ip4/127.0.0.1/tcp/0", "no_port_mapping": True}
    with p2p_diloco.found(run, model, optimizer, until_round=12, settings=settings) as swarm:
        first = held_out(swarm)
        for batch in batches:
            nn.functional.mse_loss(model(batch), batch.sum(dim=1, keepdim=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            if not swarm.step(tokens=len(batch)):
                break
        last = held_out(swarm)
        swarm.export(run.with_suffix(".export"))
    return [first, last]


def test_a_loop_continues_with_half_the_rate_where_the_other_ended(tmp_path: Path) -> None:
    first, last = trained_loop(tmp_path / "old.toml", 0.002)
    assert last < 0.2 * first
    for number, source in enumerate(("old", "old.export")):
        begin, end = trained_loop(tmp_path / f"new{number}.toml", 0.001, continue_from=tmp_path / source)
        print(f"from {source}: the old run ends with {last:.4f}, the new one goes from {begin:.4f} to {end:.4f}")
        assert begin == pytest.approx(last, rel=0.01)
        assert end < begin


def end_together(loops: Loops, names: list[str]) -> None:
    """Check that all end by themselves, hold the same bytes, and have learnt."""
    for name in names:
        code, said = loops.end(name)
        # Python's own tracker sometimes warns of a semaphore of a spawned worker that is already gone.
        said = "".join(line for line in said.splitlines(keepends=True) if "resource_tracker" not in line)
        assert (code, said) == (0, ""), f"{name}: {said}"
    assert len({loops.said(name)[-1]["digest"] for name in names}) == 1
    for name in names:
        losses = [line["loss"] for line in loops.said(name) if "loss" in line]
        assert losses[-1] < 0.1 * loops.said(names[0])[0]["loss"]


def test_loops_train_together_and_a_killed_one_returns(loops: Loops) -> None:
    loops.start("ada", founds=True)
    loops.start("ben", via="ada")
    loops.start("cleo", via="ada", autocast=True)
    loops.wait_for("ben", "entries", beyond=4)
    loops.kill("ben")
    loops.start("ben", via="ada")
    end_together(loops, ["ada", "ben", "cleo"])
    for name in ("ada", "ben", "cleo"):
        last = [line for line in loops.said(name) if "step_seconds" in line][-1]
        # Another thread may run between the two clock readings, for one switch interval per 256 calls on average.
        switched = 2 * sys.getswitchinterval() / 256
        assert last["step_seconds"] == pytest.approx(last["call_seconds"], rel=0.2, abs=switched)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_loop_with_data_workers_can_be_killed_and_restarted_at_once(loops: Loops, context: str) -> None:
    """The workers live a little longer; they must hold neither the identity nor the port."""
    loops.start("ada", founds=True)
    loops.start("ben", via="ada", workers=2, context=context)
    loops.wait_for("ben", "entries", beyond=4)
    loops.kill("ben")
    loops.start("ben", via="ada", workers=2, context=context)
    end_together(loops, ["ada", "ben"])


def test_a_compiled_model_takes_part_beside_one_that_is_not_compiled(loops: Loops) -> None:
    loops.start("ada", founds=True)
    loops.start("ben", via="ada", compiles=True)
    end_together(loops, ["ada", "ben"])


def test_a_loop_that_stops_stepping_does_no_harm_and_follows_the_others(tmp_path: Path) -> None:
    loops = Loops(tmp_path, until_round=75)
    try:
        loops.start("ada", founds=True)
        loops.start("ben", via="ada")
        loops.start("cleo", via="ada", pause_at=15, pause_seconds=45.0)
        loops.wait_for("cleo", "entries", beyond=4)
        end_together(loops, ["ada", "ben", "cleo"])
        events = map(json.loads, (tmp_path / "ada" / "events.jsonl").read_text().splitlines())
        rounds = [event["figures"] for event in events if event["topic"] == "round"]
        later = [figures for figures in rounds if figures["round"] >= 20]
        assert sum(figures["num_entries"] for figures in later) >= 0.9 * sum(figures["num_spans"] for figures in later)
    finally:
        loops.close()


def p2pd_of(pid: int) -> psutil.Process:
    (found,) = [child for child in psutil.Process(pid).children(recursive=True) if child.name() == "p2pd"]
    return found


def test_an_error_that_ends_a_loop_is_raised_in_its_own_thread(tmp_path: Path) -> None:
    """The libp2p daemon is started again three times."""
    loops = Loops(tmp_path, until_round=200)
    try:
        play_errors(loops, tmp_path)
    finally:
        loops.close()


def play_errors(loops: Loops, tmp_path: Path) -> None:
    loops.start("ada", founds=True)
    loops.start("ben", via="ada")
    for times in range(MOST_RESTARTS + 1):
        loops.wait_for("ben", "entries", beyond=loops.said("ben")[-1]["entries"] + 2 if times else 2)
        print(f"after {times} ends of the daemon", loops.said("ben")[-1])
        p2pd_of(loops.pid("ben")).kill()
    code, said = loops.end("ben")
    assert code == 1
    assert "DaemonEnded" in said
    assert "libp2p daemon" in said
    (tmp_path / "ada" / "fail").touch()
    began = time.monotonic()
    code, said = loops.end("ada")
    assert code == 1
    assert "RuntimeError: the caller's own error" in said
    assert time.monotonic() - began < 20.0, "it leaves within ten seconds"


EXAMPLES = HERE.parents[1] / "examples" / "own_loop"


def test_the_notebook_runs_cell_by_cell_and_trains_on_between_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each cell runs in one namespace while an event loop runs in its thread, as in Jupyter's kernel."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    names: dict[str, Any] = {}

    async def run(*names_of_cells: str) -> None:
        for name in names_of_cells:
            exec(compile(cells[name], f"cell {name}", "exec"), names)
            await asyncio.sleep(0)

    async def wait_for_phase(phase: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while names["swarm"].status.phase != phase:
            assert time.monotonic() < until, names["swarm"].status
            await asyncio.sleep(0.1)

    async def read() -> None:
        await run("settings")
        names["settings"] |= {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "no_port_mapping": True}
        await run("found", "step")
        os.chdir(tmp_path.parent)  # as a later cell may do
        await wait_for_phase("not stepping")
        swarm, until = names["swarm"], time.monotonic() + PATIENCE_SECONDS
        before = swarm.status.entries_absorbed
        while swarm.status.entries_absorbed == before and time.monotonic() < until:
            await run("step")
            await asyncio.sleep(1.0)
        assert (swarm.status.phase, swarm.status.entries_absorbed > before) == ("training", True)
        await run("idle", "leave")

    asyncio.run(read())
    status = names["swarm"].status
    assert (status.phase, len(status.state_digest)) == ("finished", 64)
    assert list((tmp_path / "state-notebook").glob("*/checkpoint-*.safetensors"))
    said = capsys.readouterr().out
    assert f"others join with: p2pdiloco://{status.run}?" in said
    assert f"finished with state {status.state_digest[:16]}" in said
    assert list(cells) == ["settings", "found", "step", "idle", "leave"], "all of them ran"
