"""Small mistakes planted in a copy of a checkout, one at a time, to see how many of them its tests find.

A seed draws mutants among all places of some rooms. Each is named by its place, so the same ones can be planted in
another checkout. The tests of a mutant are those in files that import its module, directly or through helpers in
`tests/`. It counts as killed only if the test that fails passes without it.
"""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from typing import Any, NamedTuple

from gauges.tree import Function, Tree

ROOMS = tuple(f"p2p_diloco/{room}/" for room in ("protocol", "outer", "span", "codec"))
SECONDS = 60.0
"""Maximum time for the tests of a mutant."""
PYTEST = (sys.executable, *"-m pytest -x -q -p no:cacheprovider --rootdir=. --hypothesis-seed=0 -m".split(), "not long")
OUTCOMES = ("killed", "survived", "timed out", "untested", "gone")
"""Gone: this checkout has no such place."""
ENDS = {0: "survived", None: "timed out", 5: "untested"}
"""Outcomes by the status of pytest, except that of a test that fails."""
WITHOUT_MUTANTS = (ast.Raise, ast.Assert, ast.JoinedStr)
"""Texts, and checks of our own mistakes."""
OTHER: dict[type[ast.AST], Any] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And}
OPPOSITE: dict[type[ast.cmpop], Any] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
BOUNDARY: dict[type[ast.cmpop], Any] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
        function: qualified name of the function or class around it; empty at the top of a module.
        number: its place among equal mutants of this function.
    """

    path: str
    function: str
    operator: str
    before: str
    after: str
    number: int


class Place(NamedTuple):
    """The code that a mutant replaces: offsets into the bytes of the file, and what stands there instead."""

    line: int
    start: int
    stop: int
    text: str


class Outcome(NamedTuple):
    """The end of a mutant, one of `OUTCOMES`, and the test that has found it."""

    mutant: Mutant
    line: int
    outcome: str
    found_by: str = ""

    def __str__(self) -> str:
        path, function, _, before, after, _ = self.mutant
        found_by = f"  [{self.found_by}]" if self.found_by else ""
        return f"{self.outcome:9}  {path}:{self.line} {function}: {before}  →  {after}{found_by}"


def mutants_of(path: str, text: str) -> dict[Mutant, Place]:
    """Return all mutants of a module."""
    line_starts = [0]
    for line in text.encode().splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    found: dict[Mutant, Place] = {}
    counts: Counter[Mutant] = Counter()
    for function, node in _nodes(ast.parse(text), ""):
        for operator, other in _mistakes(node):
            mutant = Mutant(path, function, operator, ast.unparse(node), ast.unparse(other), 0)
            start = line_starts[node.lineno - 1] + node.col_offset
            stop = line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            written = mutant.after if isinstance(node, ast.stmt) else f"({mutant.after})"
            found[mutant._replace(number=counts[mutant])] = Place(node.lineno, start, stop, written)
            counts[mutant] += 1
    return found


def _nodes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield the nodes that may be replaced, each with the names of the functions and classes around it."""
    if isinstance(node, ast.expr | ast.stmt):
        yield function, node
    if isinstance(node, Function | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, WITHOUT_MUTANTS):
                    yield from _nodes(child, function)


