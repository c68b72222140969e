"""Docstrings and documents are free of the worst of the old dialect, and lines are short enough to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
CODE = sorted(
    path for room in ("p2p_diloco", "simulator", "benchmarks", "research") for path in (PROJECT / room).rglob("*.py")
)
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/reference/*.md",
        "docs/decisions/*.md",
        "bootstrap/*.md",
        "research/*.md",
        "examples/*/*.md",
    )
    for path in PROJECT.glob(pattern)
)
MODULES = [
    path.relative_to(PROJECT).as_posix()
    for room in ("p2p_diloco", "simulator", "benchmarks", "research", "tests", "docs", "examples", "bootstrap")
    for path in (PROJECT / room).rglob("*.py")
]
HISTORY = ("lab-log.md", "CHANGELOG.md")
"""Pages, besides the decisions, that keep their original wording."""

# A docstring names a thing or an action, so it begins with a noun or an imperative.
HEADLESS = re.compile(r"(Who|What|Whom|Whose|Whoever|Whatever|How|However|Tell|Hear|Say|Of)\b")
DIALECT = re.compile(r"\b([Ww]ho(m)?ever|one's own|so many|so often|another mouth|for want of)\b")
LONGEST_LINE = 120


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes and functions, and those below constants."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                        yield line, text.strip()


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(PROJECT)))
def test_docstrings_begin_with_a_noun_or_an_imperative(path: Path) -> None:
    assert [f"line {line}: {text.splitlines()[0]}" for line, text in docstrings(path) if HEADLESS.match(text)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_pages_have_lines_that_people_can_read(path: Path) -> None:
    in_code, long = False, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        in_code ^= line.startswith("```")
        if len(line) > LONGEST_LINE and not in_code and not line.startswith("|"):
            long.append(number)
    assert long == []


@pytest.mark.parametrize(
    "path", [path for path in PAGES if path.name not in HISTORY], ids=lambda path: str(path.relative_to(PROJECT))
)
def test_pages_name_modules_that_exist(path: Path) -> None:
    named = re.findall(r"`([\w./-]+\.py)(?:::[^`]*)?`", path.read_text(encoding="utf-8"))
    assert [name for name in named if not any(f"/{module}".endswith(f"/{name}") for module in MODULES)] == []


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if path.name not in HISTORY and path.parent.name != "decisions"],
    ids=lambda path: str(path.relative_to(PROJECT)),
)
def test_pages_for_users_are_in_plain_english(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [f"line {number}: {line}" for number, line in enumerate(lines, 1) if DIALECT.search(line)] == []
