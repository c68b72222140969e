"""The wheel and the sdist of a release: what they must hold, and what they must not.

A check returns a sentence for each thing that is wrong. What the archives must hold follows from the checkout.
"""

from __future__ import annotations

import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path, PurePosixPath

PACKAGE = "p2p_diloco"
UNRELEASED = "Unreleased"
ARCHIVED = (
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "Makefile",
    "constraints.txt",
    "tests/conftest.py",
)
"""Files that the sdist must hold, besides the package."""
_CACHES = re.compile(r"(^|/)(__pycache__|\.[a-z]+_cache|\.git|\.venv[^/]*|\.hypothesis|\.DS_Store)(/|$)|\.py[co]$")
_KEYS = re.compile(r"\.(key|id|pem)$|(^|/)(\.env|\.netrc|\.pypirc|peer\.toml)$")
_PEM = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=\s]{40,}")
_IDENTITY = bytes.fromhex("08011240")
"""First bytes of libp2p's file with an Ed25519 key, which has 68 bytes."""
_TESTS = re.compile(r"(^|/)(tests/|test_[^/]*\.py$|conftest\.py$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A checkout, as far as its archives must agree with it.

    Attributes:
        files: the package's files, as paths from the checkout, with `/`.
        section: heading of the changelog's newest section; `notes` is its text.
    """

    version: str
    requires_python: str
    classifiers: frozenset[str]
    scripts: Mapping[str, str]
    files: frozenset[str]
    section: str
    notes: str

    @property
    def is_draft(self) -> bool:
        """Whether the newest section has no version yet."""
        return self.section.strip("[]") == UNRELEASED


def read_project(folder: Path) -> Project:
    """Read a checkout."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    _, section, notes = re.split(
        r"^## (.*)\n", (folder / "CHANGELOG.md").read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE
    )
    paths = (path for path in (folder / PACKAGE).rglob("*") if path.is_file())
    files = (path.relative_to(folder).as_posix() for path in paths)
    return Project(
        version=project["version"],
        requires_python=project["requires-python"],
        classifiers=frozenset(project["classifiers"]),
        scripts=project["scripts"],
        files=frozenset(name for name in files if not _CACHES.search(name)),
        section=section.strip(),
        notes=re.split(r"^## ", notes, maxsplit=1, flags=re.MULTILINE)[0].strip(),
    )


def check_changelog(project: Project) -> list[str]:
    """Compare the newest heading of CHANGELOG.md, such as `0.2.0 - 2026-12-01`, with the version."""
    named = re.split(r"[\s\u2013]", project.section.strip("["), maxsplit=1)[0].strip("[]")
    if project.is_draft or named == project.version:
        return []
    return [f"CHANGELOG.md's newest section is {project.section}, but pyproject.toml has version {project.version}"]


def check_wheel(path: Path, project: Project) -> list[str]:
    """Check a wheel's name, files and metadata."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    return [f"{path.name}: {sentence}" for sentence in _wheel_faults(path.name, held, project)]


def check_sdist(path: Path, project: Project) -> list[str]:
    """Check an sdist's name, files and metadata."""
    held: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            held[member.name] = content.read() if content else b""
    return [f"{path.name}: {sentence}" for sentence in _sdist_faults(path.name, held, project)]


def _wheel_faults(name: str, held: Mapping[str, bytes], project: Project) -> Iterator[str]:
    meta = f"{PACKAGE}-{project.version}.dist-info"
    expected = f"{PACKAGE}-{project.version}-py3-none-any.whl"
    if name != expected:
        yield f"is not named {expected}"
    for found in held:
        if PurePosixPath(found).parts[0] not in (PACKAGE, meta):
            yield f"holds {found}, which is not of {PACKAGE} {project.version}"
        if _TESTS.search(found):
            yield f"holds the test {found}"
    yield from _unwanted(held)
    yield from (f"lacks {missing}" for missing in sorted(project.files - held.keys()))
    if f"{meta}/licenses/LICENSE" not in held:
        yield "lacks the licence"
    yield from _metadata_faults(held.get(f"{meta}/METADATA", b""), project)
    points = held.get(f"{meta}/entry_points.txt", b"").decode()
    for script, target in project.scripts.items():
        if f"{script} = {target}" not in points.splitlines():
            yield f"has no entry point {script} = {target}"


def _sdist_faults(name: str, held: Mapping[str, bytes], project: Project) -> Iterator[str]:
    root = f"{PACKAGE}-{project.version}"
    if name != f"{root}.tar.gz":
        yield f"is not named {root}.tar.gz"
    yield from (f"holds {found} outside of {root}" for found in held if not found.startswith(f"{root}/"))
    inside = {found.removeprefix(f"{root}/"): content for found, content in held.items()}
    yield from _unwanted(inside)
    yield from (f"lacks {missing}" for missing in sorted(project.files.union(ARCHIVED) - inside.keys()))
    yield from _metadata_faults(inside.get("PKG-INFO", b""), project)


def _unwanted(held: Mapping[str, bytes]) -> Iterator[str]:
    for name, content in held.items():
        if _CACHES.search(name):
            yield f"holds the cache {name}"
        is_identity = len(content) == 68 and content.startswith(_IDENTITY)
        if _KEYS.search(name) or is_identity or _PEM.search(content):
            yield f"holds the key or private settings {name}"


def _metadata_faults(content: bytes, project: Project) -> Iterator[str]:
    if not content:
        yield "has no metadata"
        return
    metadata = message_from_bytes(content)
    for field, expected in (
        ("Name", "p2p-diloco"),
        ("Version", project.version),
        ("Requires-Python", project.requires_python),
        ("License-Expression", "Apache-2.0"),
    ):
        if metadata[field] != expected:
            yield f"has {field} {metadata[field]}; expected {expected}"
    different = project.classifiers ^ frozenset(metadata.get_all("Classifier", []))
    if different:
        yield f"has other classifiers than pyproject.toml: {', '.join(sorted(different))}"
    if not str(metadata.get_payload()).startswith(f"# {PACKAGE}\n"):
        yield "lacks the readme"
