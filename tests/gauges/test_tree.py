"""Size and shape of small made checkouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gauges.tree import MOST_ATTRIBUTES, MOST_LINES, MOST_METHODS, Tree


def made(folder: Path, files: dict[str, str]) -> Tree:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return Tree(folder)


def with_attributes(count: int, head: str = "class Big:") -> str:
    return f"{head}\n    def __init__(self):\n" + "".join(f"        self.a{number} = 0\n" for number in range(count))


def with_methods(count: int) -> str:
    return "class Big:\n" + "".join(f"    def m{number}(self): ...\n" for number in range(count))


@pytest.mark.parametrize(
    ("text", "is_large"),
    [
        (with_attributes(MOST_ATTRIBUTES), False),
        (with_attributes(MOST_ATTRIBUTES + 1), True),
        (with_attributes(MOST_ATTRIBUTES) + "        self.a, (self.b, *self.c) = x\n", True),
        (with_attributes(MOST_ATTRIBUTES) + "        self.a0 += 1\n        self.other.b = self.c\n", False),
        (with_methods(MOST_METHODS), False),
        (with_methods(MOST_METHODS + 1), True),
        (with_attributes(MOST_ATTRIBUTES + 1, "@dataclass(slots=True)\nclass Record:"), True),
        (with_attributes(MOST_ATTRIBUTES + 1, "@dataclass(frozen=True)\nclass Value:"), False),
        ("class Section(BaseModel): ...\n" + with_attributes(MOST_ATTRIBUTES + 1, "class Settings(Section):"), False),
    ],
)
def test_a_class_is_large_from_one_attribute_or_method_above_the_limit_on_except_values(
    tmp_path: Path, text: str, is_large: bool
) -> None:
    tree = made(tmp_path, {"p2p_diloco/big.py": text})
    assert bool(list(tree.large_classes("p2p_diloco/big.py"))) is is_large


def test_branches_are_all_places_at_which_code_can_go_on_in_two_ways(tmp_path: Path) -> None:
    body = """
    def f(self, x):
        for a in x:
            while a and x and self:
                y = 1 if a else 2
        try:
            return [b for b in x if b if not b]
        except ValueError:
            match x:
                case 1 | 2:
                    pass
"""
    tree = made(tmp_path, {"p2p_diloco/big.py": with_methods(MOST_METHODS) + body})
    (found,) = tree.large_classes("p2p_diloco/big.py")
    assert found["branches"] == 9


@pytest.mark.parametrize(("lines", "is_long"), [(MOST_LINES, False), (MOST_LINES + 1, True)])
def test_a_function_is_long_from_one_line_above_the_limit_on(tmp_path: Path, lines: int, is_long: bool) -> None:
    tree = made(tmp_path, {"p2p_diloco/long.py": "@cache\ndef f():\n" + "    x = 1\n" * (lines - 1)})
    assert bool(list(tree.long_functions("p2p_diloco/long.py"))) is is_long


def test_writes_into_other_objects_are_those_into_attributes_of_anything_but_self(tmp_path: Path) -> None:
    text = "class A:\n    def f(self, x):\n"
    for line in ("self.a = 1", "x.b = 1", "self.x.c += 1", "d, x[0].e = 1, 2", "x[0] = self.f", "x: int = x.g"):
        text += f"        {line}\n"
    tree = made(tmp_path, {"p2p_diloco/a.py": text})
    written = [line.split()[1] for line in tree.foreign_writes("p2p_diloco/a.py")]
    assert written == ["x.b", "self.x.c", "x[0].e"]


def test_private_names_that_tests_take_from_others_are_listed(tmp_path: Path) -> None:
    text = "from p2p_diloco.a import _b, c\nx._d()\nself._e = super()._f\ny.__class__, pair._replace(g=x._h)\n"
    tree = made(tmp_path, {"tests/test_a.py": text, "p2p_diloco/a.py": "x._i\n"})
    reached = [name for path in tree.parsed for name in tree.private_reaches(path)]
    assert reached == ["tests/test_a.py:1 _b", "tests/test_a.py:2 _d", "tests/test_a.py:4 _h"]


def test_a_small_module_has_one_importer_wherever_that_is_but_for_tests(tmp_path: Path) -> None:
    tree = made(
        tmp_path,
        {
            "p2p_diloco/once.py": "x = 1\n",
            "p2p_diloco/twice.py": "x = 1\n",
            "p2p_diloco/never.py": "x = 1\n",
            "p2p_diloco/long.py": "x = 1\n" * 80,
            "p2p_diloco/user.py": "from p2p_diloco import twice\nfrom p2p_diloco.long import x\n" * 40,
            "simulator/user.py": "from p2p_diloco.once import x\nimport p2p_diloco.twice\n",
            "tests/test_once.py": "from p2p_diloco.once import x\nfrom p2p_diloco.never import x\n",
        },
    )
    assert tree.small_modules() == [{"place": "p2p_diloco/once.py", "lines": 1, "importer": "simulator/user.py"}]


def test_public_names_are_defined_or_listed(tmp_path: Path) -> None:
    text = "from a import b, c\n__all__ = ['b', 'f']\nX, (Y, _Z) = 1, (2, 3)\ndef f(): g = 1\nclass _H: i = 1\n"
    tree = made(tmp_path, {"p2p_diloco/a.py": text, "p2p_diloco/testing/b.py": "y: int = 1\n"})
    assert tree.size("product") == {"lines": 5, "modules": 1, "public names": 4}
    assert tree.size("kit") == {"lines": 1, "modules": 1, "public names": 1}


def test_fields_of_sections_count_one_by_one_also_if_the_sections_are_in_another_file(tmp_path: Path) -> None:
    tree = made(
        tmp_path,
        {
            "p2p_diloco/run.py": "from p2p_diloco.inner import Inner\nclass Outer:\n    a: float\n    b: int\n"
            "class Run:\n    name: str\n    outer: Outer = Outer()\n    inner: tuple[Inner, ...]\n    kind: Kind\n",
            "p2p_diloco/inner.py": "class Inner:\n    c: int\n",
            "p2p_diloco/other.py": "class Kind:\n    d: int\n    e: int\n",
        },
    )
    assert tree.fields("Run") == ["name", "outer.a", "outer.b", "inner.c", "kind"]


def test_numbers_that_nothing_holds_are_errors_and_not_zero(tmp_path: Path) -> None:
    tree = made(tmp_path, {"p2p_diloco/a.py": "class PeerSettings:\n    port: int\n", "Makefile": "test: a\nX := y\n"})
    with pytest.raises(LookupError, match="no manifest keys and no status fields and no message kinds; name"):
        tree.numbers()
