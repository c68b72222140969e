from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.app.text.mapped_files import MappedFiles, list_byte_files
from p2p_diloco.errors import ConfigError
from p2p_diloco.storage.corpus_files import list_corpus_files


def write_files(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.txt" for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    return paths


def test_one_file_is_the_corpus(tmp_path: Path) -> None:
    (path,) = write_files(tmp_path, a=b"text")
    assert list_corpus_files(path) == (path,)


def test_a_folder_lists_its_files_by_name_without_hidden_and_empty_ones(tmp_path: Path) -> None:
    second, first = write_files(tmp_path / "b", two=b"2", one=b"1")
    (top,) = write_files(tmp_path, a=b"0")
    write_files(tmp_path, empty=b"")
    write_files(tmp_path / ".git", config=b"hidden")
    (tmp_path / ".note").write_bytes(b"hidden")
    assert list_corpus_files(tmp_path) == (top, first, second)


def test_a_folders_hidden_parents_do_not_hide_its_files(tmp_path: Path) -> None:
    paths = write_files(tmp_path / ".cache" / "books", a=b"1")
    assert list_corpus_files(tmp_path / ".cache" / "books") == tuple(paths)


def test_a_glob_lists_its_matching_files_in_order(tmp_path: Path) -> None:
    b, a = write_files(tmp_path / "books", b=b"1", a=b"2")
    (tmp_path / "books" / "a.csv").write_bytes(b"no")
    (tmp_path / "folder.txt").mkdir()
    assert list_corpus_files(str(tmp_path / "**" / "*.txt")) == (a, b)


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_files(tmp_path, a=b"1")
    assert list_corpus_files("~/a.txt") == (tmp_path / "a.txt",)


def test_a_missing_path_is_refused_with_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text .*/nowhere does not exist; expected a file, a folder or a glob"):
        list_corpus_files(tmp_path / "nowhere")


@pytest.mark.parametrize("pattern", ["", "*.none"])
def test_a_folder_or_glob_without_text_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"is empty \(no files\); name at least one file with text"):
        list_corpus_files(str(tmp_path / pattern))


def test_links_to_folders_are_followed_once_and_a_broken_link_is_named(tmp_path: Path) -> None:
    (inside,) = write_files(tmp_path / "text", a=b"1")
    write_files(tmp_path / "elsewhere", b=b"2")
    (tmp_path / "text" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "text" / "loop").symlink_to(tmp_path / "text")
    files = list_corpus_files(tmp_path / "text")
    assert files == (inside, tmp_path / "text" / "more" / "b.txt")
    broken = tmp_path / "text" / "broken.txt"
    broken.symlink_to("nowhere")
    with pytest.raises(
        ConfigError, match=r"broken.txt is a link to nowhere, which does not exist; mend it, or take it"
    ):
        list_corpus_files(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"text .*broken.txt is a link to nowhere"):
        list_corpus_files(broken)
    skipped: list[Path] = []
    assert list_corpus_files(tmp_path / "text", lambda path, _: skipped.append(path)) == files
    assert skipped == [broken]


