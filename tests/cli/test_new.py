"""`new` writes a run and its key, and nothing over anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.cli.app import main
from p2p_diloco.ids import format_peer_id
from p2p_diloco.key_file import read_key_file
from p2p_diloco.run_file import read_run_toml

Captured = pytest.CaptureFixture[str]


def test_new_writes_a_run_that_its_key_signs(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new"]) == 0
    key = read_key_file(tmp_path / "organiser.key")
    manifest = read_run_toml(tmp_path / "run.toml")
    assert manifest.organiser == format_peer_id(key.peer)
    assert manifest.name == "run"
    manifest.sign(key)
    assert "next: p2p-diloco bootstrap run.toml" in capsys.readouterr().out


def test_a_run_that_is_there_stays(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new"]) == 0
    before = (tmp_path / "run.toml").read_bytes()
    assert main(["new"]) == 2
    assert "run.toml exists already and is never overwritten" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_bytes() == before


def test_a_key_that_is_there_signs_the_next_run_too(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "one.toml"]) == 0
    key = (tmp_path / "organiser.key").read_bytes()
    assert main(["new", "two.toml"]) == 0
    assert (tmp_path / "organiser.key").read_bytes() == key
    assert "uses organiser.key" in capsys.readouterr().out


def test_values_come_from_a_file_and_from_overrides(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("outer_lr = 0.8\n[rounds]\nfragments = 2\n")
    assert main(["new", "@base.toml", "--name", "night", "--rounds.round_seconds", "7.5"]) == 0
    manifest = read_run_toml(tmp_path / "run.toml")
    assert (manifest.name, manifest.outer.learning_rate, manifest.rounds.fragments) == ("night", 0.8, 2)
    assert manifest.rounds.round_seconds == 7.5


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["k.toml", "--organiser-key", "keys/my.key"], "bootstrap k.toml --organiser-key keys/my.key"),
        (["k.toml", "--organiser-key", "./organiser.key"], "bootstrap k.toml"),
        (["my runs/k.toml"], "bootstrap 'my runs/k.toml'"),
    ],
)
def test_the_next_command_works_as_it_stands(words: list[str], command: str, capsys: Captured) -> None:
    assert main(["new", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: p2p-diloco {command}"


def test_files_are_put_together_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("outer_lr = 0.8\n[rounds]\nfragments = 2\nround_seconds = 9.0\n")
    (tmp_path / "two.toml").write_text("[rounds]\nround_seconds = 7.5\n[outer]\nlearning_rate = 0.6\n")
    assert main(["new", "@one.toml", "@two.toml", "--rounds.planned_cycles", "8"]) == 0
    manifest = read_run_toml(tmp_path / "run.toml")
    assert (manifest.rounds.fragments, manifest.rounds.round_seconds, manifest.rounds.planned_cycles) == (2, 7.5, 8)
    assert manifest.outer.learning_rate == 0.6, "a later file wins, by whichever name"


def test_another_run_may_be_the_template_and_stays_another_run(tmp_path: Path) -> None:
    old = ["new", "old.toml", "--outer.momentum", "0.4", "--rounds.clock_start", "7", "--inner.batch", "2"]
    assert main(old) == 0
    other = (tmp_path / "old.toml").read_text().replace("created = ", "created = 7  # ")
    (tmp_path / "old.toml").write_text(other)
    assert main(["new", "next/new.toml", "--name", "night", "@old.toml", "--inner.batch", "3"]) == 0
    manifest = read_run_toml(tmp_path / "next" / "new.toml")
    assert manifest.name == "night"
    assert (manifest.outer.momentum, manifest.inner.batch) == (0.4, 3)
    assert manifest.organiser == format_peer_id(read_key_file(tmp_path / "next" / "organiser.key").peer)
    assert manifest.created > 7
    assert manifest.rounds.clock_start == manifest.created


def test_a_file_of_values_may_say_when_rounds_begin_and_a_flag_may_always(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('name = "base"\n[rounds]\nclock_start = 7.0\n')
    assert main(["new", "one.toml", "@base.toml"]) == 0
    one = read_run_toml(tmp_path / "one.toml")
    assert (one.name, one.rounds.clock_start) == ("base", 7.0)
    assert main(["new", "two.toml", "@one.toml", "--rounds.clock_start", "8"]) == 0
    assert read_run_toml(tmp_path / "two.toml").rounds.clock_start == 8.0


def test_a_typo_is_named_and_leaves_nothing_behind(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "--outer.momentm", "0.7"]) == 2
    assert "unknown key outer.momentm" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "spans"),
    [
        ([], 16),
        (["--islands", "4"], 4),
        (["--islands", "100"], 16),
        (["--islands", "4", "--model.size", "base"], 8),
        (["--islands", "4", "--rounds.spans_per_fragment", "6"], 6),
    ],
)
def test_few_islands_exchange_few_spans(tmp_path: Path, flags: list[str], spans: int) -> None:
    assert main(["new", *flags]) == 0
    assert read_run_toml(tmp_path / "run.toml").rounds.spans_per_fragment == spans


def test_no_islands_leave_nothing_behind(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "--islands", "0"]) == 2
    assert "--islands is 0; expected at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


HUGE = ["--model.layers", "4096", "--model.width", "8192", "--model.feed_forward", "16384"]


@pytest.mark.parametrize("command", [["new"], ["bootstrap", "run.toml"], ["join", "--found", "run.toml"]])
def test_a_model_beyond_all_machines_is_refused_with_its_number(command: list[str], capsys: Captured) -> None:
    assert command == ["new"] or main(["new"]) == 0
    assert main([*command, *HUGE]) == 2
    assert "the model has 2,748,850,380,800 parameters; expected at most 100,000,000,000" in capsys.readouterr().err
