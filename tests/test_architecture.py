"""The architecture is kept: imports go down the floors, pure rooms stay pure, and there are no cycles."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "p2p_diloco"

# The lowest floor first. Rooms of one line are on one floor; STRANGERS lists those that may not import each other.
# The library is all below `app`: whoever trains a model of his own needs nothing else.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "ids", "rate", "wording", "signing", "memory", "span_log"),
    ("transport", "protocol", "codec"),
    ("outer",),
    ("span",),
    ("node",),
    ("config",),
    ("storage", "bandwidth", "guest"),
    ("island", "status"),
    ("session",),
    ("testing", "api"),
    ("app", "callbacks", "__main__"),
)
SUBFLOORS = {
    "protocol": ("wire", "membership", "round", "repair", "files"),
    "app": ("text", "models", "training", "page", "cli"),
}
"""Packages inside a room, the lowest first; modules of the room itself are outside them."""
STRANGERS = (
    ("memory", "span_log"),
    ("transport", "protocol", "codec"),
    ("transport", "protocol", "outer"),
    ("island", "status"),
    ("app", "callbacks"),
)

PURE_ROOMS = ("span_log", "outer", "codec", "protocol")
IMPURE_MODULES = frozenset(
    "asyncio builtins concurrent contextvars ctypes datetime fcntl glob hivemind importlib logging mmap "
    "multiprocessing os pathlib platform queue random resource rich secrets select selectors shutil signal socket "
    "subprocess sys tempfile threading time torch uuid uvloop warnings".split()
)
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "__import__", "breakpoint", "hash", "id"})
PICKLERS = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
HEAVY = frozenset({"torch", "hivemind"})
OF_EXTRAS = frozenset("accelerate datasets lightning peft pyarrow tensorboard tokenizers transformers".split())


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        yield node.module or ""
        # In `from p2p_diloco import ids`, only the last word names a module.
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def all_imports(path: Path) -> set[str]:
    return {name for node in ast.walk(parsed(path)) for name in imported_names(node)}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_at_start(path: Path) -> set[str]:
    """Return names imported with the module, without those inside functions or for the type checker alone."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(parsed(path).body)
    while waiting:
        node = waiting.pop()
        found.update(imported_names(node))
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_type_checking(node):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def room_of(name: str) -> str | None:
    """Return `outer` for `p2p_diloco.outer.mean`; None for the package itself and for foreign modules."""
    words = name.split(".")
    return words[1] if words[0] == PACKAGE.name and len(words) > 1 else None


@cache
def rooms() -> set[str]:
    found = {room_of(module_name(path)) for path in python_files(PACKAGE)}
    return {room for room in found if room is not None}


def rooms_known_to(path: Path) -> set[str]:
    standing = rooms()
    return {room for name in all_imports(path) if (room := room_of(name)) is not None and room in standing}


FLOOR_OF = {room: height for height, line in enumerate(FLOORS) for room in line}
MODULES = [path for path in python_files(PACKAGE) if path.name not in ("__init__.py", "__main__.py")]
PURE_FILES = [path for path in python_files(PACKAGE) if room_of(module_name(path)) in PURE_ROOMS]


def test_every_room_has_a_floor() -> None:
    assert rooms() - set(FLOOR_OF) == set(), "add the new room to FLOORS and to the diagram of the architecture"


def test_imports_go_down() -> None:
    upward = [
        f"{module_name(path)} is below {there}/ and may not import it"
        for path in MODULES
        for there in rooms_known_to(path)
        if FLOOR_OF[there] > FLOOR_OF[room_of(module_name(path)) or ""]
    ]
    assert upward == []


def test_strangers_do_not_import_each_other() -> None:
    between = [
        f"{module_name(path)} may not import {there}/"
        for path in MODULES
        for there in rooms_known_to(path)
        for line in STRANGERS
        if there in line and room_of(module_name(path)) in line and there != room_of(module_name(path))
    ]
    assert between == []


def test_packages_of_the_extras_are_imported_only_when_they_are_used() -> None:
    found = [
        (module_name(path), name)
        for path in MODULES
        if path.parent.name != "callbacks"
        for name in imports_at_start(path)
        if name.split(".")[0] in OF_EXTRAS
    ]
    assert found == []


def test_packages_inside_a_room_import_only_those_below() -> None:
    upward = []
    for room, floors in SUBFLOORS.items():
        for path in python_files(PACKAGE / room):
            here = module_name(path).split(".")[2:]
            above = floors[floors.index(here[0]) + 1 :] if len(here) > 1 else ()
            upward += [(path, name) for name in all_imports(path) for one in above if f".{room}.{one}." in name]
    assert upward == []


def test_no_two_rooms_import_each_other() -> None:
    knows: dict[str, set[str]] = {room: set() for room in rooms()}
    for path in MODULES:
        here = room_of(module_name(path))
        assert here is not None
        knows[here] |= rooms_known_to(path) - {here}
    circles = [
        (one, other) for one, known in sorted(knows.items()) for other in known if one in knows[other] and one < other
    ]
    assert circles == []


