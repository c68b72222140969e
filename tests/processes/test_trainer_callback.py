"""transformers' Trainer in real processes over libp2p. Skipped without transformers: `make examples` brings it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import p2p_diloco
from tests.status.kept_events import read_events

pytest.importorskip("transformers", reason="needs transformers: make examples brings it")
pytest.importorskip("accelerate", reason="needs accelerate: make examples brings it")

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]

SCRIPT = Path(__file__).parent / "trainer_peer.py"
PATIENCE_SECONDS = 300.0
UNTIL_ROUND, NEVER = 180, 100_000


class Trainers:
    """Processes that train one small model, each with its own folder."""

    def __init__(self, folder: Path) -> None:
        from tests.processes.trainer_peer import make_model

        self.folder = folder
        self.run = folder / "run.toml"
        rounds = {"round_seconds": 1.0, "fragments": 2, "spans_per_fragment": 2}
        p2p_diloco.new_run(self.run, make_model(), rounds=rounds)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, via: str | None = None, **order: Any) -> None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        words = {
            "folder": str(folder),
            "run": None if via else str(self.run),
            "invite": self.wait_for(via, "invite") if via else None,
            "until_round": UNTIL_ROUND,
            **order,
        }
        (folder / "order.json").write_text(json.dumps(words))
        with (folder / "errors.log").open("w") as errors:  # a pipe that nobody reads would stop the Trainer
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder / "order.json")],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def said(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "said.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, name: str, key: str, beyond: int = 0) -> Any:
        """Wait until a Trainer has reported a value that is not empty (and greater); return it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            found = [line[key] for line in self.said(name) if line.get(key)]
            if found and (not beyond or found[-1] > beyond):
                return found[-1]
            assert self.processes[name].poll() is None, f"{name} ended: {self.errors(name)}"
            time.sleep(0.1)
        raise AssertionError(f"{name} did not say {key} beyond {beyond}: {self.said(name)[-3:]}")

    def end(self, name: str) -> tuple[int, str]:
        """Wait for the end; return exit code and standard error."""
        code = self.processes[name].wait(PATIENCE_SECONDS)
        return code, self.errors(name)

    def errors(self, name: str) -> str:
        return (self.folder / name / "errors.log").read_text()

    def losses(self, name: str, key: str) -> list[float]:
        return [line[key] for line in self.said(name) if key in line]

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    trainers = Trainers(tmp_path)
    yield trainers
    trainers.close()


def test_two_trainers_end_with_equal_bytes_and_a_lower_loss_and_a_killed_one_resumes(trainers: Trainers) -> None:
    trainers.start("ada")
    trainers.start("ben", via="ada", autocast=True)
    trainers.wait_for("ben", "entries", beyond=4)
    trainers.wait_for("ben", "step", beyond=40)  # the first checkpoint is written
    trainers.processes["ben"].kill()
    trainers.processes["ben"].wait()
    num_said = len(trainers.said("ben"))
    trainers.start("ben", via="ada", autocast=True, resumes=True)
    for name in ("ada", "ben"):
        code, said = trainers.end(name)
        assert code == 0, said
    ends = {name: trainers.said(name)[-1]["digest"] for name in ("ada", "ben")}
    assert ends["ada"] == ends["ben"] != ""
    resumed = next(line["step"] for line in trainers.said("ben")[num_said:] if "loss" in line)
    assert resumed > 40, "the Trainer continues at its checkpoint"
    for name in ("ada", "ben"):
        losses, evaluated = trainers.losses(name, "loss"), trainers.losses(name, "eval_loss")
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, of the shared model {evaluated[-1]:.3f}")
        assert losses[-1] < 0.5 * trainers.losses("ada", "loss")[0]
        assert evaluated[-1] < 0.5 * trainers.losses("ada", "loss")[0]
    print(f"state {ends['ada'][:16]} at both")


@pytest.mark.parametrize("how", ["Ctrl-C", "an exception"])
def test_a_trainer_that_is_interrupted_leaves_the_run_and_the_other_goes_on(trainers: Trainers, how: str) -> None:
    trainers.start("ada", until_round=NEVER)
    trainers.start("ben", via="ada", until_round=NEVER, fails_beyond=4 if how == "an exception" else None)
    trainers.wait_for("ben", "entries", beyond=4)
    began = time.monotonic()
    if how == "Ctrl-C":
        trainers.processes["ben"].send_signal(signal.SIGINT)
    code, said = trainers.end("ben")
    assert code != 0
    assert ("KeyboardInterrupt" if how == "Ctrl-C" else "the caller's own error") in said
    if how == "Ctrl-C":
        print(f"left after {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 15.0
    (finished,) = read_events(trainers.folder / "ben", "finished")
    assert finished.text
    before = trainers.said("ada")[-1]["entries"]
    trainers.wait_for("ada", "entries", beyond=before + 4)