def _mistakes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Yield what could be written in place of a node by mistake."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for operator, swaps in (("comparison", OPPOSITE), ("boundary", BOUNDARY)):
                for place, op in enumerate(ops):
                    if type(op) in swaps:
                        yield operator, ast.Compare(left, [*ops[:place], swaps[type(op)](), *ops[place + 1 :]], others)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):
            yield "sign", ast.BinOp(left, OTHER[type(sign)](), right)
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub() as sign, value=value):
            yield "sign", ast.AugAssign(target, OTHER[type(sign)](), value)
        case ast.BoolOp(op=op, values=values):
            yield "and or", ast.BoolOp(OTHER[type(op)](), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", operand
        case ast.Return(value=ast.Compare() | ast.BoolOp() as value):
            yield "return", ast.Return(ast.UnaryOp(ast.Not(), value))
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            yield "one more", ast.Constant(number + 1)
            yield "one less", ast.Constant(number - 1)


def draw(tree: Tree, seed: int, count: int) -> list[Mutant]:
    """Draw mutants of a checkout."""
    paths = [path for path in tree.texts if path.startswith(ROOMS)]
    return random.Random(seed).sample(
        sorted(mutant for path in paths for mutant in mutants_of(path, tree.texts[path])), count
    )


def importing_tests(tree: Tree, path: str) -> list[str]:
    """Return the test files that import a module, itself or through helpers in `tests/`; those closest to it first."""
    found, fresh = set[str](), {path}
    while fresh:
        found |= fresh
        fresh = {
            test
            for test in tree.texts
            if test.startswith("tests/") and test not in found
            if tree.imports(test) & {one for one in fresh if not _is_test(one)}
        }
    room, name = PurePosixPath(path).parts[1], PurePosixPath(path).name
    return sorted(
        filter(_is_test, found),
        key=lambda test: (not test.endswith(f"/test_{name}"), f"tests/{room}/" not in test, test),
    )


def _is_test(path: str) -> bool:
    return PurePosixPath(path).name.startswith("test_")


@dataclass(slots=True)
class _Copy:
    """A copy of the checkout in which mutants are planted.

    Attributes:
        left_out: arguments that leave out the tests that fail without a mutant.
    """

    folder: Path
    left_out: list[str] = field(default_factory=list)

    def try_out(self, mutant: Mutant, place: Place, tests: Sequence[str]) -> Outcome:
        """Plant a mutant, and run tests until one fails."""
        file = self.folder / mutant.path
        whole = file.read_bytes()
        while tests:
            file.write_bytes(whole[: place.start] + place.text.encode() + whole[place.stop :])
            try:
                status, output = self._run([*tests, *self.left_out])
            finally:
                file.write_bytes(whole)
            if status in ENDS:
                return Outcome(mutant, place.line, ENDS[status])
            failed = re.search(r"^(?:FAILED|ERROR) ([^\s[]+\.py[^\s[]*)", output, re.MULTILINE)
            test = failed[1] if failed is not None else ""
            if self._run([test] if "::" in test else ["--collect-only", *([test] if test else tests)])[0] == 0:
                return Outcome(mutant, place.line, "killed", test or f"pytest ended with status {status}")
            without = f"--deselect={test}" if "::" in test else f"--ignore={test}"
            if not test or without in self.left_out:
                raise RuntimeError(f"pytest ended with status {status}, with and without a mutant:\n{output[-2000:]}")
            self.left_out.append(without)
        return Outcome(mutant, place.line, "untested")

    def _run(self, arguments: Sequence[str]) -> tuple[int | None, str]:
        """Run pytest; the status is None if it takes too long."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        # A file, not a pipe: a process that a test leaves behind would keep a pipe open.
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [*PYTEST, *arguments],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return status, output.read()


def play(tree: Tree, mutants: Collection[Mutant], jobs: int = 1) -> Iterator[Outcome]:
    """Try out mutants in copies of a checkout, and yield their outcomes as they come.

    Compiled loops are copied too. Run the tests once before: compiling takes longer than the tests of a mutant may.
    """
    places = {
        path: mutants_of(path, tree.texts[path]) for path in {mutant.path for mutant in mutants} & set(tree.texts)
    }
    copies: SimpleQueue[_Copy] = SimpleQueue()

    def outcome(mutant: Mutant) -> Outcome:
        place = places.get(mutant.path, {}).get(mutant)
        if place is None:
            return Outcome(mutant, 0, "gone")
        copied = copies.get()
        try:
            return copied.try_out(mutant, place, importing_tests(tree, mutant.path))
        finally:
            copies.put(copied)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            target = Path(folder) / str(number)
            shutil.copytree(tree.root, target, ignore=shutil.ignore_patterns(".*", "build", "dist"))
            copies.put(_Copy(target))
        for done in as_completed([pool.submit(outcome, mutant) for mutant in mutants]):
            yield done.result()
