"""The demo: its figures from real processes, what it leaves after Ctrl-C, and its plot."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "local-swarm" / "demo.py"


def load_demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_demo()


@pytest.mark.wall_clock
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_survivors_of_a_short_demo_hold_the_same_bytes_and_have_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(DEMO), "--peers", "3", "--seconds", "60", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(figures.read_text())
    assert measured["heads_equal"]
    assert measured["loss_last"] < measured["bigram_entropy"] < measured["loss_first"]
    assert 0.5 < measured["participation"] <= 1.0
    assert 0.4 < measured["bytes_sent_per_parameter_per_cycle"] < 1.0
    for line in ("volunteer-2 is killed", "bootstrap is killed", "The 2 survivors hold the same bytes"):
        assert line in done.stdout
    assert list(tmp_path.iterdir()) == [figures]


@pytest.mark.wall_clock
@pytest.mark.long
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([sys.executable, str(DEMO)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("volunteer-1 starts" in line for line in process.stdout)
        time.sleep(3.0)  # so that daemons run too
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(30.0) == 130
    assert len(family) > 2
    assert psutil.wait_procs(family, timeout=10.0)[1] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wall_clock
@pytest.mark.timeout(120)
def test_a_peer_that_fails_ends_the_demo_and_its_last_output_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(demo.tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    monkeypatch.setattr(demo, "play", join_a_run_that_is_not_one)
    monkeypatch.setattr(demo.signal, "signal", lambda *_: None)  # the tests keep theirs
    assert demo.main() == 1
    printed = capsys.readouterr().out
    assert "FAILED: volunteer-1 exited with code 2 after printing" in printed
    (folder,) = tmp_path.iterdir()
    assert f"the peers' logs are in {folder}" in printed
    assert (folder / "volunteer-1" / "output.log").read_text().strip()


def join_a_run_that_is_not_one(swarm: Any, volunteers: list[str]) -> None:
    swarm.start(volunteers[0], "join", "p2pdiloco://nothing")
    swarm.wait(1.0)


def test_the_plot_falls_with_the_loss_and_marks_what_happened() -> None:
    lines = demo.plot([(10.0, 4.0), (20.0, 2.0)], 2.75, {15.0: "a peer is killed"}, width=11)
    assert lines == [
        "  3.5 │█▅▂        ",
        "  3.0 │███▆▃      ",
        "  2.5 │██████▅▂╌╌╌ pairs of bytes: 2.75",
        "  2.0 │████████▆▃ ",
        "      └─────▲─────",
        "       10 s … 20 s; ▲ a peer is killed (15 s)",
    ]


def test_the_bigram_entropy_of_a_cycle_is_zero() -> None:
    assert demo.bigram_entropy(b"abc" * 20_000) == 0.0


@pytest.mark.parametrize("symbols", [2, 8])
def test_the_bigram_entropy_of_independent_symbols_is_that_of_one_symbol(symbols: int) -> None:
    text = np.random.default_rng(0).integers(symbols, size=400_000, dtype=np.uint8).tobytes()
    assert demo.bigram_entropy(text) == pytest.approx(math.log(symbols), abs=0.005)


def test_the_bigram_entropy_of_a_known_chain_is_its_conditional_entropy() -> None:
    # After "a" comes a or b by a fair coin, after "b" always a: stationary 2/3 a, so H = 2/3 ln 2.
    text, last = bytearray(), "a"
    for coin in np.random.default_rng(1).random(400_000):
        last = "b" if last == "a" and coin < 0.5 else "a"
        text += last.encode()
    assert demo.bigram_entropy(bytes(text)) == pytest.approx(2 / 3 * math.log(2), abs=0.005)


def test_the_source_of_the_standard_library_has_the_expected_entropy() -> None:
    assert 2.2 < demo.bigram_entropy(demo.standard_library()) < 2.6
