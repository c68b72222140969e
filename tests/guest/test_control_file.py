"""`control.json` holds what the owner asks for; a peer believes no broken file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.guest.owner_files import CONTROL_FILE, Control, new_number, read_control, write_control

ASKED = Control(number="7", pauses=True, pauses_until=1_900_000_000.5, leaves=0, limits={"max_upload": "5mbit"})


def test_what_is_asked_for_is_read_back(tmp_path: Path) -> None:
    assert read_control(tmp_path) == Control(), "nothing is asked for without a file"
    write_control(tmp_path, ASKED)
    assert read_control(tmp_path) == ASKED
    assert [path.name for path in tmp_path.iterdir()] == [CONTROL_FILE], "no draft is left"
    assert new_number() != new_number()


GOOD = {"number": "7", "pauses": True, "pauses_until": None, "leaves": 0, "limits": {}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "list indices"),
        ("[" * 10_000, "recursion|Expecting"),
        (json.dumps({}), "pauses_until"),
        (json.dumps({**GOOD, "pauses": "yes"}), "another type"),
        (json.dumps({**GOOD, "leaves": 1.5}), "another type"),
        (json.dumps({**GOOD, "pauses_until": "now"}), "not a time"),
        (json.dumps({**GOOD, "pauses_until": float("nan")}), "not a time"),
        (json.dumps({**GOOD, "limits": {"port": "1"}}), "unknown key"),
        (json.dumps({**GOOD, "limits": {"hours": "x" * 1000}}), "too long"),
        (json.dumps({**GOOD, "number": "x" * 20_000}), "more than 16384 bytes"),
    ],
)
def test_a_broken_file_is_refused_and_kept(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / CONTROL_FILE).write_text(content)
    with pytest.raises(StateError, match=rf"control.json is broken \(.*({reason}).*\) and is ignored; remove it"):
        read_control(tmp_path)
    assert (tmp_path / CONTROL_FILE).read_text() == content


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot write .*No such file"):
        write_control(tmp_path / "gone", ASKED)
