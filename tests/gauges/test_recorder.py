"""Ways through a small made package, from recorded calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gauges.ways import Recorder, Stage

LOOP, ENGINE = "loop", "rules/engine"
FILES = {
    LOOP: """
class Vector: ...
class Beat: ...
def run(message):
    tick()
    received(message)
def received(message):
    receive(message)
def receive(message):
    decide(message) if isinstance(message, Vector) else count(message)
""",
    "clock": "def tick(): ...",
    ENGINE: """
def decide(message):
    begin(message)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
def begin(message): ...
""",
    "rules/count": "def count(message): ...",
    "work": "def work(): ...",
}


@pytest.fixture
def package(tmp_path: Path) -> SimpleNamespace:
    """Return the names of a package in `tmp_path`."""
    names: dict[str, Any] = {"threading": threading}
    for module, text in FILES.items():
        exec(compile(text, str(tmp_path / f"{module}.py"), "exec"), names)
    return SimpleNamespace(**names)


def recorded(folder: Path, run: Callable[[], object], *stages: Stage) -> list[str]:
    """Return the modules of a way of these stages."""
    with Recorder(folder, {"way": stages}) as recorder:
        run()
    return [module for stage in recorder.take("way")["way"] for module in stage]


def test_on_a_way_are_a_root_and_its_callers_and_what_it_calls(tmp_path: Path, package: SimpleNamespace) -> None:
    found = recorded(tmp_path, lambda: package.run(package.Vector()), Stage((LOOP, "receive")))
    assert found == ["loop", "rules/engine"], "neither the clock, which is called before, nor work of another thread"


@pytest.mark.parametrize(("kind", "ends_in"), [("Vector", "rules/engine"), ("Beat", "rules/count")])
def test_a_stage_counts_only_calls_with_the_message_that_it_names(
    tmp_path: Path, package: SimpleNamespace, kind: str, ends_in: str
) -> None:
    def run() -> None:
        package.run(package.Vector())
        package.run(package.Beat())

    assert recorded(tmp_path, run, Stage((LOOP, "receive"), kind)) == ["loop", ends_in]
    assert recorded(tmp_path, run, Stage((LOOP, "received"), kind, (LOOP, "receive"))) == ["loop", ends_in]
    assert recorded(tmp_path, run, Stage((LOOP, "run"), kind, (LOOP, "receive"))) == ["loop", "clock", ends_in]


def test_work_of_another_thread_is_a_stage_of_its_own(tmp_path: Path, package: SimpleNamespace) -> None:
    stages = Stage((LOOP, "receive")), Stage(("work", "work"))
    assert recorded(tmp_path, lambda: package.run(package.Vector()), *stages) == ["loop", "rules/engine", "work"]


@pytest.mark.parametrize(
    "stage", [Stage((LOOP, "gone")), Stage((LOOP, "receive"), "Beat"), Stage((LOOP, "run"), "", (LOOP, "gone"))]
)
def test_a_stage_without_a_call_is_an_error(tmp_path: Path, package: SimpleNamespace, stage: Stage) -> None:
    with pytest.raises(LookupError, match=f"way: .*'{stage.root[1]}'"):
        recorded(tmp_path, lambda: package.run(package.Vector()), Stage((LOOP, "receive")), stage)


def test_ways_that_were_taken_begin_anew(tmp_path: Path, package: SimpleNamespace) -> None:
    with Recorder(tmp_path, {"way": [Stage((LOOP, "receive"))]}) as recorder:
        package.run(package.Vector())
        recorder.take("way")
        package.run(package.Beat())
    assert recorder.take("way") == {"way": [["loop", "rules/count"]]}


def test_a_module_is_listed_in_the_first_stage_that_calls_it(tmp_path: Path, package: SimpleNamespace) -> None:
    with Recorder(tmp_path, {"way": [Stage((ENGINE, "begin")), Stage((LOOP, "run"))]}) as recorder:
        package.run(package.Vector())
    assert recorder.take("way") == {"way": [["loop", "rules/engine"], ["clock"]]}
