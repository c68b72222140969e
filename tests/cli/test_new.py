"""`new` writes a run and its key, and overwrites nothing."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.app.training import step_benchmark
from p2p_diloco.app.training.step_benchmark import MeasuredStep, Unmeasured
from p2p_diloco.config.key_file import read_key_file
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import read_run_toml
from p2p_diloco.config.toml_document import known_keys
from p2p_diloco.ids import format_peer_id

Captured = pytest.CaptureFixture[str]


def test_new_writes_a_run_that_its_key_signs(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new"]) == 0
    key = read_key_file(tmp_path / "organiser.key")
    manifest = read_run_toml(tmp_path / "run.toml")
    assert manifest.organiser == format_peer_id(key.peer)
    assert manifest.name == "run"
    manifest.sign(key)
    assert "next: p2p-diloco bootstrap run.toml" in capsys.readouterr().out


def test_an_existing_run_is_not_overwritten(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new"]) == 0
    before = (tmp_path / "run.toml").read_bytes()
    assert main(["new"]) == 2
    assert "run.toml already exists and is never overwritten" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_bytes() == before


def test_an_existing_key_signs_the_next_run_too(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "one.toml"]) == 0
    key = (tmp_path / "organiser.key").read_bytes()
    assert main(["new", "two.toml"]) == 0
    assert (tmp_path / "organiser.key").read_bytes() == key
    assert "using organiser.key" in capsys.readouterr().out


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
def test_the_next_command_can_be_run_as_printed(
    tmp_path: Path, words: list[str], command: str, capsys: Captured
) -> None:
    for folder in ("keys", "my runs"):
        (tmp_path / folder).mkdir()
    assert main(["new", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"next: p2p-diloco {command}"


def test_files_are_merged_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("outer_lr = 0.8\n[rounds]\nfragments = 2\nround_seconds = 9.0\n")
    (tmp_path / "two.toml").write_text("[rounds]\nround_seconds = 7.5\n[outer]\nlearning_rate = 0.6\n")
    assert main(["new", "@one.toml", "@two.toml", "--rounds.planned_cycles", "8"]) == 0
    manifest = read_run_toml(tmp_path / "run.toml")
    assert (manifest.rounds.fragments, manifest.rounds.round_seconds, manifest.rounds.planned_cycles) == (2, 7.5, 8)
    assert manifest.outer.learning_rate == 0.6, "a later file overrides, by either name"


def test_a_run_file_used_as_a_template_gives_a_new_run(tmp_path: Path) -> None:
    old = ["new", "old.toml", "--outer.momentum", "0.4", "--rounds.clock_start", "7", "--inner.step_tokens", "128"]
    assert main(old) == 0
    other = (tmp_path / "old.toml").read_text().replace("created = ", "created = 7  # ")
    (tmp_path / "old.toml").write_text(other)
    (tmp_path / "next").mkdir()
    assert main(["new", "next/new.toml", "--name", "night", "@old.toml", "--inner.step_tokens", "192"]) == 0
    manifest = read_run_toml(tmp_path / "next" / "new.toml")
    assert manifest.name == "night"
    assert (manifest.outer.momentum, manifest.inner.step_tokens) == (0.4, 192)
    assert manifest.organiser == format_peer_id(read_key_file(tmp_path / "next" / "organiser.key").peer)
    assert manifest.created > 7
    assert manifest.rounds.clock_start == manifest.created


def test_a_file_of_values_without_an_organiser_and_a_flag_may_set_the_clock_start(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('name = "base"\n[rounds]\nclock_start = 7.0\n')
    assert main(["new", "one.toml", "@base.toml"]) == 0
    one = read_run_toml(tmp_path / "one.toml")
    assert (one.name, one.rounds.clock_start) == ("base", 7.0)
    assert main(["new", "two.toml", "@one.toml", "--rounds.clock_start", "8"]) == 0
    assert read_run_toml(tmp_path / "two.toml").rounds.clock_start == 8.0


def test_a_typo_is_named_and_leaves_no_files(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "--outer.momentm", "0.7"]) == 2
    assert "unknown key outer.momentm" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_half_a_window_leaves_no_files(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "--model.size", "small", "--inner.step_tokens", "128", "--step-seconds", "1"]) == 2
    assert "inner.step_tokens is 128, which is no multiple of the context of 256 tokens" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


COUNTS_STEPS = (
    "counts inner steps, but here the length of a cycle is a time, so that no peer waits: rounds.round_seconds x "
    "rounds.fragments seconds; set rounds.round_seconds"
)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--sync_every", "30"], f"sync_every in the command line {COUNTS_STEPS}"),
        (["--inner_steps", "30"], f"inner_steps in the command line {COUNTS_STEPS}"),
        (["--rounds.sync-every", "30"], f"rounds.sync_every in the command line {COUNTS_STEPS}"),
        (
            ["--model", "gpt2"],
            'model.source in the new run: expected "built-in", "hf:" and a folder or id of a Hugging Face model, or '
            '"python:module:function"',
        ),
        (
            ["--model.vocabulary", "50257"],
            "the new run: model.vocabulary is 50257, but the tokens of this text are its 256 bytes; leave it out, or "
            "make a folder of other tokens with p2p-diloco tokenize and name it as data.path",
        ),
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
            "data.path: there is no file or folder roneneldan/TinyStories here, and a run reads no dataset "
            "itself; make a folder of its tokens with p2p-diloco tokenize FOLDER hf:roneneldan/TinyStories",
        ),
        (
            ["--data.path", "wikitext"],
            "data.path: there is no file or folder wikitext here, and a run reads no dataset itself; make a "
            "folder of its tokens with p2p-diloco tokenize FOLDER hf:wikitext",
        ),
        (
            ["--rounds.fragments", "500"],
            "cannot split 21 tensors into 500 fragments; choose at most 21 fragments",
        ),
        (
            ["--data.path", "book.txt"],
            "data.path: text book.txt does not exist; expected a file, a folder or a glob such as 'books/**/*.txt'",
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
            "there is no folder nowhere/deep for run.toml; create it, or name another place",
        ),
        (
            ["--organiser-key", "nowhere/my.key"],
            "there is no folder nowhere for my.key; create it, or name another place",
        ),
    ],
)
def test_typical_mistakes_are_explained_and_leave_no_files(
    tmp_path: Path, words: list[str], answer: str, capsys: Captured
) -> None:
    assert main(["new", *words]) == 2
    assert capsys.readouterr().err == f"p2p-diloco: error: {answer}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["--outer.lr", "--outer_lr", "--outer-lr", "--outer.outer_lr"])
def test_the_outer_rate_has_aliases(tmp_path: Path, name: str) -> None:
    assert main(["new", name, "0.6"]) == 0
    assert read_run_toml(tmp_path / "run.toml").outer.learning_rate == 0.6


def test_peers_are_separated_by_commas(tmp_path: Path) -> None:
    assert main(["new"]) == 0
    peer = read_run_toml(tmp_path / "run.toml").organiser
    assert main(["new", "listed.toml", "--trust.mode", "listed", "--trust.peers", f"{peer},{peer}"]) == 0
    assert read_run_toml(tmp_path / "listed.toml").trust.peers == (peer, peer)


def test_a_local_text_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("words " * 4096)
    assert main(["new", "--data.path", "words.txt"]) == 0
    assert read_run_toml(tmp_path / "run.toml").data.path == "words.txt"


def test_a_run_that_shares_its_text_names_the_list_of_its_files(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "a.txt").write_text("some words " * 5000)
    assert main(["new", "--data.path", "words", "--data.share", "true"]) == 0
    data = read_run_toml(tmp_path / "run.toml").data
    assert data.share
    assert capsys.readouterr().out.splitlines()[-1].endswith("bootstrap run.toml --data words")
    assert main(["fingerprint", "words"]) == 0
    printed = capsys.readouterr().out.splitlines()[-2:]
    assert printed == [
        f'fingerprint = "{open_corpus("words").fingerprint.hex()}"  # 1 file, 55.0 kB',
        f'files = "{data.files}"  # for share = true',
    ]


def test_a_text_that_cannot_be_shared_makes_no_run(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "words").mkdir()
    for name in ("Readme", "readme"):
        (tmp_path / "words" / name).write_text("some words " * 5000)
    assert main(["new", "--data.path", "words", "--data.share", "true"]) == 2
    assert "files Readme and readme have the same name on some disks" in capsys.readouterr().err
    assert main(["new", "--data.share", "true"]) == 2
    assert 'share = true has no meaning with path = "stdlib"' in capsys.readouterr().err
    assert not (tmp_path / "run.toml").exists()


def test_help_lists_every_key_that_can_be_changed_with_its_default(capsys: Captured) -> None:
    assert main(["new", "--help"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for key in set(known_keys(RunManifest)) - {"format", "organiser", "created"}:
        assert any(line.startswith((f"--{key} ", f"│ --{key} ")) for line in lines), key
    assert (
        "--outer.momentum Nesterov momentum; keep it low, because updates arrive a round late [default: 0.3]" in lines
    )
    assert "rounds: Timing. Each round exchanges one fragment; `fragments` rounds are a cycle." in lines


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


def test_zero_islands_are_refused_and_leave_no_files(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "--islands", "0"]) == 2
    assert "--islands is 0; expected at least 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


HUGE = ["--model.layers", "4096", "--model.width", "8192", "--model.feed_forward", "16384"]


@pytest.mark.parametrize("command", [["new"], ["bootstrap", "run.toml"], ["join", "--found", "run.toml"]])
def test_a_model_too_large_for_any_machine_is_refused_with_its_number_of_parameters(
    command: list[str], capsys: Captured
) -> None:
    assert command == ["new"] or main(["new"]) == 0
    assert main([*command, *HUGE]) == 2
    assert "the model has 2,748,850,380,800 parameters; expected at most 100,000,000,000" in capsys.readouterr().err


TOLD = ["--step-seconds", "0.045", "--uplink", "20mbit", "--islands", "4"]


def test_a_cycle_fits_the_step_the_line_and_the_islands(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", *TOLD]) == 0
    rounds = read_run_toml(tmp_path / "run.toml").rounds
    assert (rounds.round_seconds, rounds.fragments, rounds.planned_steps, rounds.spans_per_fragment) == (
        4.005,
        1,
        89,
        4,
    )
    assert capsys.readouterr().out.splitlines()[1:3] == [
        "a cycle is 89 steps of 45 ms, 1 round of 4 s; 1.68 Mbit/s each way",
        "set by the shortest round: over the internet rounds under 4 s leave far machines out; cycles "
        "of 89 steps end with a loss about 10 % above that of 8 (short trials)",
    ]


def test_a_default_uplink_is_assumed_and_reported(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "--step-seconds", "0.5"]) == 0
    assert read_run_toml(tmp_path / "run.toml").rounds.planned_steps == 8
    assert "assuming an uplink of 20 Mbit/s; set it with --uplink\n" in capsys.readouterr().out


def test_the_traffic_of_the_run_is_told_before_anything_starts(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", *TOLD]) == 0
    out = capsys.readouterr().out
    assert (
        "at full rate this run sends up to 22.7 GB and receives up to 22.7 GB a day, 1.4 TB in 30 days, on every" in out
    )


def test_the_step_is_measured_if_it_is_not_given(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def measured(manifest: RunManifest, **machine: object) -> MeasuredStep:
        asked.append({"size": manifest.model.size, **machine})
        return MeasuredStep(seconds=2.0, is_estimated=True, is_disturbed=True)

    monkeypatch.setattr(step_benchmark, "measure_inner_step", measured)
    monkeypatch.setenv("P2P_DILOCO_THREADS", "3")
    assert main(["new", "--model.size", "small", "--device", "cpu"]) == 0
    assert asked == [{"size": "small", "model": None, "device": "cpu", "threads": 3}]
    printed = capsys.readouterr().out
    for note in (
        "a cycle is 8 steps of 2 s, 2 rounds of 8 s; ",
        "a step takes so long that only part of one was measured; set it with --step-seconds if known",
        "other programs are using this machine's processor; the step time may be off",
    ):
        assert note in printed


def test_a_step_that_cannot_be_measured_leaves_the_default_rounds(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unmeasured(*_: object, **__: object) -> MeasuredStep:
        raise Unmeasured("the run trains its own model")

    monkeypatch.setattr(step_benchmark, "measure_inner_step", unmeasured)
    assert main(["new", "--islands", "2"]) == 0
    rounds = read_run_toml(tmp_path / "run.toml").rounds
    assert (rounds.round_seconds, rounds.fragments, rounds.planned_steps) == (5.0, 4, None)
    assert (
        "the inner step was not measured (the run trains its own model), so a cycle is 4 rounds of 5 s; set it "
        "with --step-seconds\n" in capsys.readouterr().out
    )


def test_given_rounds_are_kept(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[rounds]\nround_seconds = 9.0\n")
    assert main(["new", "@base.toml", "--rounds.fragments", "2", *TOLD]) == 0
    rounds = read_run_toml(tmp_path / "run.toml").rounds
    assert (rounds.round_seconds, rounds.fragments, rounds.planned_steps) == (9.0, 2, 400)


def test_hours_set_the_planned_cycles_and_a_falling_rate(tmp_path: Path, capsys: Captured) -> None:
    assert main(["new", "--hours", "2", "--step-seconds", "0.5"]) == 0
    manifest = read_run_toml(tmp_path / "run.toml")
    assert (manifest.rounds.planned_cycles, manifest.inner.schedule) == (1800, "cosine")
    assert manifest.outer.final_share == 0.25
    assert (
        "planned for 2 h, 1800 cycles: the inner learning rate falls until then, and the outer one over the last "
        in (capsys.readouterr().out)
    )
    assert main(["new", "other.toml", "--hours", "2", "--inner.schedule", "constant", *TOLD]) == 0
    other = read_run_toml(tmp_path / "other.toml")
    assert (other.inner.schedule, other.outer.final_share) == ("constant", 1.0)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--step-seconds", "0"], "--step-seconds is 0; expected more than 0, such as 0.045"),
        (
            ["--uplink", "20"],
            "--uplink is '20'; expected a rate with its unit, kbit, mbit or gbit per second, such as 20mbit",
        ),
        (
            ["--hours", "2", "--rounds.planned_cycles", "9"],
            "--hours and rounds.planned_cycles both set the length of the run; use only one of them",
        ),
        (["--hours", "-3"], "--hours is -3; expected more than 0, such as 12"),
        (["--hours", "nan"], "--hours is nan; expected more than 0, such as 12"),
        (
            ["--hours", "9000", "--step-seconds", "0.5"],
            "--hours is 9000; expected 0.00111 to 1165, from one cycle of 4 s to 1,048,576; leave it out for a run "
            "without a planned end",
        ),
        (
            ["--device", "tpu"],
            "device in the command line: unknown device 'tpu'; expected auto, cpu, cuda, cuda:<number> or mps",
        ),
        (
            ["--step-seconds", "0.5", "--threads", "0"],
            "threads = 0 in the command line: should be greater than or equal to 1",
        ),
    ],
)
def test_senseless_conditions_are_refused_before_a_step_is_measured_and_leave_no_files(
    tmp_path: Path, words: list[str], answer: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(step_benchmark, "measure_inner_step")
    assert main(["new", *words]) == 2
    assert capsys.readouterr().err == f"p2p-diloco: error: {answer}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_cannot_sign_is_refused_before_a_step_is_measured(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(step_benchmark, "measure_inner_step")
    (tmp_path / "organiser.key").write_text("no key")
    (tmp_path / "organiser.key").chmod(0o644)
    assert main(["new"]) == 2
    assert "organiser.key is open to other users (mode 0644)" in capsys.readouterr().err


class Terminal:
    """A pseudo-terminal as standard input and output; the input was typed beforehand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
        self._near, far = pty.openpty()
        os.write(self._near, typed.encode())
        monkeypatch.setattr(sys, "stdin", os.fdopen(far, "r"))
        monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(far), "w"))

    def shown(self) -> str:
        """Return the text on the terminal, and close it."""
        sys.stdout.flush()
        text = os.read(self._near, 1 << 16).decode().replace("\r\n", "\n")
        for stream in (sys.stdin, sys.stdout):
            stream.close()
        os.close(self._near)
        return text


