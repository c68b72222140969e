"""`new` writes a run and its key, and nothing over anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.cli.app import main
from p2p_diloco.ids import format_peer_id
from p2p_diloco.key_file import read_key_file
from p2p_diloco.manifest import RunManifest
from p2p_diloco.run_file import read_run_toml
from p2p_diloco.toml_document import known_keys

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
def test_the_next_command_works_as_it_stands(tmp_path: Path, words: list[str], command: str, capsys: Captured) -> None:
    for folder in ("keys", "my runs"):
        (tmp_path / folder).mkdir()
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
    (tmp_path / "next").mkdir()
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


COUNTS_STEPS = (
    "counts inner steps, and here a cycle is set by time so that nobody waits: it lasts rounds.round_seconds x "
    "rounds.fragments seconds; set rounds.round_seconds"
)
ONLY_BYTES = "cannot be set: the built-in model reads bytes, so it has 256 tokens; leave it out"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--sync_every", "30"], f"sync_every in the command line {COUNTS_STEPS}"),
        (["--inner_steps", "30"], f"inner_steps in the command line {COUNTS_STEPS}"),
        (["--rounds.sync-every", "30"], f"rounds.sync_every in the command line {COUNTS_STEPS}"),
        (
            ["--model", "gpt2"],
            "model in the command line names no model: the built-in decoder is the only one; set model.size, one of "
            "tiny, small, base",
        ),
        (["--model.vocabulary", "50257"], f"model.vocabulary in the command line {ONLY_BYTES}"),
        (["--model.widht", "64"], "unknown key model.widht in the command line; did you mean model.width?"),
        (["--momentum", "0.5"], "unknown option --momentum; did you mean --outer.momentum?"),
        (["--nmae", "dawn"], "unknown option --nmae; did you mean --name?"),
        (
            ["--model.heads", "7"],
            "model in the new run: model width 160 does not fit 7 heads; expected a multiple of 14, twice the number "
            "of heads",
        ),
        (
            ["--data.path", "roneneldan/TinyStories"],
            "data.path: there is no folder roneneldan/TinyStories here, and nothing is fetched from a hub; download "
            "the text, then name its file or folder",
        ),
        (
            ["--data.path", "/missing/text"],
            "data.path: text /missing/text does not exist; expected a file, a folder or a glob such as "
            "'books/**/*.txt'",
        ),
        (
            ["--data.path", ""],
            'data.path in the new run: expected "stdlib" or the path of a text: a file, a folder or a glob',
        ),
        (["--data.path"], "--data.path needs a value"),
        (
            ["--trust.peers", "abc"],
            "trust.peers.0 in the new run: 'abc' is not the id of an Ed25519 peer; expected text that begins with "
            "12D3KooW",
        ),
        (
            ["nowhere/deep/run.toml"],
            "there is no folder nowhere/deep for run.toml; make it first, or name another place",
        ),
        (
            ["--organiser-key", "nowhere/my.key"],
            "there is no folder nowhere for my.key; make it first, or name another place",
        ),
    ],
)
def test_what_a_newcomer_types_is_answered_and_leaves_nothing_behind(
    tmp_path: Path, words: list[str], answer: str, capsys: Captured
) -> None:
    assert main(["new", *words]) == 2
    assert capsys.readouterr().err == f"p2p-diloco: error: {answer}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["--outer.lr", "--outer_lr", "--outer-lr", "--outer.outer_lr"])
def test_the_outer_rate_has_the_names_that_others_give_it(tmp_path: Path, name: str) -> None:
    assert main(["new", name, "0.6"]) == 0
    assert read_run_toml(tmp_path / "run.toml").outer.learning_rate == 0.6


def test_peers_are_listed_with_commas(tmp_path: Path) -> None:
    assert main(["new"]) == 0
    peer = read_run_toml(tmp_path / "run.toml").organiser
    assert main(["new", "listed.toml", "--trust.mode", "listed", "--trust.peers", f"{peer},{peer}"]) == 0
    assert read_run_toml(tmp_path / "listed.toml").trust.peers == (peer, peer)


def test_a_text_that_is_here_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("words")
    assert main(["new", "--data.path", "words.txt"]) == 0
    assert read_run_toml(tmp_path / "run.toml").data.path == "words.txt"


def test_help_lists_every_key_that_can_be_changed_with_its_default(capsys: Captured) -> None:
    assert main(["new", "--help"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for key in set(known_keys(RunManifest)) - {"format", "organiser", "created"}:
        assert any(line.startswith((f"--{key} ", f"│ --{key} ")) for line in lines), key
    assert "--outer.momentum Nesterov; high values and delay do not mix [default: 0.3]" in lines
    assert "rounds: The clock. One round exchanges one fragment; `fragments` rounds are a cycle." in lines


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
