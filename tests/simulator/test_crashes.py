"""The crash matrix accounts for every step and role, and its cells fail if a claim does not hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from p2p_diloco.protocol.engine import PeerEngine
from simulator import crashes
from simulator.command import main
from simulator.crashes import MATRIX, TWO, Case, Moment, Role, Step, cells, play_cell, run_crashes
from simulator.failpoints import Kind
from simulator.mistakes import MISTAKES, replaced

pytestmark = pytest.mark.story

CELLS = {str(cell): cell for cell in cells()}
SAMPLE = (
    "contributor killed middle contribute, two",
    "owner killed middle hand down, three",
    "leader stopped middle vote, three",
    "joiner stopped middle transfer, two",
    "donor killed middle hand down, two",
    "bootstrap stopped after finish, two",
    "owner killed middle checkpoint, three",
    "reducer killed middle hand down, grid",
)
"""One cell of each role; `make crash-matrix` plays all."""


def test_every_step_at_every_role_has_cells_or_a_reason() -> None:
    assert set(MATRIX) == {(step, role) for step in Step for role in Role}
    played = {(cell.step, cell.role) for cell in CELLS.values()}
    assert played == {place for place, case in MATRIX.items() if isinstance(case, Case)}
    for place, case in MATRIX.items():
        assert isinstance(case, Case) or case, place
    for cell in CELLS.values():
        twin = Kind.STOPPED if cell.kind is Kind.KILLED else Kind.KILLED
        assert replace(cell, kind=twin) in CELLS.values()


@pytest.mark.parametrize("name", SAMPLE)
def test_others_go_on_and_the_failed_peer_returns(name: str) -> None:
    result = play_cell(CELLS[name], 1)
    assert result.failure is None, result.failure
    assert result.return_rounds > 0


def test_cell_whose_step_no_peer_reaches_fails() -> None:
    cell = replace(CELLS["reducer killed middle hand down, grid"], swarm=TWO)
    result = play_cell(cell, 1)
    assert result.failure == "claim: no peer reached the step within 40 rounds"


def test_peer_that_returns_with_other_bytes_is_found() -> None:
    with MISTAKES["checkpoint-of-two-moments"].planted():
        result = play_cell(CELLS["owner killed after checkpoint, two"], 1)
    assert result.failure is not None
    assert result.failure.startswith("I1: ")


def test_others_that_wait_for_a_stopped_peer_are_found() -> None:
    with replaced(PeerEngine, "wake_at", lambda self, now: now + 0.7 * self.rules.clock.round_seconds):
        result = play_cell(CELLS["owner stopped before apply, two"], 1)
    assert result.failure is not None
    assert result.failure.startswith("spans of others were skipped in ")


def test_limits_of_the_claims_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = CELLS["owner killed middle hand down, two"]
    monkeypatch.setattr(crashes, "RETURN_ROUNDS", 0)
    result = play_cell(cell, 1)
    assert result.failure is not None
    assert "is not back after 0 rounds" in result.failure
    monkeypatch.undo()
    monkeypatch.setattr(crashes, "cycles_until_it_goes_on", lambda swarm: 0)
    assert play_cell(cell, 1).failure == "a span had no entry for 1 cycles; at most 0 are allowed"


def test_one_seed_gives_one_result_in_any_process() -> None:
    cell = CELLS["bootstrap killed before vote, two"]
    first, again = run_crashes([cell], [1, 1], processes=2)
    assert first == again == play_cell(cell, 1)


# -- the command


def test_command_prints_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crashes", "--only", "bootstrap killed before finish, two"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("finish")).split()[-3:] == ["1", "+", "0"]
    assert any("only the owner of a span does this" in line for line in lines)
    assert "1 of 1 plays of 1 cells held" in lines[-1]


def test_command_fails_and_names_the_cell_that_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crashes, "RETURN_ROUNDS", 0)
    words = ["crashes", "--only", "bootstrap killed before finish, two", "--first-seed", "3"]
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "0/1 + 0" in shown
    replay = 'replay: python -m simulator crashes --only "bootstrap killed before finish, two" --first-seed 3'
    assert replay in shown
    assert main([*words, "--json"]) == 1
    (failing,) = json.loads(capsys.readouterr().out)["failing"]
    assert failing.startswith("bootstrap killed before finish, two, seed 3: claim: boot is not back")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seeds", "0"], "--seeds is 0; expected at least 1"),
        (["--first-seed", "-1"], "--first-seed is -1; expected 0 or more"),
        (["--only", "king"], "no cell's name contains 'king'; a name is like 'contributor killed before roster, two'"),
    ],
)
def test_invalid_option_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crashes", *words]) == 2
    assert text in capsys.readouterr().err


def test_moments_of_the_matrix_are_in_order() -> None:
    for case in MATRIX.values():
        if isinstance(case, Case):
            assert {Moment.BEFORE, Moment.AFTER} <= case.moments.keys()
