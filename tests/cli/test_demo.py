"""The whole demo with fake peers: files, figures and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from p2p_diloco.cli import demo
from p2p_diloco.cli.app import main
from p2p_diloco.cli.demo_plan import DemoOptions
from p2p_diloco.cli.demo_result import TextLosses
from p2p_diloco.config.run_file import read_run_toml
from p2p_diloco.errors import ConfigError, StateError

sys.path.insert(0, str(Path(__file__).parent))
from pretence import PretendedChildren, VirtualClock

Captured = pytest.CaptureFixture[str]


class Pretence(PretendedChildren):
    """A context manager like real child processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """Return options for the fake peers, to be set by tests before the demo runs."""
    weather: dict[str, object] = {}
    root = tmp_path / "peers"
    root.mkdir()
    clock = VirtualClock(1e9)

    def children() -> Pretence:
        end = demo.plan_demo(DemoOptions(peers=4, seconds=60.0), now_seconds=clock.time())
        return Pretence(root, clock, end=end.clock_start + end.end_at, **weather)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "time", clock)
    monkeypatch.setattr(demo, "ChildProcesses", children)
    monkeypatch.setattr(demo, "measure_text", lambda options: TextLosses(start=5.545, bigram=2.4))
    monkeypatch.setattr(demo, "sample_of", lambda folder: f"def {folder.name}():\n    [red]pass")
    return weather


@pytest.mark.usefixtures("pretended")
def test_a_good_demo_exits_with_0_and_writes_a_report_and_figures(tmp_path: Path, capsys: Captured) -> None:
    assert main(["demo", "--peers", "4", "--seconds", "60", "--json", "figures.json", "--report", "out"]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["heads_equal"], figures["peers_final"], figures["killed"]) == (True, 3, ["peer-2"])
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    out = capsys.readouterr().out
    assert "all 3 living peers hold the same bytes" in out
    assert "text generated after 'def ':\ndef peer-1():\n    [red]pass\n" in out
    assert figures["sample"] == "def peer-1():\n    [red]pass"
    assert not (tmp_path / "out" / "logs").exists()


@pytest.mark.usefixtures("pretended")
def test_only_figures_go_to_standard_output(capsys: Captured) -> None:
    assert main(["demo", "--peers", "4", "--seconds", "60", "--json", "-"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["heads_equal"], document["sample"][:10]) == (True, "def peer-1")
    assert "all 3 living peers hold the same bytes" in captured.err


@pytest.mark.usefixtures("pretended")
def test_a_demo_without_a_sample_still_has_its_figures(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverged(folder: Path) -> str:
        raise StateError("the model's output is not finite")

    monkeypatch.setattr(demo, "sample_of", diverged)
    assert main(["demo", "--peers", "4", "--seconds", "60", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["sample"] is None
    assert "no sample: the model's output is not finite" in captured.err


def test_a_failed_demo_exits_with_1_and_keeps_the_logs(
    pretended: dict[str, object], tmp_path: Path, capsys: Captured
) -> None:
    pretended["stuck"] = ("peer-3",)
    assert main(["demo", "--peers", "4", "--seconds", "60", "--json", "figures.json"]) == 1
    assert json.loads((tmp_path / "figures.json").read_text())["failures"] == ["peer-3 did not finish"]
    assert "failed: peer-3 did not finish" in capsys.readouterr().out
    logs = tmp_path / "demo-report" / "logs" / "peer-3"
    assert {path.name for path in logs.iterdir()} == {"output.log", "events.jsonl", "status.json"}


def test_a_peer_that_dies_ends_the_demo_with_an_error(
    pretended: dict[str, object], tmp_path: Path, capsys: Captured
) -> None:
    pretended["broken"] = ("peer-1",)
    assert main(["demo", "--peers", "4", "--seconds", "60"]) == 1
    assert "p2p-diloco: error: peer-1 exited with code 3 before the last round" in capsys.readouterr().err
    assert (tmp_path / "demo-report" / "logs" / "peer-1" / "output.log").exists()


@pytest.mark.usefixtures("pretended")
def test_the_runs_name_the_text_and_are_signed_by_one_key(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    assert main(["demo", "--peers", "4", "--seconds", "60", "--data", "text.txt"]) == 0
    runs = tmp_path / "peers" / "runs"
    run, lone = read_run_toml(runs / "run.toml"), read_run_toml(runs / "lone.toml")
    assert (run.data.path, run.organiser) == ("text.txt", lone.organiser)
    assert (runs / "organiser.key").is_file()


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--report", "file/out"], "cannot make the folder"),
        (["--json", "folder"], "cannot write folder: Is a directory"),
    ],
)
def test_an_unwritable_target_has_exit_code_4(
    arguments: list[str], text: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    assert main(["demo", "--peers", "4", "--seconds", "60", *arguments]) == 4
    assert text in capsys.readouterr().err


def test_a_text_that_is_too_short_is_reported_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(ConfigError, match="text is 5 bytes long; expected at least 16384"):
        demo.measure_text(DemoOptions(data=str(tmp_path / "text.txt")))


def test_the_initial_loss_is_that_of_guessing_and_above_the_bigram_entropy(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2_000)
    losses = demo.measure_text(DemoOptions(data=str(tmp_path / "text.txt")))
    assert losses.start == pytest.approx(5.545, abs=0.01)
    assert losses.bigram < 1.0
