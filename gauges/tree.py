"""Size and shape of a checkout, read from its files. Nothing of it is imported, so any checkout can be measured."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

PACKAGE = "p2p_diloco"
ROOMS = ("product", "kit", "tests", "benchmarks", "research", "other")
MOST_ATTRIBUTES, MOST_METHODS, MOST_LINES, SMALL_LINES = 20, 40, 80, 80
VALUES = {"NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "BaseModel"}
"""Bases of classes that hold values or settings; frozen data classes do so too."""
TURNS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
Function = ast.FunctionDef | ast.AsyncFunctionDef
_Node = TypeVar("_Node", bound=ast.AST)


class Tree:
    """The Python files of a checkout, except in folders that begin with a dot or that builds create.

    Args:
        root: the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = (path.relative_to(root) for path in sorted(root.glob("[!.]*/**/*.py")))
        found = [path.as_posix() for path in paths if path.parts[0] not in ("build", "dist")]
        self.texts = {path: (root / path).read_text(encoding="utf-8") for path in found}
        self.parsed = {path: ast.parse(text) for path, text in self.texts.items()}
        self._modules = {_module_name(path): path for path in found}
        self._helpers: dict[str, set[str]] = {}
        for path in found:
            if path.startswith("tests/"):
                self._helpers.setdefault(PurePosixPath(path).stem, set()).add(path)
        self._imports: dict[str, frozenset[str]] = {}
        self._product = {path: module for path, module in self.parsed.items() if room_of(path) == "product"}
        self._classes = {
            path: {node.name: node for node in _all(ast.ClassDef, module)} for path, module in self._product.items()
        }

    def measure(self) -> dict[str, Any]:
        """Return all measures."""
        return {
            "rooms": {room: self.size(room) for room in ROOMS},
            "large classes": [row for path in self._product for row in self.large_classes(path)],
            "long functions": [row for path in self._product for row in self.long_functions(path)],
            "writes into other objects": [row for path in self._product for row in self.foreign_writes(path)],
            "small modules with one importer": self.small_modules(),
            "private names in tests": [row for path in self.parsed for row in self.private_reaches(path)],
            "numbers": self.numbers(),
            "words": self.words(),
        }

    def size(self, room: str) -> dict[str, int]:
        """Return the lines, files and public names of a room.

        Public names are those without an underscore that a module defines, or lists in `__all__`.
        """
        paths = [path for path in self.texts if room_of(path) == room]
        return {
            "lines": sum(len(self.texts[path].splitlines()) for path in paths),
            "modules": len(paths),
            "public names": sum(len(public_names(self.parsed[path])) for path in paths),
        }

    def large_classes(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the classes of a file with too many attributes or methods, without those of their bases.

        Attributes are names that the class body defines or that methods assign to `self`; those of values and settings
        do not count. Methods include properties. Branches are `if`, loops, `except`, `case`, conditions of
        comprehensions, and each further operand of `and` and `or`.
        """
        for node in _all(ast.ClassDef, self.parsed[path]):
            methods = [part for part in node.body if isinstance(part, Function)]
            attributes = {name for part in node.body for name in _defined(part) if not isinstance(part, Function)}
            attributes |= {written.attr for written in _written(node) if _is_own(written)}
            is_large = len(attributes) > MOST_ATTRIBUTES and not self._is_value(path, node)
            if is_large or len(methods) > MOST_METHODS:
                yield {
                    "place": f"{path}:{node.lineno}",
                    "name": node.name,
                    "attributes": len(attributes),
                    "methods": len(methods),
                    "branches": branches(node),
                }

    def long_functions(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the functions of a file with too many lines, docstrings and comments included."""
        for node in ast.walk(self.parsed[path]):
            if isinstance(node, Function):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MOST_LINES:
                    yield {"place": f"{path}:{node.lineno}", "name": node.name, "lines": lines}

    def foreign_writes(self, path: str) -> Iterator[str]:
        """Yield the assignments of a file to an attribute of anything but `self` and `cls`.

        So `x.y = …`, `self.x.y += …` and `a, x.y = …` count, also if the function has just created x; `x[0] = …`,
        `setattr` and `object.__setattr__` do not.
        """
        for written in sorted(_written(self.parsed[path]), key=lambda written: written.lineno):
            if not _is_own(written):
                yield f"{path}:{written.lineno} {ast.unparse(written)}"

    def private_reaches(self, path: str) -> Iterator[str]:
        """Yield the names with one underscore that a test takes from anything but `self`, `cls` and `super()`.

        Those of a NamedTuple, such as `_replace`, are public.
        """
        if room_of(path) != "tests":
            return
        found = [(node.lineno, name.name) for node in _all(ast.ImportFrom, self.parsed[path]) for name in node.names]
        for node in _all(ast.Attribute, self.parsed[path]):
            if ast.unparse(node.value) not in ("self", "cls", "super()") and node.attr not in ("_replace", "_asdict"):
                found.append((node.lineno, node.attr))
        yield from (f"{path}:{line} {name}" for line, name in sorted(found) if re.match("_[^_]", name))

    def imports(self, path: str) -> frozenset[str]:
        """Return the files of this checkout that a file imports; tests import helpers without naming their folder."""
        if path not in self._imports:
            found: set[str | None] = set()
            for name in _imported(self.parsed[path]):
                # `from a import b` names module a.b, or b in module a.
                found |= {self._modules.get(name), self._modules.get(name.rpartition(".")[0])}
                if path.startswith("tests/"):
                    helpers = self._helpers.get(name.partition(".")[0], set())
                    found |= {helper for helper in helpers if _folder(helper) == _folder(path)} or helpers
            self._imports[path] = frozenset(other for other in found if other is not None and other != path)
        return self._imports[path]

    def small_modules(self) -> list[dict[str, Any]]:
        """Return the short modules of the product that a single file outside of the tests imports."""
        importers: dict[str, set[str]] = {}
        for path in self.texts:
            for imported in self.imports(path) if room_of(path) != "tests" else ():
                importers.setdefault(imported, set()).add(path)
        return [
            {"place": path, "lines": len(self.texts[path].splitlines()), "importer": next(iter(found))}
            for path, found in sorted(importers.items())
            if room_of(path) == "product" and not path.endswith("__init__.py")
            if len(found) == 1 and len(self.texts[path].splitlines()) < SMALL_LINES
        ]

    def numbers(self) -> dict[str, int]:
        """Return how many settings, manifest keys, status fields, message kinds and make targets there are.

        Raises:
            LookupError: there are none, because what holds them has another name now.
        """
        makefile = (self.root / "Makefile").read_text(encoding="utf-8")
        numbers = {
            "settings": len(self.fields("PeerSettings")),
            "manifest keys": len(self.fields("RunManifest")),
            "status fields": len(self.fields("PeerStatus")),
            "message kinds": self._members_of_union("Message"),
            "make targets": len(set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))),
        }
        if missing := [name for name, number in numbers.items() if not number]:
            raise LookupError(f"found no {' and no '.join(missing)}; name the class that holds them now")
        return numbers

    def fields(self, name: str, path: str | None = None) -> list[str]:
        """Return the fields of a class; in place of one that holds a class with fields, the fields of that.

        Args:
            path: the file in which the class is defined or imported; None: the one that defines it.
        """
        path = path or next((path for path, classes in self._classes.items() if name in classes), "")
        found = self._class(path, name)
        if found is None:
            return []
        home, node = found
        fields = []
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                inner = [field for word in _all(ast.Name, part.annotation) for field in self.fields(word.id, home)]
                fields += [f"{part.target.id}.{field}" for field in inner] or [part.target.id]
        return fields

    def words(self) -> dict[str, int]:
        """Return the words of the documents, tables and code included."""
        pages = {path.relative_to(self.root).as_posix(): path for path in sorted((self.root / "docs").rglob("*.md"))}
        groups = {"README": [self.root / "README.md"], "CHANGELOG": [self.root / "CHANGELOG.md"]}
        if (log := self.root / "research" / "lab-log.md").exists():
            groups["lab log"] = [log]
        for name, page in pages.items():
            group = "decisions" if "/decisions/" in name else "docs"
            groups.setdefault(group, []).append(page)
        return {
            group: sum(len(page.read_text(encoding="utf-8").split()) for page in found)
            for group, found in groups.items()
        }

    def _class(self, path: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return a class of the product by its name in a file, and the file that defines it."""
        if name in self._classes.get(path, {}):
            return path, self._classes[path][name]
        for node in _all(ast.ImportFrom, self.parsed[path]) if path else ():
            source = self._modules.get(node.module or "")
            if source in self._classes and any(alias.name == name for alias in node.names):
                return self._class(source, name)
        return None

    def _is_value(self, path: str, node: ast.ClassDef) -> bool:
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        is_frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
        own = [found for base in bases if (found := self._class(path, base)) is not None]
        return is_frozen or bool(bases & VALUES) or any(self._is_value(*found) for found in own)

    def _members_of_union(self, name: str) -> int:
        unions = [
            node.value
            for module in self._product.values()
            for node in module.body
            if isinstance(node, ast.Assign) and name in _defined(node)
        ]
        return sum(len(list(_all(ast.Name, union))) for union in unions)


def room_of(path: str) -> str:
    """Return the room of a file, wherever the simulator is."""
    top, _, rest = path.partition("/")
    if top == PACKAGE:
        return "kit" if rest.startswith("testing") else "product"
    return "kit" if top in ("simulator", "internet") else top if top in ROOMS else "other"


def public_names(module: ast.Module) -> set[str]:
    """Return the names without an underscore that a module defines, or lists in `__all__`."""
    names = {name for part in module.body for name in _defined(part) if not name.startswith("_")}
    for part in module.body:
        if isinstance(part, ast.Assign) and "__all__" in _defined(part):
            names |= {node.value for node in _all(ast.Constant, part.value) if isinstance(node.value, str)}
    return names


def branches(node: ast.AST) -> int:
    """Return the number of places at which the code can go on in more than one way."""
    found = sum(isinstance(part, TURNS) for part in ast.walk(node))
    found += sum(len(part.values) - 1 for part in _all(ast.BoolOp, node))
    return found + sum(len(part.ifs) for part in _all(ast.comprehension, node))


def _all(kind: type[_Node], node: ast.AST) -> Iterator[_Node]:
    return (part for part in ast.walk(node) if isinstance(part, kind))


def _written(node: ast.AST) -> Iterator[ast.Attribute]:
    return (part for part in _all(ast.Attribute, node) if isinstance(part.ctx, ast.Store))


def _is_own(written: ast.Attribute) -> bool:
    return isinstance(written.value, ast.Name) and written.value.id in ("self", "cls")


def _defined(part: ast.stmt) -> set[str]:
    """Return the names that a statement of a module or class defines."""
    match part:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            names = (name for target in targets for name in _all(ast.Name, target))
            return {name.id for name in names if isinstance(name.ctx, ast.Store)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(source), names=names):
                yield from (f"{source}.{alias.name}" for alias in names)
