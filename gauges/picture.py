"""`python -m gauges picture`: draw the rooms, their imports and the ways of messages into docs/house.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from gauges.tree import PACKAGE, Tree, room_of
from gauges.ways import WAYS

DRAWN = ("pseudo-gradient", "entry", "heartbeat")
INTRODUCTION = """\
# The house in pictures

Drawn by `python -m gauges picture` from the imports of the code and from the recorded calls of two peers that train
together. What the rooms do is told in [how it works](how-it-works.md).
"""


def page(tree: Tree, ways: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """Return the page.

    Args:
        ways: the modules of each way, stage by stage.
    """
    drawn = [line for name in DRAWN for line in _way(name, ways[name])]
    return "\n".join([INTRODUCTION, *_rooms(tree), *drawn])


def _rooms(tree: Tree) -> Iterator[str]:
    """Yield a diagram of the rooms, each above those that it imports.

    An arrow to a room that another arrow leads to as well is left out.
    """
    rooms: dict[str, list[str]] = {}
    for path in tree.texts:
        if room_of(path) == "product":
            rooms.setdefault(_room(tree, path), []).append(path)
    imports = {
        room: {_room(tree, other) for path in paths for other in tree.imports(path) if room_of(other) == "product"}
        - {room}
        for room, paths in rooms.items()
    }
    below = {room: _reached(room, imports) for room in rooms}
    yield "## Rooms and their imports\n"
    yield "An arrow leads to a room that is imported. Numbers are lines and modules.\n"
    yield "```mermaid\nflowchart TB"
    for room, paths in sorted(rooms.items()):
        lines = sum(len(tree.texts[path].splitlines()) for path in paths)
        yield f'  {room}["{room}<br/>{lines:,} in {len(paths)}"]'
    for room, others in sorted(imports.items()):
        indirect = {far for near in others for far in below[near]}
        yield from (f"  {room} --> {other}" for other in sorted(others - indirect))
    yield "```\n"


def _reached(room: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [room]
    while left:
        new = imports.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def _room(tree: Tree, path: str) -> str:
    """Return the folder of a module below the package; for a module beside the folders, whether it imports one."""
    parts = PurePosixPath(path).relative_to(PACKAGE).parts
    if len(parts) > 1:
        return parts[0]
    if parts[0] == "__main__.py":
        return "cli"
    return "api" if parts[0] == "__init__.py" or any(other.count("/") > 1 for other in tree.imports(path)) else "base"


def _way(name: str, stages: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a diagram of a way: a box for each stage, with the modules that are called first in it."""
    count = sum(map(len, stages))
    yield f"## The way of {'an' if name[0] in 'aeiou' else 'a'} {name}\n"
    yield f"{count} modules, each in the first stage that calls it. A stage is what one thread does without a pause.\n"
    yield "```mermaid\nflowchart TB"
    for number, (stage, modules) in enumerate(zip(WAYS[name], stages, strict=True)):
        kind = f" ({stage.of})" if stage.of else ""
        listed = "<br/>".join([f"<b>{stage.root[1].replace('.<locals>', '')}{kind}</b>", *modules])
        yield f'  s{number}["{listed}"]'
    if len(stages) > 1:
        yield "  " + " --> ".join(f"s{number}" for number in range(len(stages)))
    yield "```\n"