FORMS = {
    "gzip": gzip.compress(b"text"),
    "bzip2": bz2.compress(b"text"),
    "xz": lzma.compress(b"text"),
    "parquet": b"PAR1",
    "utf-16": b"\xff\xfea\0",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_on_bytes_refuses_a_file_whose_text_is_in_another_form(tmp_path: Path, form: str) -> None:
    """It trained on the compressed bytes."""
    (path,) = write_files(tmp_path / "text", a=FORMS[form])
    with pytest.raises(
        ConfigError, match=r"a.txt is compressed or a table, .* or make tokens of it with p2p-diloco tokeni"
    ):
        list_byte_files(tmp_path / "text")
    (tmp_path / "text" / "index.json").write_bytes(b"{}")
    assert path in list_byte_files(tmp_path / "text"), "shards of tokens may begin with any bytes"


@pytest.mark.parametrize(
    "head", [b"PK\x03\x04", b"%PDF-1.7", b"WARC/1.0", b"version https://git-lfs.github.com/spec/v1"]
)
def test_a_run_on_bytes_refuses_what_is_no_text(tmp_path: Path, head: bytes) -> None:
    write_files(tmp_path, a=head)
    with pytest.raises(ConfigError, match=r"a.txt is (an archive|a PDF|a web archive|a pointer of Git LFS); \w+"):
        list_byte_files(tmp_path)


def test_the_standard_library_excludes_tests_and_installed_packages() -> None:
    files = list_corpus_files(None)
    names = {file.name for file in files}
    folders = {part for file in files for part in file.parts[-3:-1]}
    assert {"argparse.py", "typing.py", "ast.py"} <= names
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    assert not any(name.startswith("_sysconfigdata") for name in names)
    assert sum(file.stat().st_size for file in files) > 5_000_000


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reading_equals_slicing_the_joined_text(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    contents = data.draw(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6))
    folder = tmp_path_factory.mktemp("text")
    files = MappedFiles(tuple(write_files(folder, **{f"f{index}": content for index, content in enumerate(contents)})))
    joined = b"".join(contents)
    start = data.draw(st.integers(0, len(joined)))
    stop = data.draw(st.integers(start, len(joined)))
    assert files.read(start, stop).tobytes() == joined[start:stop]
    assert files.num_bytes == len(joined)
    assert files.file_sizes == tuple(len(content) for content in contents)


def test_read_returns_a_copy(tmp_path: Path) -> None:
    files = MappedFiles(tuple(write_files(tmp_path, a=b"text")))
    files.read(0, 4)[:] = 0
    assert files.read(0, 4).tobytes() == b"text"


def test_reading_outside_the_text_is_a_bug_of_the_caller(tmp_path: Path) -> None:
    files = MappedFiles(tuple(write_files(tmp_path, a=b"text")))
    with pytest.raises(ValueError, match=r"bytes 2 to 5 are not within a text of 4"):
        files.read(2, 5)


def shorten(path: Path) -> None:
    path.write_bytes(b"te")


def lengthen(path: Path) -> None:
    path.write_bytes(b"longer text")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"TEXT")
    os.utime(other, ns=(1, 1))
    other.rename(path)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"T")
    os.utime(path, ns=(1, 1))  # a second write within a tick of the clock would show the same time


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(("change", "size"), [(shorten, 2), (lengthen, 11), (replace, 4), (overwrite, 4)])
def test_a_file_that_was_changed_is_named(
    tmp_path: Path, change: Callable[[Path], None], size: int, is_known: bool
) -> None:
    (path,) = write_files(tmp_path, a=b"text")
    files = MappedFiles((path,))
    assert not is_known or len(files.fingerprint) == 32
    assert files.read(0, 4).tobytes() == b"text"
    change(path)
    with pytest.raises(ConfigError, match=rf"a\.txt is not what it was .* \(4 bytes then, {size} now\); put"):
        files.read(3, 4)


def test_a_file_with_another_modification_time_is_the_same(tmp_path: Path) -> None:
    """`touch`, a backup, and a copy over itself ended a peer."""
    one, two = write_files(tmp_path, a=b"text", b=b"more")
    files = MappedFiles((one, two))
    assert len(files.fingerprint) == 32
    for path in (one, two):
        os.utime(path, ns=(1, 1))
    assert files.read(0, 8).tobytes() == b"textmore"
    overwrite(two)
    os.utime(two, ns=(2, 2))
    assert files.read(0, 4).tobytes() == b"text"
    with pytest.raises(ConfigError, match=r"b\.txt is not what it was when training began"):
        files.read(0, 8)


def test_a_text_that_is_arriving_may_be_written_but_not_cut(tmp_path: Path) -> None:
    (path,) = write_files(tmp_path, a=b"\0\0\0\0")
    files = MappedFiles((path,), is_arriving=True)
    replace(path)
    assert files.read(0, 4).tobytes() == b"TEXT"
    shorten(path)
    with pytest.raises(ConfigError, match="is not what it was"):
        files.read(0, 4)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    (path,) = write_files(tmp_path, a=b"text")
    files = MappedFiles((path,))
    files.read(0, 1)
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read \(.+\); make it readable and start again"):
        files.read(0, 1)


def test_bytes_are_read_in_any_encoding(tmp_path: Path) -> None:
    files = MappedFiles(tuple(write_files(tmp_path, a=bytes(range(256)))))
    assert np.array_equal(files.read(0, 256), np.arange(256))
