"""The wheel and the sdist, as a user without a checkout gets them: built, installed, and training.

`make examples` runs these. PIP_FLAGS in the environment holds further arguments for pip; INSTALLED_PROGRAMS names the
folder of programs of an environment that has the wheel, as `make release` makes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from release.archives import check_sdist, check_wheel, read_project
from tests.status.kept_events import read_events

pytestmark = [pytest.mark.wall_clock, pytest.mark.long, pytest.mark.timeout(3600)]

PROJECT = Path(__file__).resolve().parent.parent.parent
PATIENCE_SECONDS = 300.0
NUM_ROUNDS = 3


def environment(**more: str) -> dict[str, str]:
    """Return variables that point to no checkout and to none of the user's settings."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("P2P_DILOCO_", "PYTHON"))}
    return kept | more


def run(*words: str | Path, cwd: Path, **more: str) -> str:
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(map(str, words))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, the wheel built from it, and in `direct` the wheel built from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--outdir")
    paths = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    run(*build, folder, PROJECT, cwd=folder, **paths)
    run(*build, folder / "direct", "--wheel", PROJECT, cwd=folder, **paths)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_sdist_and_the_checkout_make_the_same_wheel(built: Path, wheel: Path) -> None:
    assert wheel.read_bytes() == (built / "direct" / wheel.name).read_bytes()


def test_the_archives_hold_what_a_release_needs(built: Path, wheel: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    project = read_project(PROJECT)
    assert [*check_wheel(wheel, project), *check_sdist(sdist, project)] == []


def test_the_sdist_holds_the_files_that_its_readme_and_makefile_name(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    links = re.findall(r"\]\(([\w./-]+)\)", (PROJECT / "README.md").read_text())
    assert {"Makefile", "constraints.txt", "tests/conftest.py"} <= held
    assert [link for link in links if not any(name == link or name.startswith(f"{link}/") for name in held)] == []


def test_the_metadata_is_valid_for_an_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name)
    metadata = Metadata.from_email(text, validate=True)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert str(message_from_bytes(text).get_payload()).startswith("# p2p_diloco\n")
    assert set(metadata.provides_extra or ()) == set("dev hf lightning notebooks page plots track web".split())


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the wheel and its dependencies."""
    if "INSTALLED_PROGRAMS" in os.environ:
        return Path(os.environ["INSTALLED_PROGRAMS"])
    wheel = request.getfixturevalue("wheel")
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    words = [
        "install",
        "--quiet",
        "-c",
        PROJECT / "constraints.txt",
        *shlex.split(os.environ.get("PIP_FLAGS", "")),
        wheel,
    ]
    run(folder / "bin" / "python", "-m", "pip", *words, cwd=folder)
    return folder / "bin"


def test_it_founds_a_run_and_the_printed_command_trains_and_leaves(installed: Path, tmp_path: Path) -> None:
    with shell(installed, tmp_path) as start:
        assert start("p2p-diloco --version").wait() == 0
        assert start("p2p-diloco new --rounds.round_seconds 5").wait() == 0
        start("p2p-diloco bootstrap run.toml --host-maddrs /ip4/127.0.0.1/tcp/0 --state-directory boot", "boot.log")
        log = tmp_path / "boot.log"
        wait_for("a join line", lambda: "\n" in log.read_text(), log)
        line = log.read_text().splitlines()[0]
        assert line.startswith('p2p-diloco join "p2pdiloco://')
        began = time.time()
        joined = start(line, "join.log")
        wait_for(f"{NUM_ROUNDS} rounds", lambda: len(entries(tmp_path / "peer")) >= NUM_ROUNDS, tmp_path / "join.log")
        print(f"the first entry after {entries(tmp_path / 'peer')[0] - began:.0f} s")
        assert start("p2p-diloco status").wait() == 0
        assert "p2p-diloco join" in (tmp_path / "output.log").read_text()
        assert start("p2p-diloco leave").wait() == 0
        assert joined.wait(60.0) == 0


def entries(folder: Path) -> list[float]:
    """Return the times at which a peer closed rounds with entries."""
    return [event.time for event in read_events(folder, "round") if event.figures["num_entries"]]


@contextlib.contextmanager
def shell(programs: Path, folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Yield a shell in `folder` with `programs` on its path; processes still running at the end get a Ctrl-C."""
    variables = environment(
        PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
        P2P_DILOCO_STATE_DIRECTORY=str(folder / "peer"),
        P2P_DILOCO_NO_PORT_MAPPING="true",
        P2P_DILOCO_DEVICE="cpu",
    )
    running: list[subprocess.Popen[bytes]] = []

    def start(line: str, log: str = "output.log") -> subprocess.Popen[bytes]:
        with (folder / log).open("ab") as output:
            running.append(
                subprocess.Popen(
                    ["/bin/sh", "-c", f"exec {line}"], cwd=folder, env=variables, stdout=output, stderr=output
                )
            )
        return running[-1]

    try:
        yield start
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60.0)
            process.kill()
            process.wait()


def wait_for(what: str, found: Callable[[], object], log: Path) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not found():
        assert time.monotonic() < until, (
            f"waited {PATIENCE_SECONDS:.0f} s in vain for {what}\n{log.read_text()[-3000:]}"
        )
        time.sleep(0.25)
