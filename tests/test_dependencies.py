"""Declared dependencies match the imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
ELSEWHERE = frozenset({"torchft"})
"""Packages with an environment of their own, which `python -m benchmarks install-torchft` creates."""
LATER_STDLIB = {"compression"}
"""Part of Python from 3.14 on."""
LABORATORY = ("benchmarks", "gauges", "internet", "release", "research", "simulator")


def declared(extra: str | None = None) -> set[str]:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return {re.split(r"[^\w-]", line)[0] for line in lines}


def imported(folder: Path) -> set[str]:
    """Return the third-party packages that any module below `folder` imports when it runs."""
    return {name for path in folder.rglob("*.py") for name in imported_by(path)}


def imported_by(path: Path) -> set[str]:
    """Return the third-party packages that a module imports when it runs."""
    names = {name.partition(".")[0] for name in imports_of(ast.parse(path.read_text()))}
    return names - {"p2p_diloco"} - sys.stdlib_module_names - LATER_STDLIB


def imports_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""
    elif (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("import_module", "find_spec", "import_extra"))
        and node.args
    ):
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child)


def test_the_package_imports_exactly_what_is_declared() -> None:
    optional = declared("hf") | declared("lightning") | declared("page") | declared("track")
    assert imported(PROJECT / "p2p_diloco") == declared() | {name.replace("-", "_") for name in optional}


def test_examples_import_nothing_undeclared() -> None:
    own = {path.stem for path in (PROJECT / "examples").rglob("*.py")}
    assert imported(PROJECT / "examples") - own <= declared() | declared("hf") | declared("lightning")


def test_the_extra_of_notebooks_runs_them() -> None:
    found = imported_by(PROJECT / "tests" / "processes" / "test_examples.py")
    assert found - {"pytest", "nbformat"} == declared("notebooks") - {"ipykernel"}, "nbclient brings nbformat"


def test_programs_beside_the_package_import_nothing_undeclared() -> None:
    beside = {name for room in LABORATORY for name in imported(PROJECT / room)}
    assert beside - set(LABORATORY) - ELSEWHERE <= declared() | declared("plots")


def test_plots_import_exactly_what_their_extra_declares() -> None:
    drawn = imported_by(PROJECT / "benchmarks" / "figures" / "draw.py")
    assert drawn - set(LABORATORY) - declared() == declared("plots")


def test_no_extra_is_unused() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert sorted(project["optional-dependencies"]) == "dev docs hf lightning notebooks page plots track web".split()