def test_at_a_terminal_new_asks_for_missing_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        terminal = Terminal(patch, "none\n2\n5\n5mbit\n\nperhaps\nyes\n")
        code, shown = main(["new", "--step-seconds", "0.5"]), terminal.shown()
    assert code == 0
    manifest = read_run_toml(tmp_path / "run.toml")
    rounds = manifest.rounds
    assert manifest.trust.weights == "tokens"
    assert (rounds.planned_steps, rounds.spans_per_fragment, rounds.planned_cycles) == (19, 2, 1000)
    for part in (
        "how many islands will train at a time? [a group of 16] ",
        "'none' is not a number of islands; expected 1 or more",
        "upload rate of the slowest island? [20mbit] ",
        "it is '5'; expected a rate with its unit",
        "planned length of the run in hours? [no planned end] ",
        "do you know everybody who will join? then machines count by the tokens they report [no] ",
        "'perhaps' is not an answer; expected yes or no",
    ):
        assert part in shown
    assert "assuming" not in shown


def test_at_a_terminal_new_does_not_ask_for_given_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        terminal = Terminal(patch, "")
        code, shown = main(["new", *TOLD, "--hours", "3", "--trust.weights", "tokens"]), terminal.shown()
    assert code == 0
    assert "?" not in shown


def test_at_a_terminal_new_does_not_ask_after_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        terminal = Terminal(patch, "\x04\x04\x04")
        code = main(["new", "--hours", "-3"])
        print(".")
        shown = terminal.shown()
    assert (code, shown) == (2, ".\n")


def test_end_of_input_accepts_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        terminal = Terminal(patch, "\x04\x04\x04\x04")
        code, _ = main(["new", "--step-seconds", "0.5"]), terminal.shown()
    assert code == 0
    manifest = read_run_toml(tmp_path / "run.toml")
    assert (manifest.rounds.planned_cycles, manifest.trust.weights) == (1000, "equal")
