"""The pages of docs/reference that are generated from the code match it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_diloco.status.event_log import TOPICS

PROJECT = Path(__file__).resolve().parent.parent
TOPIC = re.compile(r"[a-z]+(-[a-z]+)*")
REPORTING = frozenset({"report", "report_soon", "_report", "Report", "Notice", "note", "Line", "partial"})


def generator() -> object:
    spec = importlib.util.spec_from_file_location("generate", PROJECT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES: dict[str, str] = generator().pages()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_matches_the_code(name: str) -> None:
    written = (PROJECT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert written == PAGES[name], "regenerate it: make reference"


def reported_topics(path: Path) -> Iterator[str]:
    """Yield the topics that are literals in calls that report something."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        named = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if named not in REPORTING:
            continue
        said = [keyword.value for keyword in node.keywords if keyword.arg == "topic"]
        said += node.args[1:2] if named == "partial" else node.args[:1] if len(node.args) > 1 else []
        for value in said:
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and TOPIC.fullmatch(value.value):
                yield value.value


def test_exactly_the_topics_of_events_are_explained() -> None:
    found = {topic for path in (PROJECT / "p2p_diloco").rglob("*.py") for topic in reported_topics(path)}
    assert found == TOPICS.keys()
