"""The page of tables: ratios first, each table with the command that made it, nothing of what is not kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kept_figures import read_kept
from benchmarks.tables import performance_lines, short_count, spread_words
from tests.benchmarks.kept_documents import (
    MACHINE,
    averaging_document,
    failures_document,
    goodput_document,
    keep,
    keep_one_of_each,
    memory_document,
    state_document,
    vectors_document,
)


def page_of(folder: Path) -> str:
    return "\n".join(performance_lines(read_kept(folder), {}))


def test_every_bench_has_its_section_with_its_command_and_its_file(tmp_path: Path) -> None:
    page = page_of(keep_one_of_each(tmp_path))
    sections = page.split("\n## ")[1:]
    benches = ("averaging", "vectors", "state", "training", "memory", "failures", "goodput")
    for section, bench in zip(sections, benches, strict=True):
        assert f"`python -m benchmarks {bench}" in section
        assert f"]({bench}" in section
        assert "2026-01-02; load before it 0.25" in section


def test_all_rows_of_a_table_have_as_many_cells_as_its_heading(tmp_path: Path) -> None:
    widths: list[int] = []
    for line in page_of(keep_one_of_each(tmp_path)).splitlines():
        if line.startswith("|"):
            widths.append(line.count("|"))
            assert len(set(widths)) == 1, line
        else:
            widths = []


def test_the_machine_is_named_once(tmp_path: Path) -> None:
    page = page_of(keep_one_of_each(tmp_path))
    words = "Machine: A Processor, 2 cores (x86_64), 7.8 GiB, Linux 6.1, Python 3.11.7, torch 2.10.0."
    assert page.count(words) == 1


def test_of_two_machines_each_table_says_which(tmp_path: Path) -> None:
    other = {**state_document(), "machine": {**MACHINE, "cores": 64, "load": 3.0}}
    page = page_of(keep(tmp_path, vectors=vectors_document(), state=other))
    assert "- Machine 1: A Processor, 2 cores" in page
    assert "- Machine 2: A Processor, 64 cores" in page
    assert "2026-01-02, machine 1; load before it 0.25" in page
    assert "2026-01-02, machine 2; load before it 3.00" in page


def test_ratios_come_before_figures(tmp_path: Path) -> None:
    page = page_of(keep(tmp_path, averaging=averaging_document()))
    ratios = "| 4 x 10M | hivemind, fp16 | **4.00 x** (4.00 to 4.00) | 5.00 x (5.00 to 5.00) |"
    assert ratios in page
    assert "| 4 x 10M | p2p_diloco, int4 | 0.500 (0.500 to 0.500) | 6.0 (6.0 to 6.0) | 0.800" in page
    assert page.index(ratios) < page.index("0.500 (0.500 to 0.500)")
    assert "waiting processes" not in page


def test_ours_alone_has_no_ratios_and_what_was_special_is_said(tmp_path: Path) -> None:
    page = page_of(keep(tmp_path, averaging=averaging_document(alone=True)))
    assert "times ours" not in page
    assert "4 x 10M: processes were started for each turn, because memory is too small for all at once." in page


def test_work_on_vectors_is_set_beside_the_exchange_of_as_many_peers(tmp_path: Path) -> None:
    page = page_of(keep(tmp_path, vectors=vectors_document(), two=averaging_document(peers=2)))
    assert "| **a cycle of 4 peers** | 2.7 x | 3.00 | 8.00 |" in page
    assert "That is" not in page
    page = page_of(keep(tmp_path, four=averaging_document(peers=4)))
    assert "That is 50% of the 6.0 ns that an exchange of 4 x 10M takes" in page


def test_state_training_and_memory_say_what_was_measured(tmp_path: Path) -> None:
    page = page_of(keep_one_of_each(tmp_path))
    assert "| 800 MB, 3 donors, 1 killed | **200 (160 to 200)** | 3.50 (3.50 to 4.50)" in page
    assert "| 20mbit | p2p_diloco | **95.0 %** (95.0 to 95.0) | 88% | 10.00 | 95.0 | 0.75: 0.25" in page
    assert "| unlimited | torchft | **95.0 %** (95.0 to 95.0) | 88% | 10.00 | 95.0 |  |  |" in page
    assert "| 2 x 10M | 0.86 x | 453 | 638 | 60 | **246** | 286 | 160 | equal |" in page
    assert "memory: 9.00 bytes per parameter and 168 MB beyond training." in page


def test_of_one_size_there_is_no_line(tmp_path: Path) -> None:
    one = {**memory_document(), "slope_bytes_per_parameter": None, "constant_mib": None}
    page = page_of(keep(tmp_path, memory=one))
    assert "beyond training." not in page
    assert "The goal: 10 bytes per parameter and 200 MB." in page


def test_an_empty_folder_says_how_it_is_filled(tmp_path: Path) -> None:
    assert "`make bench`" in page_of(tmp_path)


def test_plots_are_shown_where_there_are_any(tmp_path: Path) -> None:
    kept = read_kept(keep_one_of_each(tmp_path))
    lines = performance_lines(kept, {"state": "state.svg"})
    assert [line for line in lines if line.startswith("![")] == ["![state](state.svg)"]


@pytest.mark.parametrize(
    ("count", "words"), [(1_000_000, "1M"), (10_081_600, "10.1M"), (50_000_000, "50M"), (999_900, "1M")]
)
def test_counts_are_short(count: int, words: str) -> None:
    assert short_count(count) == words


def test_a_spread_is_a_middle_with_its_ends_in_brackets() -> None:
    spread = {"middle": 1697.4, "low": 1600.0, "high": 1800.0}
    assert spread_words(spread, 0) == "1,697 (1,600 to 1,800)"
    assert spread_words(spread, 1, " x") == "1,697.4 x (1,600.0 to 1,800.0)"


def test_a_failure_has_its_cost_and_what_was_predicted_from_it(tmp_path: Path) -> None:
    page = page_of(keep(tmp_path, failures=failures_document()))
    assert "A cycle of 24 s in 4 rounds; an island starts again 18 s after its failure." in page
    assert "| 4 | **42.0** ± 2.0 | 12.0 | 0.50 | 1.0 | 4.0, at most 5 | 2 of 2 | 75.0% | 56.2% | 9 in 9 |" in page
    assert "| 16 | **42.0** ± 2.0 | 12.0 | 0.50 | 1.0 | 3.0, at most 3 | 1 of 2 | 75.0% | 89.1% | 9 in 9 |" in page


def test_goodput_is_set_beside_what_was_published_and_ours_beside_what_it_rests_on(tmp_path: Path) -> None:
    page = page_of(keep(tmp_path, goodput=goodput_document()))
    assert "3 constants fitted to 5 points: a failure stops a unit for 18.1 s, or for 71.1 s if it is not" in page
    assert "| data-parallel, not elastic | 1 | 2,400,000 | 15.6% | 18% | predicted |" in page
    assert "| diloco, elastic | 16 | 1,200,000 | 92.1% | 93% | fitted |" in page
    assert "| 1,200,000 | 16 | **89.5%** | 86.9% | extrapolated cost |" in page
