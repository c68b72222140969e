"""Output without a reader causes no error."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from p2p_diloco.app.cli.output import discard, flush_or_discard, print_to_stderr


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A pipe without a reader, with unwritten text in its buffer."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        stream.write("text")
        yield stream


def test_a_discarded_stream_can_be_flushed_and_closed(unread: TextIO) -> None:
    with pytest.raises(BrokenPipeError):
        unread.flush()
    discard(unread)
    unread.write("more")
    unread.close()


def test_a_stream_that_cannot_be_flushed_is_discarded(unread: TextIO) -> None:
    flush_or_discard(unread)
    unread.close()


def test_a_stream_that_can_be_flushed_is_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as stream:
        stream.write("text")
        flush_or_discard(stream)
        assert (tmp_path / "file").read_text() == "text"


def test_a_stream_without_a_descriptor_and_a_closed_one_are_not_changed(unread: TextIO) -> None:
    discard(io.StringIO("text"))
    flush_or_discard(unread)
    unread.close()
    flush_or_discard(unread)


def test_a_line_without_a_reader_is_not_an_error(unread: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", unread)
    print_to_stderr("line")
    unread.close()
