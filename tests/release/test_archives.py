"""A release is refused, with a sentence, if an archive holds too much or lacks something."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from release.archives import ARCHIVED, Project, check_changelog, check_sdist, check_wheel, read_project

PROJECT = Project(
    version="0.2.0",
    requires_python=">=3.11",
    classifiers=frozenset({"Typing :: Typed", "Programming Language :: Python :: 3.13"}),
    scripts={"p2p-diloco": "p2p_diloco.app.cli.app:main"},
    files=frozenset({"p2p_diloco/ids.py", "p2p_diloco/py.typed", "p2p_diloco/app/page/templates/page.html"}),
    section="0.2.0 - 2027-01-31",
    notes="",
)
META = "p2p_diloco-0.2.0.dist-info"
ABOUT = """\
Metadata-Version: 2.4
Name: p2p-diloco
Version: 0.2.0
Requires-Python: >=3.11
License-Expression: Apache-2.0
Classifier: Typing :: Typed
Classifier: Programming Language :: Python :: 3.13

# p2p_diloco
"""
GOOD = {
    **dict.fromkeys(PROJECT.files, b""),
    f"{META}/METADATA": ABOUT.encode(),
    f"{META}/licenses/LICENSE": b"",
    f"{META}/entry_points.txt": b"[console_scripts]\np2p-diloco = p2p_diloco.app.cli.app:main\n",
}
WHEEL = "p2p_diloco-0.2.0-py3-none-any.whl"
PEM = b"-----BEGIN PRIVATE KEY-----\n" + b"A" * 64 + b"\n-----END PRIVATE KEY-----\n"


def wheel(folder: Path, files: Mapping[str, bytes | None], name: str = WHEEL) -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, content in files.items():
            if content is not None:
                archive.writestr(path, content)
    return folder / name


def sdist(folder: Path, files: Mapping[str, bytes | None], root: str = "p2p_diloco-0.2.0") -> Path:
    path = folder / "p2p_diloco-0.2.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            if content is not None:
                member = tarfile.TarInfo(f"{root}/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


GOOD_SDIST = {**dict.fromkeys([*PROJECT.files, *ARCHIVED], b""), "PKG-INFO": ABOUT.encode()}


def test_good_archives_are_accepted(tmp_path: Path) -> None:
    assert check_wheel(wheel(tmp_path, GOOD), PROJECT) == []
    assert check_sdist(sdist(tmp_path, GOOD_SDIST), PROJECT) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"p2p_diloco/organiser.key": b""}, "holds the key or private settings p2p_diloco/organiser.key"),
        ({"p2p_diloco/a.txt": bytes.fromhex("08011240") + bytes(64)}, "holds the key or private settings"),
        ({"p2p_diloco/a.txt": PEM}, "holds the key or private settings p2p_diloco/a.txt"),
        ({"p2p_diloco/tests/test_a.py": b""}, "holds the test p2p_diloco/tests/test_a.py"),
        ({"tests/helper.py": b""}, "holds tests/helper.py, which is not of p2p_diloco 0.2.0"),
        ({"p2p_diloco/__pycache__/ids.cpython-311.pyc": b""}, "holds the cache p2p_diloco/__pycache__/ids"),
        ({f"{META}/licenses/LICENSE": None}, "lacks the licence"),
        ({"p2p_diloco/app/page/templates/page.html": None}, "lacks p2p_diloco/app/page/templates/page.html"),
        ({"p2p_diloco/py.typed": None}, "lacks p2p_diloco/py.typed"),
        ({"p2p_diloco/ids.py": None}, "lacks p2p_diloco/ids.py"),
        ({f"{META}/entry_points.txt": None}, "has no entry point p2p-diloco = p2p_diloco.app.cli.app:main"),
        ({f"{META}/METADATA": None}, "has no metadata"),
        ({f"{META}/METADATA": ABOUT.replace("0.2.0", "0.1.0").encode()}, "has Version 0.1.0; expected 0.2.0"),
        ({f"{META}/METADATA": ABOUT.replace("3.11", "3.9").encode()}, "has Requires-Python >=3.9; expected >=3.11"),
        (
            {f"{META}/METADATA": ABOUT.replace(":: 3.13", ":: 3.12").encode()},
            "has other classifiers than pyproject.toml: Programming Language :: Python :: 3.12, Programming",
        ),
        ({f"{META}/METADATA": ABOUT.replace("# p2p", "p2p").encode()}, "lacks the readme"),
    ],
)
def test_a_bad_wheel_is_refused(tmp_path: Path, change: Mapping[str, bytes | None], sentence: str) -> None:
    (fault,) = check_wheel(wheel(tmp_path, {**GOOD, **change}), PROJECT)[:1]
    assert fault.startswith(f"{WHEEL}: {sentence}")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bootstrap/state/identity.key": b""}, "holds the key or private settings bootstrap/state/identity.key"),
        ({"docs/.pytest_cache/a": b""}, "holds the cache docs/.pytest_cache/a"),
        ({"LICENSE": None}, "lacks LICENSE"),
        ({"tests/conftest.py": None}, "lacks tests/conftest.py"),
        ({"p2p_diloco/py.typed": None}, "lacks p2p_diloco/py.typed"),
        ({"PKG-INFO": None}, "has no metadata"),
    ],
)
def test_a_bad_sdist_is_refused(tmp_path: Path, change: Mapping[str, bytes | None], sentence: str) -> None:
    faults = check_sdist(sdist(tmp_path, {**GOOD_SDIST, **change}), PROJECT)
    assert faults == [f"p2p_diloco-0.2.0.tar.gz: {sentence}"]


def test_an_archive_of_another_version_is_refused(tmp_path: Path) -> None:
    assert "is not named p2p_diloco-0.2.0-py3-none-any.whl" in "".join(
        check_wheel(wheel(tmp_path, GOOD, "p2p_diloco-0.1.0-py3-none-any.whl"), PROJECT)
    )
    assert "outside of p2p_diloco-0.2.0" in "".join(check_sdist(sdist(tmp_path, GOOD_SDIST, "old"), PROJECT))


@pytest.mark.parametrize(
    "section", ["0.2.0", "[0.2.0] - 2027-01-31", "0.2.0 – 2027-01-31", "Unreleased", "[Unreleased]"]
)
def test_the_newest_section_of_the_changelog_has_the_version_or_none(section: str) -> None:
    project = replace(PROJECT, section=section)
    assert check_changelog(project) == []
    assert project.is_draft == ("Unreleased" in section)


def test_a_section_of_another_version_is_refused() -> None:
    (fault,) = check_changelog(replace(PROJECT, section="0.2.1"))
    assert fault == "CHANGELOG.md's newest section is 0.2.1, but pyproject.toml has version 0.2.0"


def test_a_project_is_read_with_its_newest_notes(tmp_path: Path) -> None:
    (tmp_path / "p2p_diloco" / "__pycache__").mkdir(parents=True)
    for name in ("ids.py", "py.typed", "__pycache__/ids.pyc"):
        (tmp_path / "p2p_diloco" / name).touch()
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n\n### Added\n\n- one\n\n## 0.1.0\n\n- two\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nversion = "0.2.0"\nrequires-python = ">=3.11"\nclassifiers = []\nscripts = {}\n'
    )
    project = read_project(tmp_path)
    assert (project.section, project.notes) == ("0.2.0", "### Added\n\n- one")
    assert project.files == {"p2p_diloco/ids.py", "p2p_diloco/py.typed"}
