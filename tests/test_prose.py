"""Docstrings and documents are free of the worst of the old dialect, and lines are short enough to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CODE = sorted(
    path
    for room in ("p2p_diloco", "simulator", "benchmarks", "gauges", "release", "research")
    for path in (PROJECT / room).rglob("*.py")
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
        "benchmarks/*.md",
        "simulator/*.md",
        "internet/*.md",
        "examples/*/*.md",
    )
    for path in PROJECT.glob(pattern)
)
MODULES = [
    path.relative_to(PROJECT).as_posix()
    for room in (
        "p2p_diloco",
        "simulator",
        "benchmarks",
        "gauges",
        "release",
        "research",
        "tests",
        "docs",
        "examples",
        "bootstrap",
    )
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


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a page, each with the place that a failure names."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield f"{path.relative_to(PROJECT)}:{number}", line


def test_docstrings_begin_with_a_noun_or_an_imperative() -> None:
    assert [
        f"{path.relative_to(PROJECT)}:{line}: {text.splitlines()[0]}"
        for path in CODE
        for line, text in docstrings(path)
        if HEADLESS.match(text)
    ] == []


def test_pages_have_lines_that_people_can_read() -> None:
    long = []
    for path in PAGES:
        in_code = False
        for place, line in lines_of(path):
            in_code ^= line.startswith("```")
            if len(line) > LONGEST_LINE and not in_code and not line.startswith("|"):
                long.append(place)
    assert long == []


def test_pages_name_modules_that_exist() -> None:
    named = {
        (place, name)
        for path in PAGES
        if path.name not in HISTORY
        for place, line in lines_of(path)
        for name in re.findall(r"`([\w./-]+\.py)(?:::[^`]*)?`", line)
    }
    assert [one for one in named if not any(f"/{module}".endswith(f"/{one[1]}") for module in MODULES)] == []


def test_pages_for_users_are_in_plain_english() -> None:
    pages = [path for path in PAGES if path.name not in HISTORY and path.parent.name != "decisions"]
    assert [f"{place}: {line}" for path in pages for place, line in lines_of(path) if DIALECT.search(line)] == []
