"""The exact text of the status of five peers, at three widths and as plain lines; see `status_texts/`."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from p2p_diloco.app.cli.status_table import StatusTable, status_lines
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus

TEXTS = Path(__file__).with_name("status_texts")
WIDTHS = (60, 80, 120)
HEIGHT = 24


def other(number: int, **fields: object) -> PeerLine:
    line = PeerLine(
        peer=f"12D3KooW{number:08d}",
        ready=True,
        reachable=number % 3 != 2,
        steps=1200,
        cycle_steps=21.5,
        tokens_per_second=1500.0 * (number + 1),
        loss=2.5,
        seconds_since_heard=0.4,
        weight=0.25,
        claimed_token_share=0.2,
    )
    return replace(line, **fields)  # type: ignore[arg-type]


SMALL = PeerStatus(
    run="ab" * 32,
    run_name="night",
    peer="12D3KooWFFAFvBNKmfhmUuCEaWMf1VfggeKQERH8Mvx289SF58mp",
    round=117,
    cycle=29,
    num_members=4,
    num_ready=3,
    ready=True,
    phase="training",
    inner_steps=12_345,
    cycle_steps=22.4,
    loss=2.5,
    anchor_loss=2.4,
    local_loss=2.45,
    tokens_per_second=12_345.0,
    participation=0.97,
    weight=0.25,
    claimed_token_share=0.4,
    bytes_sent=ByteCounts(vectors=1_000_000, control=200_000),
    bytes_received=ByteCounts(vectors=3_000_000_000),
    reachable=True,
    reach="others reach this peer at 203.0.113.7:31337 (2 peers proved it)",
    peers=(other(1), other(2), other(3, ready=False, steps=0), other(4, trains=False, loss=None)),
)
TROUBLE = replace(
    SMALL,
    phase="not stepping",
    steps_undone=2,
    degraded_rosters=1,
    disk_saving="nothing",
    reachable=False,
    reach="outbound only: no peer could dial 203.0.113.7:31337; open TCP port 31337 in the router",
    trouble="in no entry for 3 cycles: this peer is not on roster 12 of 4 members: it was in no entry for too long, "
    "and is listed again in about 60 s; is its line or its machine too slow for rounds of 15 s?",
    clock="the clock of this machine is 42.0 s behind those of 3 others",
    peers=(other(1, seconds_since_heard=40.0), other(2, ready=False, tokens_per_second=0.0)),
)
GRID = replace(
    SMALL,
    share_done=0.38,
    seconds_left=3 * 86400.0,
    num_members=200,
    num_ready=188,
    grid=(14,) * 10 + (15,) * 4,
    row=3,
    peers=tuple(
        other(number, row=number % 14, ready=number % 20 != 0, seconds_since_heard=0.4 if number % 17 else 20.0)
        for number in range(200)
    ),
)
BOOTSTRAP = PeerStatus(
    run="ab" * 32,
    run_name="night",
    peer=SMALL.peer,
    role="bootstrap",
    phase="serving",
    round=117,
    num_members=4,
    num_ready=3,
    bytes_sent=SMALL.bytes_sent,
    reachable=True,
    reach=SMALL.reach,
    peers=SMALL.peers[:3],
)
ARCHIVIST = replace(BOOTSTRAP, role="archivist", phase="following", ready=True, anchor_loss=2.4)
CASES = {"small": SMALL, "trouble": TROUBLE, "grid": GRID, "bootstrap": BOOTSTRAP, "archivist": ARCHIVIST}


def table(status: PeerStatus, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=HEIGHT, markup=False, highlight=False)
    console.print(StatusTable(status, HEIGHT))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def text_of(status: PeerStatus) -> str:
    """Return the tables at each width, and the plain lines."""
    parts = [f"-- {width} columns\n{table(status, width)}" for width in WIDTHS]
    return "\n".join([*parts, "-- plain\n" + "\n".join(status_lines(status)) + "\n"])


@pytest.mark.parametrize("name", CASES)
def test_the_text_of_a_status_is_exactly_that_of_the_file(name: str) -> None:
    assert text_of(CASES[name]) == (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_fits_the_terminal_and_keeps_words_and_units_whole(name: str, width: int) -> None:
    lines = table(CASES[name], width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= HEIGHT
    text, whole = "\n".join(lines), table(CASES[name], 1000)
    assert set(re.findall(r"[A-Za-z]+", text)) <= set(re.findall(r"[A-Za-z]+", whole))
    assert not re.search(r"\d\n(%|s|[kMG]?B|tokens/s)\b", text)


@pytest.mark.parametrize("name", CASES)
def test_no_table_uses_the_words_of_the_protocol(name: str) -> None:
    assert not re.search(r"roster|anchor|\bspans?\b|\bentr(y|ies)\b", text_of(CASES[name]))
