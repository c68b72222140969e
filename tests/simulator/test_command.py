"""`python -m simulator`."""

from __future__ import annotations

import dataclasses
import json

import pytest

from simulator import command
from simulator.command import main
from simulator.inspector import Violated
from simulator.scale import ScaleRow
from simulator.split import splits_of


def test_seed_is_run_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--peers", "3", "--kinds", "kill", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert "seed 1: 3 peers" in shown
    assert "replay: python -m simulator swarm --peers 3 --kinds kill --seed 1 --trace" in shown


def test_replay_of_a_sound_seed_prints_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--peers", "3", "--kinds", "kill", "--seed", "1", "--trace"]) == 0
    shown = capsys.readouterr().out
    assert "p2    starts     incarnation 1" in shown
    assert "Opening(" in shown
    assert "memory at" not in shown
    assert "every invariant held" in shown


def test_figures_name_a_seed_that_broke_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swarm", "--peers", "3", "--seeds", "1", "--kinds", "none", "--plant", "double-count", "--json"]
    assert main(words) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["failing_seeds"] == [0]


def test_long_campaign_continues_where_another_ended(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swarm", "--peers", "3", "--kinds", "none", "--plant", "double-count", "--first-seed", "7"]
    assert main([*words, "--seeds", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failing_seeds"][0] == 7


def test_seed_that_broke_an_invariant_is_printed_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "--peers", "3", "--kinds", "none", "--seed", "0", "--trace", "--plant", "double-count"]) == 1
    shown = capsys.readouterr().out
    assert "I2" in shown
    assert "Opening(" in shown


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["swarm", "--peers", "9..3"], "--peers is '9..3'; expected 1 to 512, the smaller number first"),
        (["swarm", "--peers", "few"], "--peers is 'few'; expected two numbers like 3..64, or one"),
        (["swarm", "--peers", "0..3"], "--peers is '0..3'; expected 1 to 512, the smaller number first"),
        (["swarm", "--seeds", "0"], "--seeds is 0; expected at least 1"),
        (["swarm", "--first-seed", "-1"], "--first-seed is -1; expected 0 or more"),
        (["swarm", "--plant", "typo"], "no mistake is called 'typo'; expected one of double-count"),
        (["scale", "--peers", "8..64"], "--peers is '8..64'; expected numbers from 2 to 1024 with commas between them"),
        (["scale", "--peers", "1"], "--peers is '1'; expected numbers from 2 to 1024 with commas between them"),
        (["scale", "--peers", "5000"], "expected numbers from 2 to 1024"),
        (["scale", "--parameters", "many"], "--parameters is 'many'; expected at least 1M"),
        (["scale", "--dial-out-only", "2"], "--dial-out-only is 2.0; expected a share from 0 to 1"),
        (["scale", "--cycles", "0"], "--cycles is 0; expected at least 1"),
        (
            ["scale", "--peers", "4", "--dial-out-only", "0.5", "--newcomer-reaches", "3"],
            "--newcomer-reaches is 3; expected 0 to 2, the peers that can be dialled",
        ),
        (["split", "--peers", "3"], "--peers is 3; expected 4 to 1024"),
        (["rosters", "--members", "3"], "--members is 3; expected 4 to 1024"),
        (["rosters", "--every", "2"], "--every is 2 and --cycles 1000; expected at least 8 and 1"),
        (["mistakes", "none"], "no mistake is called 'none'; expected one of double-count"),
    ],
)
def test_invalid_option_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


# -- scale and split

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


def test_scale_prints_only_figures_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--peers", "2,3", "--cycles", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["peers"] for row in rows] == [2, 3]
    assert all(row["replicas_equal"] for row in rows)


@pytest.mark.slow
def test_split_runs_from_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "splits_of", lambda *asked: splits_of(*asked)[:1])
    assert main(["split", "--peers", "4"]) == 0
    assert "kept_its_promise True" in capsys.readouterr().out


def test_rosters_that_cost_too_much_exit_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["rosters", "--members", "8", "--every", "8", "--cycles", "3"]
    assert main(words) == 0
    assert "members 8, cycles 3, rosters 5" in capsys.readouterr().out
    monkeypatch.setattr(command, "MOST_ROSTER_BYTES", 1000)
    assert main(words) == 1


def test_different_replicas_and_violations_exit_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure", lambda plan: dataclasses.replace(ROW, replicas_equal=False))
    assert main(["scale", "--peers", "3"]) == 1

    def breaks(plan: object) -> ScaleRow:
        raise Violated("I1", "other bytes")

    monkeypatch.setattr(command, "measure", breaks)
    monkeypatch.setattr(command, "play_split", breaks)
    for words in (["scale", "--peers", "3"], ["split", "--peers", "8"]):
        assert main(words) == 1
        assert "an invariant was violated: I1: other bytes" in capsys.readouterr().err
