"""The commands of `python -m gauges`: print the measures of a checkout, draw it, or try out mutants in it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gauges.mutants import OUTCOMES, Mutant, draw, play
from gauges.tree import MOST_ATTRIBUTES, MOST_LINES, MOST_METHODS, SMALL_LINES, Tree

PROJECT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    if arguments[:1] == ["mutants"]:
        return _try_mutants(arguments[1:])
    if arguments[:1] == ["picture"]:
        return _draw_picture(arguments[1:])
    parser = _parser("python -m gauges", "Print the size and shape of a checkout, and the ways through its code.")
    parser.add_argument("--ways", action="store_true", help="list the modules of each way")
    parser.add_argument("--no-run", action="store_true", help="run nothing: no ways, only what the files show")
    chosen = parser.parse_args(arguments)
    measured = Tree(chosen.tree).measure()
    ways = {} if chosen.no_run else _joined(ways_of(chosen.tree))
    print("\n".join(table(measured, ways)))
    for name, modules in ways.items() if chosen.ways else ():
        print(f"\n{name}: {' '.join(modules)}")
    _write(chosen.json, {**measured, "ways": ways})
    return 0


def ways_of(tree: Path) -> dict[str, list[list[str]]]:
    """Return the modules of each way through the package of a checkout, stage by stage; recorded in another process."""
    command = [sys.executable, "-P", str(PROJECT / "gauges" / "ways.py")]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise SystemExit("the ways could not be recorded, see above; --no-run leaves them out")
    ways: dict[str, list[list[str]]] = json.loads(ended.stdout)
    return ways


def _joined(ways: dict[str, list[list[str]]]) -> dict[str, list[str]]:
    return {name: [module for stage in stages for module in stage] for name, stages in ways.items()}


def table(measured: dict[str, Any], ways: dict[str, list[str]]) -> Iterator[str]:
    """Yield the lines of the table."""
    rooms: dict[str, dict[str, int]] = measured["rooms"]
    columns = ("lines", "modules", "public names")
    yield _row("size", *columns)
    for name, size in {**rooms, "all": {key: sum(size[key] for size in rooms.values()) for key in columns}}.items():
        yield _row(f"  {name}", *(size[key] for key in columns))
    yield ""
    yield _row(
        f"classes over {MOST_ATTRIBUTES} attributes or {MOST_METHODS} methods", "attributes", "methods", "branches"
    )
    for row in measured["large classes"]:
        yield _row(f"  {row['name']}", row["attributes"], row["methods"], row["branches"])
    yield ""
    yield _row(f"functions over {MOST_LINES} lines", len(measured["long functions"]))
    yield _row("writes into other objects' attributes", len(measured["writes into other objects"]))
    yield _row(f"modules under {SMALL_LINES} lines, one importer", len(measured["small modules with one importer"]))
    yield _row("private names that tests reach for", len(measured["private names in tests"]))
    lengths = {name: len(modules) for name, modules in ways.items()}
    if ways:
        lengths["pseudo-gradient and entry"] = len({*ways["pseudo-gradient"], *ways["entry"]})
    for title, counts in (
        ("modules on the way of", lengths),
        ("number of", measured["numbers"]),
        ("words", measured["words"]),
    ):
        if counts:
            yield f"\n{title}"
            yield from (_row(f"  {name}", count) for name, count in counts.items())


def _row(title: str, *cells: int | str) -> str:
    return f"{title:44}" + "".join(f"{cell:>14,}" if isinstance(cell, int) else f"{cell:>14}" for cell in cells)


def _try_mutants(arguments: Sequence[str]) -> int:
    parser = _parser("python -m gauges mutants", "Plant mistakes in copies of a checkout and run the tests of each.")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--count", type=int, default=40, help="number of mutants to draw")
    parser.add_argument("--drawn", type=Path, metavar="FILE", help="write the mutants to this file, for --from")
    parser.add_argument("--from", type=Path, dest="given", metavar="FILE", help="take these mutants instead of drawing")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants to try out at a time")
    chosen = parser.parse_args(arguments)
    tree = Tree(chosen.tree)
    if chosen.given is not None:
        mutants = [Mutant(**row) for row in json.loads(chosen.given.read_text(encoding="utf-8"))]
    else:
        mutants = draw(tree, chosen.seed, chosen.count)
    _write(chosen.drawn, [mutant._asdict() for mutant in mutants])
    outcomes = []
    for outcome in play(tree, mutants, chosen.jobs):
        outcomes.append(outcome)
        print(outcome, flush=True)
    counts = Counter(outcome.outcome for outcome in outcomes)
    print(f"{len(outcomes)} mutants: " + ", ".join(f"{counts[name]} {name}" for name in OUTCOMES))
    _write(chosen.json, [{**outcome._asdict(), "mutant": outcome.mutant._asdict()} for outcome in outcomes])
    return 0


def _draw_picture(arguments: Sequence[str]) -> int:
    from gauges.picture import page  # imports the package, which another checkout may not have

    chosen = _parser("python -m gauges picture", "Draw the rooms and the ways into docs/house.md.").parse_args(
        arguments
    )
    text = page(Tree(chosen.tree), ways_of(chosen.tree))
    (chosen.tree / "docs" / "house.md").write_text(text, encoding="utf-8")
    return 0


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--tree", type=Path, default=PROJECT, metavar="PATH", help="another checkout than this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file, with all places")
    return parser


def _write(path: Path | None, document: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
