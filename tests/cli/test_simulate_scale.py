"""The words of `simulate scale` and `simulate split`, and what they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p_diloco.cli import simulate_scale
from p2p_diloco.cli.app import main
from p2p_diloco.cli.simulate_scale import ScaleOptions, count_named, run_scale, run_split, sizes_named
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.lab.scale import ScaleRow
from p2p_diloco.lab.split import play_splits
from p2p_diloco.lab.stage import Violated

ROW = ScaleRow(
    peers=3,
    rows=1,
    bytes_sent_per_parameter_per_cycle=0.7,
    control_bytes_per_cycle=100.0,
    streams=2,
    messages=9.0,
    round_seconds=1.5,
    included=1.0,
    replicas_equal=True,
)


def options(**changes: object) -> ScaleOptions:
    values = {"peers": "2,3", "parameters": "1M", "dial_out_only": 0.0, "seed": 0, "json": None, **changes}
    return ScaleOptions(**values)  # type: ignore[arg-type]


def test_sizes_and_counts_are_read() -> None:
    assert sizes_named("8, 64,256") == [8, 64, 256]
    assert (count_named("100M"), count_named("1.5b"), count_named("2000000")) == (100_000_000, 1_500_000_000, 2_000_000)


@pytest.mark.parametrize("text", ["", "8..64", "1", "5000", "8,,9", "-3"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected numbers from 2 to 2048"):
        sizes_named(text)


@pytest.mark.parametrize("text", ["", "M", "many", "5k", "-1M", "nan", "1e999M"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected at least 1M"):
        count_named(text)


def test_figures_on_standard_output_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "scale", "--peers", "2,3", "--json", "-"]) == 0
    told = capsys.readouterr()
    rows = json.loads(told.out)["rows"]
    assert [row["peers"] for row in rows] == [2, 3]
    assert all(row["replicas_equal"] for row in rows)
    assert "round_seconds" in told.err


def test_a_split_is_played_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_scale, "play_splits", lambda *asked: play_splits(*asked)[:1])
    path = tmp_path / "split.json"
    assert main(["simulate", "split", "--peers", "4", "--json", str(path)]) == 0
    assert [row["kept_its_promise"] for row in json.loads(path.read_text())["rows"]] == [True]


def test_different_replicas_and_broken_promises_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    monkeypatch.setattr(simulate_scale, "measure", lambda *_, **__: dataclasses.replace(ROW, replicas_equal=False))
    assert run_scale(options()) == 1

    def breaks(*_: object, **__: object) -> ScaleRow:
        raise Violated("I1", "other bytes")

    monkeypatch.setattr(simulate_scale, "measure", breaks)
    assert run_scale(options()) == 1
    monkeypatch.setattr(simulate_scale, "play_splits", lambda *_: [breaks])
    assert run_split(8, 0, None) == 1


def test_what_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_scale, "measure", lambda *_, **__: ROW)
    with pytest.raises(StateError, match="name another file with --json"):
        run_scale(options(json=str(tmp_path)))
    with pytest.raises(ConfigError, match="expected a share from 0 to 1"):
        run_scale(options(dial_out_only=2.0))
    with pytest.raises(ConfigError, match="expected 4 to"):
        run_split(3, 0, None)
