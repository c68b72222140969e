"""The second text of the rules of evidence: English prose, from the documentation strings of pinned packages.

Every machine with this project's requirements has these packages, with licences that allow this use (BSD), so nothing
is downloaded. The same versions give the same bytes.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import Digest, sha256

PACKAGES = {"networkx": "3.6.1", "numpy": "2.4.6", "scipy": "1.17.1", "sympy": "1.14.0"}
"""Packages and versions, as in constraints.txt."""
FEWEST_LETTERS = 200
"""Shorter documentation strings are left out: they are one sentence, and often the same one."""
_CODE = (">>>", "...")


def write_prose(path: Path) -> Digest:
    """Write the text to a file and return its SHA-256.

    Raises:
        ConfigError: a package is missing, or has another version.
        StateError: the file cannot be written.
    """
    text = "\n\n".join(string for name in PACKAGES for string in documentation(_folder(name))).encode()
    try:
        path.write_bytes(text)
    except OSError as error:
        raise StateError(f"cannot write the text to {path}: {error.strerror}") from None
    return Digest(sha256(text))


def documentation(folder: Path) -> Iterator[str]:
    """Yield the long documentation strings of all modules in a folder, without lines of code, each only once."""
    seen: set[str] = set()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escape sequences in foreign code
            tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                prose = _without_code(ast.get_docstring(node) or "")
                if len(prose) >= FEWEST_LETTERS and prose not in seen:
                    seen.add(prose)
                    yield prose


def _without_code(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(_CODE)).strip()


def _folder(name: str) -> Path:
    wanted, spec = PACKAGES[name], util.find_spec(name)
    if spec is None or spec.origin is None or metadata.version(name) != wanted:
        found = "none" if spec is None else metadata.version(name)
        raise ConfigError(
            f"the text needs {name} {wanted} and found {found}; install the versions of constraints.txt (make install)"
        )
    return Path(spec.origin).parent
