"""benchmarks/figures/draw.py: all that is kept, or any part of it, and always the same bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.kept_documents import averaging_document, keep, keep_one_of_each, memory_document, state_document

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "figures" / "draw.py"


@pytest.fixture
def script() -> ModuleType:
    """The script, where matplotlib is: the extra [plots]."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("draw_performance", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


def test_all_is_drawn_and_again_with_the_same_bytes(script: ModuleType, tmp_path: Path) -> None:
    keep_one_of_each(tmp_path)
    script.main(tmp_path)
    first = written(tmp_path)
    benches = ("averaging", "vectors", "state", "training", "memory", "goodput")
    assert first.keys() == {"tables.md", *(f"{bench}.svg" for bench in benches)}
    page = first["tables.md"].decode()
    assert all(f"![{bench}]({bench}.svg)" in page for bench in benches)
    script.main(tmp_path)
    assert written(tmp_path) == first


@pytest.mark.parametrize(
    ("documents", "plots"),
    [
        ({}, set()),
        ({"state": state_document()}, {"state.svg"}),
        ({"averaging": averaging_document(alone=True), "memory": memory_document()}, {"memory.svg"}),
    ],
    ids=["nothing", "one bench", "ours alone"],
)
def test_any_part_of_it_will_do(
    script: ModuleType, tmp_path: Path, documents: dict[str, dict[str, object]], plots: set[str]
) -> None:
    script.main(keep(tmp_path, **documents))
    assert written(tmp_path).keys() == {"tables.md", *plots}
