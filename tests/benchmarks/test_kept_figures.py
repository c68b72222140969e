"""What a folder keeps is read in the order of the page, and what is no document of a bench is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kept_figures import read_kept
from p2p_diloco.errors import StateError
from tests.benchmarks.kept_documents import averaging_document, keep, keep_one_of_each, memory_document


def test_a_folder_is_read_bench_by_bench(tmp_path: Path) -> None:
    kept = read_kept(keep_one_of_each(tmp_path))
    benches = ["averaging", "vectors", "state", "training", "memory", "failures", "goodput"]
    assert [one.bench for one in kept] == benches
    assert kept[0].name == "averaging-4x10M"


def test_small_comes_before_large_whatever_the_files_are_called(tmp_path: Path) -> None:
    keep(
        tmp_path,
        c=averaging_document(peers=2, parameters=1_000_000),
        b=averaging_document(peers=2, parameters=50_000_000),
        a=averaging_document(peers=4, parameters=1_000_000),
    )
    assert [one.name for one in read_kept(tmp_path)] == ["c", "b", "a"]


def test_nothing_kept_is_nothing_read(tmp_path: Path) -> None:
    (tmp_path / "tables.md").write_text("# Tables\n", encoding="utf-8")
    assert read_kept(tmp_path) == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({**memory_document(), "command": "simulate swarm"}),
        json.dumps({**memory_document(), "command": "bench"}),
        json.dumps({**memory_document(), "machine": {}}),
    ],
)
def test_what_is_no_document_of_a_bench_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.json").write_text(text, encoding="utf-8")
    with pytest.raises(StateError, match=r"memory\.json is not a document of python -m benchmarks"):
        read_kept(tmp_path)
