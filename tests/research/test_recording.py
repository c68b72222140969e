"""Recordings: required contents of the folders of a run, and the lateness of entries in its traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from recorded_run import TRAINERS, record
from small_run import ORGANISER, as_format_3, peer_key, small_manifest

from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.session.founding import genesis_states
from p2p_diloco.storage.run_folder import MANIFEST_FILE, ROSTERS_FILE
from p2p_diloco.storage.trace import TRACE_FILE
from research import recording
from research.recording import Pace, Recording, pace_of, read_recording

ENTRIES = {round_index: sha256(bytes([round_index])) for round_index in range(6)}


def test_a_recording_has_all_starts_and_entries(tmp_path: Path) -> None:
    stage = record(tmp_path)
    run = read_recording(stage.folders())
    assert [len(lives) for lives in run.lives.values()] == [1, 1, 2]
    assert run.founding.k == 0
    start = genesis_states(make_start(run.plan), run.founding)
    chain = list(run.chain(start))
    assert len(chain) == len(run.entries), "the chain has all entries"

    other = small_manifest({"model.seed": 1}).sign(ORGANISER).encode()
    stage.run_folder("ada").write(MANIFEST_FILE, other)
    with pytest.raises(StateError, match="manifests of 2 runs"):
        read_recording(stage.folders())


def test_a_missing_folder_of_a_trainer_is_named(tmp_path: Path) -> None:
    stage = record(tmp_path)
    peer, folder = next(iter(stage.folders().items()))
    for manifest in folder.rglob(MANIFEST_FILE):
        manifest.unlink()
    with pytest.raises(StateError, match="add the state directory of a peer that joined with the invite"):
        read_recording({peer: folder})


def test_a_run_of_the_version_before_is_refused_with_what_to_do(tmp_path: Path) -> None:
    stage = record(tmp_path)
    for folder in stage.folders().values():
        for manifest in folder.rglob(MANIFEST_FILE):
            manifest.write_bytes(as_format_3(manifest.read_bytes()))
    with pytest.raises(StateError, match=r"manifest\.json is of format 3, and this version .* reads format 5; use the"):
        read_recording(stage.folders())


def test_a_run_of_several_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = record(tmp_path)

    def in_rows_of_two(manifest: RunManifest) -> RunPlan:
        membership = manifest.membership.model_copy(update={"group_size": 2})
        return replace(plan_run(manifest), manifest=manifest.model_copy(update={"membership": membership}))

    monkeypatch.setattr(recording, "plan_run", in_rows_of_two)
    with pytest.raises(StateError, match="more than 2 members"):
        read_recording(stage.folders())


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="has the traces of 0 runs"):
        read_recording({peer_key("ada").peer: tmp_path})
    stage = record(tmp_path)
    folders = stage.folders()
    trace = stage.run_folder("ada").path / TRACE_FILE
    whole = trace.read_text()
    trace.write_text("".join(whole.splitlines(keepends=True)[1:]))
    with pytest.raises(StateError, match="the beginning of a trace is missing"):
        read_recording(folders)
    trace.write_text(whole)
    for name in TRAINERS:
        (stage.run_folder(name).path / ROSTERS_FILE).unlink()
    with pytest.raises(StateError, match="have 0 founding rosters"):
        read_recording(folders)


def contributed(round_index: int, steps: int) -> dict[str, Any]:
    return {"what": "contributed", "steps": steps, "round": round_index, "fragment": round_index % 2}


def absorbed(round_index: int, steps: int) -> dict[str, Any]:
    return {"what": "absorbed", "steps": steps, "span": [round_index % 2, 0], "entry": ENTRIES[round_index].hex()}


def recorded(*lives: list[dict[str, Any]]) -> Recording:
    entries = {Digest(digest): SimpleNamespace(round=round_index) for round_index, digest in ENTRIES.items()}
    return cast(Recording, SimpleNamespace(entries=entries, lives={PeerId(sha256(b"ann")): list(lives)}))


def test_lateness_counts_the_steps_since_the_contribution() -> None:
    first = [contributed(1, 10), contributed(2, 14), absorbed(1, 15), absorbed(2, 15), contributed(3, 20)]
    second = [absorbed(1, 2), contributed(4, 3), absorbed(4, 4), absorbed(4, 4)]
    pace = pace_of(recorded(first, second))
    assert pace.late == {1: 3, 5: 1}
    assert pace.round_steps == 5.0
    assert [pace.late_at_most(share) for share in (0.0, 0.5, 0.75, 0.76, 1.0)] == [1, 1, 1, 5, 5]


@pytest.mark.parametrize("lives", [[], [[contributed(1, 10)]], [[absorbed(1, 2)]]])
def test_a_run_without_entries_has_no_pace(lives: list[list[dict[str, Any]]]) -> None:
    pace = pace_of(recorded(*lives))
    assert pace == Pace(round_steps=0.0, late={})
    assert pace.late_at_most(0.5) == 0
