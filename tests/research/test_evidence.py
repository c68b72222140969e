"""Evidence: tuned on one stage, played on another, and told in the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from p2p_diloco.errors import ConfigError, StateError
from research.command import main
from research.evidence import EVIDENCE, ROWS_OF, evidence_named, rows_to_tune, tune_rows
from research.rows import TRIES, as_tuned, primary_rows, row_named
from research.scope import Scope
from research.setting import Outcome
from research.table import Experiment, Table
from research.tuned import Search, Try, find_search, read_searches, write_search

SCOPE = Scope(ticks=32)


def search(row: str, **changes: object) -> Search:
    values: dict[str, object] = {
        "row": row, "size": "micro", "islands": 4, "optimizer": "muon", "inner_schedule": "cosine", "steps": 32,
        "windows": 32, "text": "ab",
        "tries": (Try(values={"momentum": 0.25}, loss=2.1), Try(values={"momentum": 0.5}, loss=2.0)),
    }  # fmt: skip
    return Search(**(values | changes))  # type: ignore[arg-type]


def played(experiment: Experiment) -> Table:
    """Return a table in which a trial is the worse, the further its values are from some good ones."""
    good = {"learning_rate": 0.0224, "momentum": 0.3, "outer_rate": 1.0}
    rows = {
        setting.name: (
            Outcome(
                name=setting.name,
                seed=1000,
                loss=1.0 + sum(abs(getattr(setting, name) - value) for name, value in good.items()),
                tokens=1,
                bytes_sent_per_parameter=1.0,
                seconds=1.0,
            ),
        )
        for setting in experiment.settings
    }
    return Table(experiment=experiment, outcomes=rows)


def test_a_search_tries_inner_rates_then_the_rest_with_the_best_of_them(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    (found,) = tune_rows(["textbook-diloco-every-8"], Scope(stage="tune"), path, "ab", played)
    assert len(found.tries) == TRIES
    assert [one.values["learning_rate"] for one in found.tries[:3]] == pytest.approx([0.016, 0.0112, 0.0224])
    assert {one.values["learning_rate"] for one in found.tries[3:]} == {found.tries[2].values["learning_rate"]}
    assert (found.best.values["outer_rate"], found.best.values["momentum"]) == (1.0, 0.3)
    assert found.note() == "best of 8 tries of 480 steps: learning_rate 0.0224, momentum 0.3, outer_rate 1"
    assert read_searches(path) == (found,)


def test_an_experiment_stands_for_its_rows() -> None:
    assert rows_to_tune(None) == list(primary_rows())
    both = rows_to_tune(["few-bits", "p2p-diloco-every-8", "noloco-every-8"])
    assert both == [*ROWS_OF["few-bits"][1], "noloco-every-8"]
    lost = rows_to_tune(["lost"])
    assert lost == ["p2p-diloco-every-8", "textbook-diloco-every-8", "decoupled-diloco-int4-every-8"]


def test_a_row_that_is_unknown_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown row 'gossip'"):
        tune_rows(["data-parallel", "gossip"], SCOPE, tmp_path / "tuned.json", "ab", lambda _: pytest.fail("played"))


@pytest.mark.parametrize("name", EVIDENCE)
def test_every_experiment_for_evidence_has_rows_that_exist(name: str) -> None:
    searches = [search(as_tuned(row)) for row in ROWS_OF[name][1]]
    experiment = evidence_named(name, replace(SCOPE, speeds=(1.0, 1.0, 1.0, 16.0)), searches)
    assert len(set(ROWS_OF[name][1])) == len(experiment.settings) > 1
    assert experiment.question.endswith("?")
    assert {setting.momentum for setting in experiment.settings} == {0.5}
    assert experiment.notes.keys() == {setting.name for setting in experiment.settings}
    family = 6 if name == "primary" else 1
    assert experiment.comparisons == family * (len(experiment.settings) - 1)


def test_seeds_are_those_asked_for() -> None:
    searches = [search(row) for row in ROWS_OF["means"][1]]
    scopes = (Scope(), Scope(is_quick=True), Scope(seeds=3))
    assert [evidence_named("means", scope, searches).seeds for scope in scopes] == [8, 2, 3]


def test_fewer_rows_need_fewer_searches_but_are_corrected_for_all() -> None:
    rows = ["data-parallel", "p2p-diloco-every-8"]
    experiment = evidence_named("primary", SCOPE, [search(row) for row in rows], only=rows)
    assert [setting.name for setting in experiment.settings] == rows
    assert experiment.comparisons == 48


def test_a_row_that_was_not_tuned_at_this_scale_is_refused_with_the_command() -> None:
    searches = [search("data-parallel", islands=8), search("data-parallel", inner_schedule="constant")]
    wanted = "row data-parallel has no tuned values for micro, 4 islands, muon, cosine; run python -m research tune"
    with pytest.raises(ConfigError, match=wanted):
        find_search(searches, "data-parallel", SCOPE)
    assert find_search([*searches, search("data-parallel", steps=8)], "data-parallel", SCOPE).steps == 8


def test_a_search_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    for tried in (search("noloco-every-8"), search("data-parallel"), search("noloco-every-8", text="cd")):
        write_search(path, tried)
    assert read_searches(path) == (search("data-parallel"), search("noloco-every-8", text="cd"))


@pytest.mark.parametrize("text", ["no json", "{}", "[1]", '[{"row": "a"}]', '[{"row": "a", "tries": []}]'])
def test_files_of_something_else_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tuned\.json is not a file of tuned values; name another one"):
        read_searches(path)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the tuned values"):
        read_searches(tmp_path)
    with pytest.raises(StateError, match="cannot write the tuned values"):
        write_search(tmp_path / "nowhere" / "tuned.json", search("data-parallel"))


@pytest.mark.long  # make size plays it
def test_tuning_and_the_test_from_the_command_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("research.table.usable_cores", lambda: 1)
    tuned, keep = tmp_path / "tuned.json", tmp_path / "kept.jsonl"
    words = ["--data", text, "--steps", "32", "--islands", "2", "--windows", "2"]
    words += ["--rows", "sparseloco-every-8,data-parallel", "--keep", str(keep), "--tuned", str(tuned)]
    assert main(["tune", *words]) == 0
    assert "best of 8 tries" in capsys.readouterr().out
    kept = [json.loads(line) for line in keep.read_text().splitlines()]
    assert {outcome["seed"] for outcome in kept} == {1000}
    assert len(kept) == 2 * TRIES
    for tried in read_searches(tuned):
        row, _ = row_named(tried.row)
        assert len(tried.tries) == len(row.inner) + len(row.values) - 1
    assert main(["primary", *words, "--seeds", "2", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["comparisons"] == 48
    assert figures["tuned"].keys() == {"sparseloco-every-8", "data-parallel"}
    kept = [json.loads(line) for line in keep.read_text().splitlines()][2 * TRIES :]
    assert {outcome["seed"] for outcome in kept} == {2000, 2001}
    assert all(outcome["loss"] == pytest.approx(fmean(outcome["blocks"])) for outcome in kept)


def test_a_table_for_people_and_for_programs(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("research.table.usable_cores", lambda: 1)  # here, not in workers that must import PyTorch first
    tuned, to, keep = (tmp_path / name for name in ("tuned.json", "figures.json", "kept.jsonl"))
    rows = ["textbook-diloco-every-8", "textbook-diloco-falling-every-8"]
    for row in rows:
        write_search(tuned, search(row, islands=2))
    words = ["falling", "--data", text, "--steps", "32", "--islands", "2", "--windows", "2", "--seeds", "1"]
    words += ["--rows", ", ".join(rows), "--keep", str(keep), "--tuned", str(tuned)]
    assert main([*words, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in figures["rows"]] == rows
    assert set(figures["gaps"]) == {rows[1]}
    assert main([*words, "--json", str(to)]) == 0
    assert len(keep.read_text().splitlines()) == 2
    assert json.loads(to.read_text()) == figures
    assert "what does an outer rate that falls at the end give" in capsys.readouterr().out
