"""Mutants of small made checkouts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gauges.mutants import Mutant, draw, importing_tests, mutants_of, play
from gauges.tree import Tree

MODULE = "p2p_diloco/outer/limit.py"
LIMIT = '''"""Is 1 < 2?"""
MOST: Annotated[int, 1 + 1] = 5


@cache(maxsize=1)
def is_within(number: Literal[1], slack: int = 0) -> bool:
    """Return 1 < 2."""
    assert number > 0, "no number"
    if not number:
        raise ValueError(f"{number + 1} < 2" if number < 0 else "")
    text = f"{number + 1}"
    number -= slack
    return number <= MOST and (
        # by a rule
        number + slack in text or number is None
    )
'''
FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\nmarkers = ["long"]\n',
    "p2p_diloco/__init__.py": "",
    "p2p_diloco/outer/__init__.py": "",
    MODULE: "def is_within(number: int) -> bool:\n    return number <= 5\n",
    "p2p_diloco/outer/alone.py": "ALONE = 1\n",
    "tests/outer/test_limit.py": """
from p2p_diloco.outer.limit import is_within
def test_nothing_is_within_six(): assert is_within(6)
def test_four_is_within(): assert is_within(4)
""",
    "tests/outer/conftest.py": "import sys; sys.path.insert(0, __file__.rpartition('/')[0])\n",
    "tests/outer/made.py": "from p2p_diloco.outer.limit import is_within\n",
    "tests/outer/test_more.py": "from made import is_within\n",
    "tests/session/test_limit.py": "import p2p_diloco.outer.limit\n",
    "tests/session/test_other.py": "import json\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return Tree(tmp_path)


def test_mutants_change_conditions_signs_and_numbers_but_no_text_annotation_error_or_assertion() -> None:
    found = [(mutant.function, mutant.before, mutant.after) for mutant in mutants_of(MODULE, LIMIT)]
    whole = "number <= MOST and (number + slack in text or number is None)"
    assert sorted(found) == sorted(
        [
            ("", "5", "6"),
            ("", "5", "4"),
            ("is_within", "0", "1"),
            ("is_within", "0", "-1"),
            ("is_within", "not number", "number"),
            ("is_within", "number -= slack", "number += slack"),
            ("is_within", f"return {whole}", f"return not ({whole})"),
            ("is_within", whole, "number <= MOST or (number + slack in text or number is None)"),
            ("is_within", "number <= MOST", "number > MOST"),
            ("is_within", "number <= MOST", "number < MOST"),
            ("is_within", "number + slack in text or number is None", "number + slack in text and number is None"),
            ("is_within", "number + slack in text", "number + slack not in text"),
            ("is_within", "number + slack", "number - slack"),
            ("is_within", "number is None", "number is not None"),
        ]
    )


def test_each_mutant_is_python_that_differs_in_one_place() -> None:
    written = set()
    for place in mutants_of(MODULE, LIMIT).values():
        code = LIMIT.encode()
        written.add(ast.dump(ast.parse(code[: place.start] + place.text.encode() + code[place.stop :])))
    assert len(written) == len(mutants_of(MODULE, LIMIT))
    assert ast.dump(ast.parse(LIMIT)) not in written


def test_a_seed_draws_the_same_mutants_again(tree: Tree) -> None:
    assert draw(tree, 1, 4) == draw(tree, 1, 4) != draw(tree, 2, 4)


def test_a_mutant_has_the_same_name_after_its_function_has_moved() -> None:
    moved = mutants_of(MODULE, LIMIT.replace("@cache", "def other():\n    return 0 < 1\n\n\n@cache"))
    assert set(mutants_of(MODULE, LIMIT)) < set(moved)


def test_the_tests_of_a_module_import_it_directly_or_through_helpers(tree: Tree) -> None:
    assert importing_tests(tree, MODULE) == [
        "tests/outer/test_limit.py",
        "tests/session/test_limit.py",
        "tests/outer/test_more.py",
    ]


def test_a_mutant_is_killed_only_by_a_test_that_passes_without_it(tree: Tree) -> None:
    def mutant(before: str, after: str, *, path: str = MODULE, function: str = "is_within") -> Mutant:
        (found,) = (one for one in mutants_of(path, tree.texts[path]) if (one.before, one.after) == (before, after))
        return found

    mutants = [
        mutant("number <= 5", "number > 5"),
        mutant("number <= 5", "number < 5"),
        mutant("1", "2", path="p2p_diloco/outer/alone.py"),
        mutant("5", "6")._replace(before="50"),
    ]
    found = {outcome.mutant: (outcome.outcome, outcome.found_by) for outcome in play(tree, mutants)}
    assert [found[one] for one in mutants] == [
        ("killed", "tests/outer/test_limit.py::test_four_is_within"),
        ("survived", ""),
        ("untested", ""),
        ("gone", ""),
    ]
    assert (tree.root / MODULE).read_text(encoding="utf-8") == FILES[MODULE], "only copies change"
