"""Build, check and try out a release: `make release`."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from release.archives import Project, check_changelog, check_sdist, check_wheel, read_project

PROJECT = Path(__file__).resolve().parents[1]
DIST = PROJECT / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
SWARM_PYTHON = "3.11"
KEPT_PYTHONS = (".pyenv/versions/{version}.*/bin", ".local/share/uv/python/cpython-{version}.*/bin")
_LAST_WORDS = 3000


def main() -> int:
    """Make the release in `dist`, and return the exit code."""
    began = time.monotonic()
    project = read_project(PROJECT)
    stop_at(check_changelog(project))
    wheel, sdist = build()
    stop_at([*check_wheel(wheel, project), *check_sdist(sdist, project)])
    print(f"{wheel.name} and {sdist.name} hold what they should")
    tried = [version for version in PYTHONS if try_out(version, wheel, sdist, project)]
    if SWARM_PYTHON not in tried:
        stop_at([f"a release needs Python {SWARM_PYTHON}, which trains from the wheel; install it"])
    write_papers((wheel, sdist), project)
    for line in last_lines(tried, project):
        print(line)
    print(f"{wheel}\n{sdist}\nmade and tried in {(time.monotonic() - began) / 60:.1f} minutes")
    return 0


def stop_at(faults: Sequence[str]) -> None:
    """End the program if something is wrong."""
    if faults:
        sys.exit("\n".join(["this is no release:", *faults]))


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, into an empty `dist`."""
    shutil.rmtree(DIST, ignore_errors=True)
    call([sys.executable, "-m", "build", "--outdir", DIST, PROJECT], PROJECT)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def try_out(version: str, wheel: Path, sdist: Path, project: Project) -> bool:
    """Install both archives with one Python, each into an empty environment; False: there is no such Python."""
    python = interpreter(version)
    if python is None:
        print(f"Python {version}: SKIPPED, not on this machine")
        return False
    for archive in (wheel, sdist):
        began = time.monotonic()
        # One after the other: an environment with PyTorch has several gigabytes.
        with tempfile.TemporaryDirectory(prefix="p2p-diloco-release-") as name:
            programs = install(python, archive, Path(name))
            call([programs / "python", "-c", "import p2p_diloco"], Path(name))
            shown = call([programs / "p2p-diloco", "--version"], Path(name)).strip()
            if shown != project.version:
                stop_at([f"{archive.name} with Python {version}: --version prints {shown!r}, not {project.version}"])
            seconds = time.monotonic() - began
            print(f"Python {version}: {archive.name} installed, --version prints {shown}; {seconds:.0f} s", flush=True)
            if version == SWARM_PYTHON and archive == wheel:
                began = time.monotonic()
                train(programs)
                print(
                    f"Python {version}: two peers trained from the wheel; {time.monotonic() - began:.0f} s", flush=True
                )
    return True


def interpreter(version: str) -> str | None:
    """Return the program of a Python version, on PATH or where pyenv and uv keep it; None if none works."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    for kept in KEPT_PYTHONS:
        folders += [str(path) for path in sorted(Path.home().glob(kept.format(version=version)), reverse=True)]
    line = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for folder in folders:
        found = shutil.which(f"python{version}", path=folder)
        # A shim may stand for no version.
        if found and subprocess.run([found, "-c", line], capture_output=True, text=True).stdout.strip() == version:
            return found
    return None


def install(python: str, archive: Path, folder: Path) -> Path:
    """Install an archive with its dependencies into a new environment, and return the folder of its programs."""
    call([python, "-m", "venv", folder / "environment"], folder)
    programs = folder / "environment" / "bin"
    flags = shlex.split(os.environ.get("PIP_FLAGS", ""))
    words: list[str | Path] = ["--quiet", "--disable-pip-version-check", "-c", PROJECT / "constraints.txt", *flags]
    call([programs / "python", "-m", "pip", "install", *words, archive], folder)
    return programs


def train(programs: Path) -> None:
    """Let a bootstrap peer and a trainer from an environment train, outside of the checkout."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "long", "tests/processes/test_wheel.py", "-k", "founds_a_run"]
    call(words, PROJECT, {"INSTALLED_PROGRAMS": str(programs), "PYTHONPATH": str(PROJECT)})


def write_papers(archives: Sequence[Path], project: Project) -> None:
    """Write the digests, and the newest section of the changelog."""
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in archives]
    (DIST / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    notes = f"# p2p_diloco {project.version}\n\n{project.notes}\n"
    (DIST / "RELEASE_NOTES.md").write_text(notes, encoding="utf-8")


def last_lines(tried: Sequence[str], project: Project) -> list[str]:
    """Return what a person must know before the release: what is a draft, claimed without a trial, or not claimed."""
    claimed = {version for version in PYTHONS if f"Programming Language :: Python :: {version}" in project.classifiers}
    lines = [f"Python {version} is claimed, but was not tried" for version in sorted(claimed - set(tried))]
    lines += [f"Python {version} was tried, but is not claimed" for version in sorted(set(tried) - claimed)]
    if project.is_draft:
        lines.append(
            f"a rehearsal: CHANGELOG.md's newest section is {project.section}; name it {project.version} to release"
        )
    return lines


def call(words: Sequence[str | Path], folder: Path, more: Mapping[str, str] | None = None) -> str:
    """Run a program without this user's settings, and return its output; end this one if it fails."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("P2P_DILOCO_", "PYTHON"))}
    line = [str(word) for word in words]
    done = subprocess.run(line, cwd=folder, env={**kept, **(more or {})}, capture_output=True, text=True, check=False)
    if done.returncode:
        stop_at([f"{shlex.join(line)} failed:", (done.stdout + done.stderr)[-_LAST_WORDS:]])
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
