"""`p2p-diloco page`: what cannot be served is refused with a sentence, and a page beside a peer ends with it."""

from __future__ import annotations

import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.page import LINE, page_beside


def test_a_taken_port_is_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["page", str(tmp_path), "--port", str(port)]) == 4
    assert re.search(
        rf"cannot serve a page at 127\.0\.0\.1:{port}: Address already in use; .* name another port",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 would let others see this page; add --public"),
        (["--port", "70000"], "--port is 70000; expected a port from 1 to 65535"),
    ],
)
def test_a_page_that_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["page", str(tmp_path), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["page", str(tmp_path / "file")]) == 2
    assert "is a file; name the folder of a peer's state" in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_beside_a_peer_prints_its_address_and_ends_with_it(tmp_path: Path) -> None:
    lines: list[str] = []
    with page_beside(tmp_path, lines.append):
        give_up_at = time.monotonic() + 60.0
        while not lines:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        address = lines[0].removeprefix(LINE)
        with urllib.request.urlopen(address.partition("?")[0]) as answer:
            assert b"has not yet reached the run" in answer.read()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(address.partition("?")[0])
