"""Every example runs with the commands of its README, and every notebook from the first cell to the last.

`make examples` runs these and prints how long each took. They need the packages of the extras.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.status.status_file import PeerStatus, read_status

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(600)]

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = PROJECT / "examples"
MOST_SECONDS = 300.0
PLACEHOLDER = "p2pdiloco://…"
INVITE = re.compile(r"p2pdiloco://[0-9a-f]{64}\?[^\s\"']+")
LEAST_ENTRIES = 8

IN_ROOT = {"local-swarm", "two-machines"}
"""Examples whose commands are for the root of the project; the others are for the folder of the example."""
ENDS = {"trainer": "", "lightning": "", "ranks": " --rounds 60"}
"""Examples whose training ends by itself, with what makes it end; the others get a Ctrl-C. Under torchrun no program
ends well after a Ctrl-C."""
PROGRAM = re.compile(r"^(\.\./\.\./)?\.venv(-extras)?/bin/", re.M)
WITH_COMMANDS = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md") if PROGRAM.search(path.read_text()))
NOTEBOOKS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.ipynb"))


def commands_of(example: str) -> list[str]:
    """Return the lines of a README's code blocks that start a program; a printed sample of one is left out."""
    blocks = re.findall(r"^```\n(.*?)^```", (EXAMPLES / example / "README.md").read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if PROGRAM.match(line) and "<run id>" not in line]


class Playground:
    """A copy of the examples beside the environments, so that the commands of a README find what they name."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("state-*", "run.toml", "*.key"))
        for name in (".venv", ".venv-extras"):
            if (PROJECT / name).exists():
                (folder / name).symlink_to(PROJECT / name)
        self.logs: list[Path] = []
        self.running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, command: str, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a command as a machine of its own: with a state directory that no other command has."""
        number = len(self.logs)
        kept = {name: text for name, text in os.environ.items() if not name.startswith("P2P_DILOCO_")}
        own = {
            "P2P_DILOCO_STATE_DIRECTORY": str(self.root / f"machine-{number}"),
            "P2P_DILOCO_NO_PORT_MAPPING": "true",
            "OMP_NUM_THREADS": "1",  # several machines share this one
        }
        self.logs.append(self.root / f"{number}.log")
        with self.logs[-1].open("wb") as log:
            process = subprocess.Popen(
                shlex.split(command), cwd=folder, env=kept | own, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.running.append((command, process))
        return process, self.logs[-1]

    def wait_for(self, what: str, is_so: Any, until: float) -> None:
        while not is_so():
            for command, process in self.running:
                assert process.poll() in (None, 0), f"{command} ended with {process.returncode}\n{self.said()}"
            assert time.monotonic() < until, f"waited in vain for {what}\n{self.said()}"
            time.sleep(0.25)

    def invite(self) -> str:
        found = [match[0] for log in self.logs for match in INVITE.finditer(log.read_text(errors="replace"))]
        return found[0] if found else ""

    def trainers(self) -> list[PeerStatus]:
        """Return the status of every peer that trains."""
        found = [read_status(path.parent) for path in self.root.rglob("status.json")]
        return [status for status in found if status is not None and status.role == "trainer"]

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs)

    def close(self) -> None:
        for _, process in self.running:
            process.send_signal(signal.SIGINT)
        for _, process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30.0)
            process.kill()
            process.wait()


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    playground = Playground(tmp_path)
    yield playground
    playground.close()


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: make examples brings it")


@pytest.mark.parametrize("example", WITH_COMMANDS)
def test_an_example_runs_with_the_commands_of_its_readme(example: str, playground: Playground) -> None:
    if ".venv-extras" in (EXAMPLES / example / "README.md").read_text() and not (PROJECT / ".venv-extras").exists():
        pytest.skip("needs the packages of the extras: make examples brings them")
    began = time.monotonic()
    until = began + MOST_SECONDS
    folder = playground.root if example in IN_ROOT else playground.root / "examples" / example
    peers = 0
    for command in commands_of(example):
        line = command.replace("192.0.2.10", "127.0.0.1")  # the address of machine A in the documents
        if PLACEHOLDER in line:
            playground.wait_for("an invite", playground.invite, until)
            line = line.replace(PLACEHOLDER, playground.invite())
        trains = " join " in line or "train.py" in line
        line += ENDS.get(example, "") if trains else ""
        peers += trains
        process, _ = playground.start(line, folder)
        if not trains and " bootstrap " not in line:
            playground.wait_for(f"the end of {line}", lambda: process.poll() is not None, until)  # noqa: B023
    assert peers >= 2
    playground.wait_for(
        "entries at all peers",
        lambda: [status.entries_absorbed >= LEAST_ENTRIES for status in playground.trainers()].count(True) == peers,
        until,
    )
    if example not in ENDS:
        for _, process in playground.running:
            process.send_signal(signal.SIGINT)
    playground.wait_for("the end", lambda: all(process.poll() is not None for _, process in playground.running), until)
    assert [process.returncode for _, process in playground.running] == [0] * len(playground.running)
    if example in ENDS:
        assert len({status.state_digest for status in playground.trainers()}) == 1, "the same bytes"
    print(f"examples/{example}: {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def local_run(playground: Playground) -> Iterator[str]:
    """Yield the invite of a run of the built-in model with a bootstrap peer and a trainer."""
    program, until = shlex.join([sys.executable, "-m", "p2p_diloco"]), time.monotonic() + MOST_SECONDS
    new, _ = playground.start(f"{program} new --rounds.round_seconds 2 --rounds.fragments 2", playground.root)
    playground.wait_for("a run file", lambda: new.poll() is not None, until)
    playground.start(f"{program} bootstrap run.toml --host-maddrs /ip4/127.0.0.1/tcp/0", playground.root)
    playground.wait_for("an invite", playground.invite, until)
    invite = playground.invite()
    playground.start(f'{program} join "{invite}" --host-maddrs /ip4/127.0.0.1/tcp/0', playground.root)
    yield invite


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_runs_from_the_first_cell_to_the_last(
    notebook: str, playground: Playground, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("nbclient", "nbformat", "ipykernel")
    import nbclient
    import nbformat

    began = time.monotonic()
    path = playground.root / "examples" / notebook
    document = nbformat.read(path, as_version=4)
    with contextlib.ExitStack() as stack:
        if notebook.startswith("colab/"):
            monkeypatch.setenv("INVITE", stack.enter_context(local_run(playground)))
        client = nbclient.NotebookClient(
            document, timeout=MOST_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
        )
        client.execute()
    (state,) = (folder for folder in path.parent.iterdir() if (folder / "status.json").exists())
    status = read_status(state)
    assert status is not None
    assert status.phase == "finished", json.dumps(document, indent=1)[-3000:]
    assert status.entries_absorbed or "colab/" not in notebook
    print(f"examples/{notebook}: {time.monotonic() - began:.0f} s")
