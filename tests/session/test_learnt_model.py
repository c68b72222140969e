"""The learnt model is read from a peer's disk, whether the peer runs or not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import ORGANISER, as_format_3, small_manifest, start_states

from p2p_diloco.app.models.model import DecoderModel, build_model
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import SpanId
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.outer.state import SpanState
from p2p_diloco.session.learnt_model import load_learnt_model
from p2p_diloco.storage import checkpoint
from p2p_diloco.storage.checkpoint import CheckpointFolder
from p2p_diloco.storage.run_folder import MANIFEST_FILE, RunFolder

PLAN = plan_run(small_manifest())
RUN = PLAN.rules.run


def trained(
    plan: RunPlan = PLAN, *, seed: int = 7, round_index: int = 9
) -> tuple[DecoderModel, dict[SpanId, SpanState]]:
    """Return a model of random parameters, and states whose φ equals them."""
    model = build_model(plan.shape, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    parameters = LocalParameters(model, plan.fragments)
    states = {}
    for span, state in start_states(plan).items():
        place = plan.places[span]
        anchor_N = np.array(parameters.view(span.fragment, place.start, place.stop))
        states[span] = SpanState(
            head=replace(state.head, round=round_index), anchor_N=anchor_N, momentum_N=state.momentum_N
        )
    return model, states


def folder_of(state: Path, plan: RunPlan = PLAN) -> RunFolder:
    folder = RunFolder(state, plan.rules.run)
    folder.write(MANIFEST_FILE, plan.manifest.sign(ORGANISER).encode())
    return folder


def save(folder: RunFolder, states: dict[SpanId, SpanState], plan: RunPlan = PLAN) -> Path:
    kept = CheckpointFolder(folder.path, run=plan.rules.run, elements=plan.rules.span_elements, keep=3)
    kept.save(states)
    return kept.paths()[-1]


def test_the_parameters_of_the_anchor_are_restored_by_name(tmp_path: Path) -> None:
    model, states = trained()
    save(folder_of(tmp_path), states)
    learnt = load_learnt_model(tmp_path)
    expected = dict(model.named_parameters())
    assert learnt.parameters.keys() == expected.keys()
    for name, tensor in learnt.parameters.items():
        assert torch.equal(tensor, expected[name]), name
    assert (learnt.manifest, learnt.plan.shape) == (PLAN.manifest, PLAN.shape)
    assert (learnt.rounds, learnt.cycles, learnt.refused) == (10, 5.0, ())


def test_the_newest_of_several_is_loaded(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for round_index in (3, 5):
        save(folder, trained(round_index=round_index)[1])
    assert load_learnt_model(tmp_path).rounds == 6


def test_before_the_first_entry_the_model_is_the_initial_one(tmp_path: Path) -> None:
    save(folder_of(tmp_path), start_states(PLAN))
    assert load_learnt_model(tmp_path).rounds == 0


def test_a_broken_newest_checkpoint_is_reported_and_not_moved(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    save(folder, trained(round_index=3)[1])
    broken = save(folder, trained(round_index=5)[1])
    raw = bytearray(broken.read_bytes())
    raw[-1] ^= 1
    broken.write_bytes(raw)
    before = sorted(os.listdir(folder.path))
    learnt = load_learnt_model(tmp_path)
    assert learnt.rounds == 4
    assert len(learnt.refused) == 1
    assert f"the checkpoint {broken} is broken" in learnt.refused[0]
    assert sorted(os.listdir(folder.path)) == before, "a peer may be running: nothing is moved"


def test_if_the_only_checkpoint_is_broken_the_error_names_it(tmp_path: Path) -> None:
    save(folder_of(tmp_path), trained()[1]).write_bytes(b"torn")
    with pytest.raises(StateError, match=r"checkpoint-000000000.safetensors is broken"):
        load_learnt_model(tmp_path)


def test_a_checkpoint_removed_during_the_load_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path)
    first = save(folder, trained(round_index=3)[1])
    load = checkpoint.load_checkpoint

    def load_late(path: Path, *rest: object) -> object:
        if path == first and path.exists():  # the peer writes the next one and removes this one
            save(folder, trained(round_index=5)[1])
            path.unlink()
        return load(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "load_checkpoint", load_late)
    assert load_learnt_model(tmp_path).rounds == 6


def test_a_folder_without_a_peer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ConfigError) as caught:
            load_learnt_model(folder)
        assert str(caught.value) == (
            f"no peer has run with the state directory {folder}; name another with --state-directory"
        )


def test_without_a_checkpoint_the_error_asks_to_wait(tmp_path: Path) -> None:
    folder_of(tmp_path)
    with pytest.raises(StateError) as caught:
        load_learnt_model(tmp_path)
    assert str(caught.value) == (
        f"the peer in {tmp_path} has no checkpoint yet; it writes the first one a few seconds after it has the state "
        "of the run, so try again then (p2p-diloco status shows its progress)"
    )


def test_one_of_several_runs_is_chosen_by_its_first_digits(tmp_path: Path) -> None:
    other = plan_run(small_manifest({"model.seed": 5}))
    save(folder_of(tmp_path), trained()[1])
    (tmp_path / ("0" * 16)).mkdir()  # a run that was never joined has no checkpoint and does not count
    assert load_learnt_model(tmp_path).manifest == PLAN.manifest
    save(folder_of(tmp_path, other), trained(other)[1], other)
    names = sorted(plan.rules.run.hex()[:16] for plan in (PLAN, other))
    with pytest.raises(ConfigError) as caught:
        load_learnt_model(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds checkpoints of 2 runs: {names[0]}, {names[1]}; choose one with --run and the first digits "
        "of its id"
    )
    for plan in (PLAN, other):
        for digits in (plan.rules.run.hex()[:4], plan.rules.run.hex().upper()):
            assert load_learnt_model(tmp_path, digits).manifest == plan.manifest
    with pytest.raises(ConfigError, match=r"; 0 of them begin with xyz; choose one with --run"):
        load_learnt_model(tmp_path, "xyz")


def test_the_error_for_a_manifest_that_is_missing_old_or_broken_tells_what_to_do(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    save(folder, trained()[1])
    (folder.path / MANIFEST_FILE).unlink()
    with pytest.raises(StateError, match=r"has no manifest, which describes the model; start its peer once more"):
        load_learnt_model(tmp_path)
    folder.write(MANIFEST_FILE, as_format_3(PLAN.manifest.sign(ORGANISER).encode()))
    with pytest.raises(StateError, match=r"manifest.json is of format 3, and this version .* reads format 5; use"):
        load_learnt_model(tmp_path)
    folder.write(MANIFEST_FILE, b"x" * 100)
    with pytest.raises(StateError, match=r"manifest.json is broken \(a manifest that this version cannot read"):
        load_learnt_model(tmp_path)
