"""Lateness of entries, from the traces of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.replay.pace import Pace, pace_of
from p2p_diloco.replay.recording import Recording

ENTRIES = {round_index: sha256(bytes([round_index])) for round_index in range(6)}


def contributed(round_index: int, steps: int) -> dict[str, Any]:
    return {"what": "contributed", "steps": steps, "round": round_index, "fragment": round_index % 2}


def absorbed(round_index: int, steps: int) -> dict[str, Any]:
    return {"what": "absorbed", "steps": steps, "span": [round_index % 2, 0], "entry": ENTRIES[round_index].hex()}


def recording(*lives: list[dict[str, Any]]) -> Recording:
    entries = {Digest(digest): SimpleNamespace(round=round_index) for round_index, digest in ENTRIES.items()}
    return cast(Recording, SimpleNamespace(entries=entries, lives={PeerId(sha256(b"ann")): list(lives)}))


def test_lateness_counts_the_steps_since_the_contribution() -> None:
    first = [contributed(1, 10), contributed(2, 14), absorbed(1, 15), absorbed(2, 15), contributed(3, 20)]
    second = [absorbed(1, 2), contributed(4, 3), absorbed(4, 4), absorbed(4, 4)]
    pace = pace_of(recording(first, second))
    assert pace.late == {1: 3, 5: 1}
    assert pace.round_steps == 5.0
    assert [pace.late_at_most(share) for share in (0.0, 0.5, 0.75, 0.76, 1.0)] == [1, 1, 1, 5, 5]


@pytest.mark.parametrize("lives", [[], [[contributed(1, 10)]], [[absorbed(1, 2)]]])
def test_a_run_without_entries_has_no_pace(lives: list[list[dict[str, Any]]]) -> None:
    pace = pace_of(recording(*lives))
    assert pace == Pace(round_steps=0.0, late={})
    assert pace.late_at_most(0.5) == 0
