"""The second text: documentation strings, the same from the same packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import sha256
from research import prose
from research.prose import PACKAGES, documentation, write_prose

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
LONG = "A sentence of some length about what this module is for. " * 5


def test_long_documentation_is_taken_once_and_without_code(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.py").write_text(f'"""{LONG}"""\ndef short():\n    """Too short."""\n')
    (tmp_path / "a.py").write_text(f'class One:\n    """First. {LONG}\n\n    >>> one()\n    ... two()\n    """\n')
    (tmp_path / "deep" / "c.py").write_text(f'def again():\n    """{LONG}"""\n')
    assert list(documentation(tmp_path)) == [f"First. {LONG}".strip(), LONG.strip()]


def test_versions_are_those_of_the_constraints() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE))
    assert {name: pinned[name] for name in PACKAGES} == PACKAGES


def test_the_text_is_written_with_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "documentation", lambda folder: iter([f"about {folder.name}"]))
    digest = write_prose(tmp_path / "prose.txt")
    written = (tmp_path / "prose.txt").read_bytes()
    assert written == "\n\n".join(f"about {name}" for name in PACKAGES).encode()
    assert digest == sha256(written)
    with pytest.raises(StateError, match="cannot write the text to"):
        write_prose(tmp_path)
    monkeypatch.setitem(PACKAGES, "numpy", "0.0.1")
    with pytest.raises(ConfigError, match=r"the text needs numpy 0\.0\.1 and found 2.*install the versions of constr"):
        write_prose(tmp_path / "prose.txt")
