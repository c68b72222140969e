"""Tables: paired gaps and their intervals by hand, and an experiment from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from p2p_diloco.errors import ConfigError
from research.setting import Outcome, Setting
from research.table import Experiment, Table, run_experiment


def outcomes(name: str, losses: list[float]) -> tuple[Outcome, ...]:
    return tuple(
        Outcome(name=name, seed=seed, loss=loss, tokens=100, bytes_sent_per_parameter=2.0, seconds=1.0)
        for seed, loss in enumerate(losses)
    )


def test_a_table_is_written_for_people_and_for_programs() -> None:
    two = Experiment(question="which?", settings=(Setting(name="a"), Setting(name="b")), seeds=2)
    table = Table(experiment=two, outcomes={"a": outcomes("a", [1.01, 2.06]), "b": outcomes("b", [1.0, 2.0])})
    figures = table.figures()
    assert figures["rows"][1] == {
        "name": "b", "loss": 1.5, "loss_std": pytest.approx(0.7071, rel=1e-3), "seeds": 2, "tokens": 100,
        "bytes_sent_per_parameter": 2.0, "sent_shares": [],
    }  # fmt: skip
    assert figures["gaps"] == {"b": pytest.approx(0.02)}
    assert figures["intervals"] == {"b": pytest.approx(0.1271, rel=1e-3)}
    lines = table.lines()
    assert lines[0] == "which?"
    assert lines[2].endswith("a +2.00 ± 12.71 %")
    assert len(lines) == 3


def test_a_row_shows_what_each_learner_sent_over_the_seeds_that_counted_it() -> None:
    alike = outcomes("a", [1.0, 1.0, 1.0])
    counted = (alike[0], replace(alike[1], sent_shares=(1.0, 0.5)), replace(alike[2], sent_shares=(1.0, 0.75)))
    two = Experiment(question="which?", settings=(Setting(name="a"), Setting(name="b")), seeds=3)
    table = Table(experiment=two, outcomes={"a": counted, "b": alike})
    assert [row["sent_shares"] for row in table.figures()["rows"]] == [[1.0, 0.625], []]
    assert table.lines()[2].strip() == "sent of what was learnt: 100%, 62%"


def test_a_table_of_evidence_says_how_rows_were_tuned_and_what_intervals_are() -> None:
    three = Experiment(
        question="which?",
        settings=tuple(Setting(name=name) for name in "abc"),
        seeds=2,
        comparisons=2,
        notes={"b": "best of 8 tries: momentum 0.3"},
    )
    rows = {"a": outcomes("a", [1.01, 2.06]), "b": outcomes("b", [1.0, 2.0]), "c": outcomes("c", [1.0, 2.0])}
    table = Table(experiment=three, outcomes=rows)
    assert table.lines()[3].strip() == "best of 8 tries: momentum 0.3"
    assert table.lines()[-1] == "intervals: 95 % for 2 comparisons together, over seeds and held-out text"
    assert table.figures()["intervals"]["b"] == pytest.approx(0.2545, rel=1e-3)
    assert (table.figures()["comparisons"], table.figures()["tuned"]) == (2, three.notes)


def test_only_some_rows_in_the_order_asked_for() -> None:
    three = Experiment(question="which?", settings=tuple(Setting(name=name) for name in "abc"), seeds=2)
    assert [setting.name for setting in three.only(["c", "a", "c"]).settings] == ["c", "a"]
    with pytest.raises(ConfigError, match="unknown row 'd'; expected one of a, b, c"):
        three.only(["a", "d"])
    with pytest.raises(ConfigError, match="at least two rows"):
        three.only(["a"])


def test_trials_have_the_seeds_of_their_stage(text: str) -> None:
    row = Setting(
        name="ours", size="micro", islands=2, ticks=8, sync_every=8, fragments=2, delay=1, batch=1, stage="tune",
        judged_tokens=1024,
    )  # fmt: skip
    both = Experiment(question="?", settings=(row, replace(row, name="late", delay=3)), seeds=2)
    table = run_experiment(both, text=text, processes=1)
    assert [outcome.seed for outcome in table.outcomes["late"]] == [1000, 1001]


@pytest.mark.long  # make size plays it
def test_an_experiment_is_the_same_in_one_process_and_in_two_and_when_kept(text: str, tmp_path: Path) -> None:
    row = Setting(
        name="ours", size="micro", islands=2, ticks=8, sync_every=8, fragments=2, delay=1, batch=1, judged_tokens=1024
    )
    small = Experiment(question="?", settings=(row, replace(row, name="late", delay=3)), seeds=2)
    heard: list[int] = []
    alone = run_experiment(small, text=text, processes=1, heard=lambda _, left: heard.append(left))
    assert heard == [3, 2, 1, 0]
    assert run_experiment(small, text=text, processes=2).figures() == alone.figures()
    played: list[int] = []
    keep = tmp_path / "kept.jsonl"
    for _ in range(2):
        kept = run_experiment(small, text=text, processes=1, keep=keep, heard=lambda _, left: played.append(left))
        assert kept.figures() == alone.figures()
    assert played == [3, 2, 1, 0], "the second time everything is there"
    one_seed = Experiment(question="?", settings=small.settings, seeds=1)
    assert "±" not in "".join(run_experiment(one_seed, text=text, processes=1).lines())


def test_a_table_of_trials_on_different_devices_says_so() -> None:
    two = Experiment(question="which?", settings=(Setting(name="a"), Setting(name="b")), seeds=1)
    rows = {"a": outcomes("a", [1.0]), "b": tuple(replace(one, device="cuda") for one in outcomes("b", [1.0]))}
    table = Table(experiment=two, outcomes=rows)
    assert table.lines()[-1] == "trials on cpu and cuda, which may differ by more than a gap"
    assert "cuda" not in "".join(Table(experiment=two, outcomes={**rows, "b": outcomes("b", [1.0])}).lines())
