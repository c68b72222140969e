"""The files of a text, in an order that depends only on their names."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

from p2p_diloco.errors import ConfigError
from p2p_diloco.rate import counted

_STDLIB_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def list_corpus_files(
    path: str | Path | None,
    skip: Callable[[Path, str], None] | None = None,
    on_hidden: Callable[[Path], None] = lambda place: None,
) -> tuple[Path, ...]:
    """Return the non-empty files that `path` names, sorted by relative name.

    Args:
        path: a file, a folder (all files under it except hidden ones), a glob (`**` matches folders), or None for the
            source of the running Python's standard library.
        skip: called with what a folder holds that is no readable file, and why; None: that is an error.
        on_hidden: called with each hidden file and folder in a folder.
    Raises:
        ConfigError: the path does not exist, all its files are empty, or a link in it leads nowhere.
    """
    if path is None:
        return _stdlib_files()
    text = os.path.expanduser(str(path))
    if Path(text).is_file():
        found = [Path(text)]
    elif Path(text).is_dir():
        found = _sorted_files(Path(text), skip=skip, on_hidden=on_hidden)
    elif os.path.lexists(text):
        raise ConfigError(f"text {text} {_why_no_file(Path(text))}; expected a file, a folder or a glob")
    elif glob.has_magic(text):
        found = _matching_files(text, skip, on_hidden)
    else:
        raise ConfigError(f"text {text} does not exist; expected a file, a folder or a glob such as 'books/**/*.txt'")
    files = tuple(file for file in found if file.stat().st_size > 0)
    if not files:
        raise ConfigError(f"text {text} is empty ({counted(len(found), 'file')}); name at least one file with text")
    return files


def _matching_files(
    pattern: str, skip: Callable[[Path, str], None] | None, on_hidden: Callable[[Path], None]
) -> list[Path]:
    """Return the files that a pattern matches, and those in folders that its last part matches."""
    found: list[Path] = []
    for place in map(Path, sorted(set(glob.glob(pattern, recursive=True)))):
        if place.is_file():
            found.append(place)
        elif not place.is_dir():
            _refuse(place, _why_no_file(place), skip)
        elif "**" not in pattern:
            found += _sorted_files(place, skip=skip, on_hidden=on_hidden)
    return found


def _why_no_file(path: Path) -> str:
    return f"is a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "is no regular file"


def _stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's modules, except its tests and the files that depend on the build machine."""
    files = _sorted_files(Path(sysconfig.get_path("stdlib")), excluded=_STDLIB_EXCLUDED_FOLDERS)
    return tuple(
        file
        for file in files
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata") and file.stat().st_size > 0
    )


def _sorted_files(
    root: Path,
    *,
    excluded: frozenset[str] = frozenset(),
    skip: Callable[[Path, str], None] | None = None,
    on_hidden: Callable[[Path], None] = lambda place: None,
) -> list[Path]:
    """Return the files under `root`, sorted by relative POSIX name so that all platforms agree.

    Hidden files and folders are skipped, and so are folders in `excluded`. Links to folders are followed, each folder
    once, so a loop of links ends.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()

    def fail(error: OSError) -> None:
        _refuse(Path(error.filename), f"cannot be read ({error.strerror})", skip)

    for folder, subfolders, names in os.walk(root, onerror=fail, followlinks=True):
        status = os.stat(folder)
        is_new = (status.st_dev, status.st_ino) not in seen
        seen.add((status.st_dev, status.st_ino))
        for name in (name for name in (*subfolders, *names) if is_new and name[0] == "."):
            on_hidden(Path(folder, name))
        # In place, so that os.walk skips these folders: site-packages may have a hundred thousand files.
        subfolders[:] = [name for name in sorted(subfolders) if is_new and name not in excluded and name[0] != "."]
        for file in (Path(folder, name) for name in names if is_new and not name.startswith(".")):
            if file.is_file():
                found.append(file)
            else:
                _refuse(file, _why_no_file(file), skip)
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _refuse(path: Path, why: str, skip: Callable[[Path, str], None] | None) -> None:
    if skip is None:
        raise ConfigError(f"{path} {why}; mend it, or take it out of the text")
    skip(path, why)