def test_the_package_imports_nothing_from_beside_it() -> None:
    beside = {"benchmarks", "gauges", "internet", "release", "research", "simulator", "tests"}
    assert [module_name(path) for path in MODULES if {name.split(".")[0] for name in all_imports(path)} & beside] == []


def nodes_of(path: Path, kind: type[Node]) -> Iterator[Node]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, kind))


def test_pure_rooms_import_nothing_with_side_effects() -> None:
    assert [
        (module_name(path), name)
        for path in PURE_FILES
        for name in all_imports(path)
        if name.split(".")[0] in IMPURE_MODULES
    ] == []


def test_pure_rooms_call_nothing_with_side_effects() -> None:
    assert [
        (module_name(path), call.lineno, call.func.id)
        for path in PURE_FILES
        for call in nodes_of(path, ast.Call)
        if isinstance(call.func, ast.Name) and call.func.id in IMPURE_CALLS
    ] == []


def test_pure_rooms_draw_randomness_only_from_a_given_key() -> None:
    # A counter-based generator is a plain function of its key; its raw bits are the same in every NumPy version.
    assert [
        (module_name(path), node.attr)
        for path in PURE_FILES
        for node in nodes_of(path, ast.Attribute)
        if ast.unparse(node.value) in ("np.random", "numpy.random") and node.attr != "Philox"
    ] == []


def test_nothing_is_unpickled() -> None:
    """Without `weights_only`, a file that torch loads can run code."""
    files = python_files(PACKAGE)
    assert [path for path in files for name in all_imports(path) if name.split(".")[0] in PICKLERS] == []
    assert [
        (module_name(path), ast.unparse(call))
        for path in files
        for call in nodes_of(path, ast.Call)
        if ast.unparse(call.func) in ("torch.load", "torch.hub.load") and "weights_only=True" not in ast.unparse(call)
    ] == []


def test_every_file_has_a_docstring() -> None:
    assert [module_name(path) for path in python_files(PACKAGE) if not ast.get_docstring(parsed(path))] == []


def texts_of(path: Path) -> Iterator[str]:
    """Yield every string of a module except docstrings."""
    bare = {id(node.value) for node in ast.walk(parsed(path)) if isinstance(node, ast.Expr)}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value


def test_no_printed_text_names_a_document_missing_from_the_wheel() -> None:
    assert [(module_name(path), text) for path in MODULES for text in texts_of(path) if "docs/" in text] == []


def test_every_folder_is_a_package() -> None:
    assert [path.parent for path in MODULES if not (path.parent / "__init__.py").is_file()] == []


def test_no_room_is_called_utils() -> None:
    banned = {"utils", "util", "common", "helpers", "helper", "manager", "core", "misc"}
    assert [module_name(path) for path in MODULES if banned & set(module_name(path).split("."))] == []


# Modules that `--help` and `status` load. Other commands load their rooms when they run.
LIGHT_FILES = (
    "errors.py ids.py signing.py rate.py wording.py config/new_file.py config/key_file.py "
    "config/toml_document.py config/manifest.py config/run_file.py config/invite.py config/settings.py "
    "app/cli/app.py app/cli/command_line.py app/cli/owner.py"
).split()
LIGHT_MODULES = [PACKAGE / file for file in LIGHT_FILES]


def modules_loaded_by(path: Path) -> dict[str, str]:
    """Return every module that importing `path` loads, each with the module that imports it."""
    files = {module_name(found): found for found in python_files(PACKAGE)}
    asked_by = {module_name(path): "the command line"}
    waiting = [module_name(path)]
    while waiting:
        here = waiting.pop()
        for name in imports_at_start(files[here]) if here in files else ():
            # Importing a module runs the __init__ of every folder above it.
            words = name.split(".")
            for above in (".".join(words[:count]) for count in range(1, len(words) + 1)):
                if above not in asked_by:
                    asked_by[above] = here
                    waiting.append(above)
    return asked_by


def test_the_command_line_starts_without_torch_and_hivemind() -> None:
    heavy = [
        f"{requester} imports {name}; import it inside the function that needs it"
        for path in LIGHT_MODULES
        for name, requester in modules_loaded_by(path).items()
        if name.split(".")[0] in HEAVY
    ]
    assert heavy == []


def test_the_rules_of_this_file_detect_violations() -> None:
    """A rule that detects nothing would always pass: this file itself breaks purity in the ways it looks for."""
    assert {name.split(".")[0] for name in all_imports(Path(__file__))} & IMPURE_MODULES == {"pathlib", "sys"}
    assert "typing.TypeVar" in imports_at_start(Path(__file__))
    assert set(FLOOR_OF) >= rooms()
    assert sys.version_info >= (3, 11)
