"""`p2p-diloco tokenize` writes one whole folder, or nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.app.cli import tokenize as command
from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.command_line import STOPPED

pytest.importorskip("tokenizers", reason='pip install "p2p-diloco[hf]" brings it; make files runs this')


def words(tokenizer: Path, folder: Path, place: str) -> list[str]:
    (folder / "in.txt").write_text("Island 7 sent its round to the roster.\n" * 400)
    return ["tokenize", str(folder / place), str(folder / "in.txt"), "--tokenizer", str(tokenizer)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_leaves_no_draft(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    make, before = command.tokenize_text, signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*arguments: Any, **more: Any) -> None:
        make(*arguments, **more)
        assert len(os.listdir(tmp_path)) == 2, "there is a draft"
        signal.raise_signal(number)

    monkeypatch.setattr(command, "tokenize_text", interrupted)
    try:
        assert main(words(tokenizer, tmp_path, "tokens")) == STOPPED
    finally:
        signal.signal(signal.SIGINT, before)  # pytest-xdist ignores Ctrl-C in its workers
    assert os.listdir(tmp_path) == ["in.txt"]


def test_a_link_to_an_empty_folder_is_filled(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "tokens").symlink_to("disk")
    assert main(words(tokenizer, tmp_path, "tokens")) == 0
    assert (tmp_path / "disk" / "index.json").is_file()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "tokenize_text", lambda *_, **__: pytest.fail("it has begun"))
    assert main(words(tokenizer, tmp_path, "in.txt/tokens")) == 4
    assert "in.txt/tokens: Not a directory" in capsys.readouterr().err
