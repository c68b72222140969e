"""A run is founded in the same way on any machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from small_run import ORGANISER, peer_key, small_plan
from torch import nn

from p2p_diloco.app.models.exported_model import files_of
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import ConfigError, PeerError
from p2p_diloco.ids import SpanId, sha256
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.protocol.membership.roster_book import RosterBook
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.session.export_files import Provenance
from p2p_diloco.session.founding import found_roster, genesis_digest, genesis_states, read_start, start_from
from p2p_diloco.session.learnt_model import learnt_model
from p2p_diloco.session.own_model import describe_model
from p2p_diloco.signing import SigningKey, is_signed_by
from p2p_diloco.span_log import GENESIS_ROUND

FOUNDER = Member(peer=peer_key("founder").peer, incarnation=1, counts=True)


def found(plan: RunPlan, organiser: SigningKey = ORGANISER, cycle: int = 0) -> CertifiedRoster:
    return found_roster(plan, FOUNDER, organiser, genesis_digest(make_start(plan)), cycle)


def book_of(plan: RunPlan) -> RosterBook:
    return RosterBook(rules=plan.rules, verify=is_signed_by)


def test_two_builds_have_the_same_genesis() -> None:
    assert genesis_digest(make_start(small_plan())) == genesis_digest(make_start(small_plan()))


def test_another_seed_gives_another_genesis() -> None:
    assert genesis_digest(make_start(small_plan())) != genesis_digest(make_start(small_plan({"model.seed": 1})))


def test_the_genesis_of_a_shape_never_changes() -> None:
    # Recorded from one run: a change means that peers of two versions would found different runs.
    assert genesis_digest(make_start(small_plan())).hex()[:16] == GOLDEN


def test_the_initial_state_covers_every_parameter() -> None:
    plan = small_plan()
    start = make_start(plan)
    assert {span: len(vector_N) for span, vector_N in start.items()} == plan.rules.span_elements
    assert all(np.isfinite(vector_N).all() for vector_N in start.values())


def test_an_untrained_model_need_not_be_built_again() -> None:
    plan = small_plan()
    parameters = LocalParameters(build_model(plan.shape, plan.manifest.model.seed), plan.fragments)
    start = start_from(plan, parameters)
    assert genesis_digest(start) == genesis_digest(make_start(plan))
    states = genesis_states(start, found(plan).roster)
    for span, place in plan.places.items():
        zeros_N = np.zeros(place.stop - place.start, np.float32)
        parameters.write(span.fragment, place.start, place.stop, zeros_N)
    assert any(state.anchor_N.any() for state in states.values()), "states are copies"


def test_roster_0_is_valid_and_in_force_with_the_founder() -> None:
    plan = small_plan()
    book = book_of(plan)
    assert book.add(found(plan))
    assert book.in_force is not None
    assert (book.in_force.k, book.in_force.members) == (0, (FOUNDER,))


def test_only_the_organiser_can_found() -> None:
    plan = small_plan()
    with pytest.raises(PeerError):
        book_of(plan).add(found(plan, organiser=peer_key("stranger")))


@pytest.mark.parametrize(("cycle", "expected"), [(-3, 0), (0, 0), (7, 7)])
def test_a_run_founded_before_its_clock_starts_begins_in_cycle_0(cycle: int, expected: int) -> None:
    assert found(small_plan(), cycle=cycle).roster.cycle == expected


def test_spans_start_at_the_founding_roster_with_nothing_absorbed() -> None:
    plan = small_plan()
    start, roster = make_start(plan), found(plan).roster
    states = genesis_states(start, roster)
    assert set(states) == set(plan.places)
    for span, state in states.items():
        assert state.head.roster == roster.digest()
        assert (state.head.height, state.head.round) == (0, GENESIS_ROUND)
        assert np.array_equal(state.anchor_N, start[span])
        assert not state.momentum_N.any()


def test_the_genesis_digest_is_computed_from_the_chains() -> None:
    plan = small_plan()
    start = make_start(plan)
    states = genesis_states(start, found(plan).roster)
    assert genesis_digest(start) == sha256(*(states[span].head.digest for span in sorted(states)))


GOLDEN = "b9b94cc29e78f32c"


# -- initial parameters from a file


def own_plan(model: nn.Module) -> RunPlan:
    rounds = {"clock_start": 1e6, "round_seconds": 8.0, "fragments": 2, "spans_per_fragment": 2}
    values = {"model": describe_model(model), "rounds": rounds}
    return plan_run(draft_manifest(organiser=ORGANISER.peer, now_seconds=1e6, name="own", values=values))


def own_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))


def test_founding_from_a_file_equals_founding_from_the_model(tmp_path: Path) -> None:
    model, path = own_model(), tmp_path / "model.safetensors"
    save_model(model, str(path))
    plan = own_plan(model)
    assert genesis_digest(read_start(plan, path)) == genesis_digest(
        start_from(plan, LocalParameters(model, plan.fragments))
    )


def test_the_built_in_model_can_start_from_a_file_too(tmp_path: Path) -> None:
    plan, path = small_plan(), tmp_path / "model.safetensors"
    save_model(build_model(plan.shape, 9), str(path))
    assert genesis_digest(read_start(plan, path)) == genesis_digest(make_start(small_plan({"model.seed": 9})))


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: without(tensors, "2.weight"), "has no tensor 2.weight, which the run trains; name an export"),
        (
            lambda tensors: tensors | {"0.bias": torch.zeros(34)},
            r"tensor 0.bias has shape \(34,\) in .* and \(33,\) in the run",
        ),
        (
            lambda tensors: tensors | {"0.bias": torch.full((33,), torch.inf)},
            "0.bias in .* holds values other than finite",
        ),
        (lambda tensors: tensors | {"0.bias": torch.zeros(33, dtype=torch.int64)}, "holds values other than finite"),
    ],
)
def test_a_file_that_does_not_match_is_refused_with_its_tensor(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], said: str
) -> None:
    model, path = own_model(), tmp_path / "model.safetensors"
    save_file(change(dict(model.state_dict())), str(path))
    with pytest.raises(ConfigError, match=said):
        read_start(own_plan(model), path)


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_start(small_plan(), path)
    path.write_bytes(b"weights")
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        read_start(small_plan(), path)


# -- initial parameters from an export

TABLE = [["layers.0.q.weight", [6, 4], "radial"], ["layers.0.norm", [4], "radial"], ["head.weight", [8, 4], "plain"]]
ADAPTERS = [
    ["layers.0.q.lora_A.default.weight", [2, 4], "radial"],
    ["layers.0.q.lora_B.default.weight", [6, 2], "radial"],
]
HUGGING_FACE = {"model.source": "hf:base", "model.config": '{"model_type":"gpt2","n_head":2}', "model.context": 8}
LORA = {"model.weights": "loaded", "model.lora_rank": 2, "model.tensors": ADAPTERS, "model.vocabulary": 8}
KINDS: dict[str, dict[str, Any]] = {
    "built-in": {},
    "own": {"model.tensors": TABLE},
    "hf": HUGGING_FACE | {"model.tensors": TABLE},
    "lora": HUGGING_FACE | LORA,
}


def kind_plan(kind: str, **values: Any) -> RunPlan:
    own = {"layers": None, "width": None, "heads": None, "feed_forward": None}
    return (
        small_plan(values)
        if kind == "built-in"
        else small_plan({f"model.{key}": own[key] for key in own} | KINDS[kind] | values)
    )


def exported(kind: str, folder: Path, **values: Any) -> dict[SpanId, Vector]:
    """Write the export of a run of random parameters, and return them."""
    plan, generator = kind_plan(kind, **values), np.random.default_rng(4)
    start = {span: generator.standard_normal(n).astype(np.float32) for span, n in plan.rules.span_elements.items()}
    learnt = learnt_model(
        plan, folder, genesis_states(start, found_roster(plan, FOUNDER, ORGANISER, sha256(b""), 0).roster), 3
    )
    origin = Provenance(run_name="old", run=plan.rules.run.hex(), text=None, rounds=3, cycles=1.5)
    folder.mkdir()
    for name, content in files_of(learnt, origin).items():
        (folder / name).write_bytes(content)
    return start


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_from_the_export_of_another(tmp_path: Path, kind: str) -> None:
    start = exported(kind, tmp_path / "model")
    read = read_start(kind_plan(kind), tmp_path / "model")
    assert all(np.array_equal(read[span], start[span]) for span in start)


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (
            "built-in",
            {"model.feed_forward": 32},
            r"tensor model.layers.0.mlp.gate_proj.weight has shape \(24, 16\) in .* and \(32, 16\) in the run",
        ),
        ("built-in", {"model.heads": 4}, "num_attention_heads is 2 in .*config.json and 4 in the run; name an export"),
        ("hf", {"model.config": '{"model_type":"gpt2","n_head":4}'}, "n_head is 2 in .*config.json and 4 in the run"),
        ("lora", {"model.lora_alpha": 32.0}, r"lora_alpha is 16.0 in .*adapter_config.json and 32.0 in the run"),
        ("own", {"model.tensors": [["head.weight", [8, 5], "plain"]], "rounds.fragments": 1}, r"has shape \(8, 4\) in"),
    ],
)
def test_an_export_of_another_model_is_refused(tmp_path: Path, kind: str, values: dict[str, Any], said: str) -> None:
    exported(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match=said):
        read_start(kind_plan(kind, **values), tmp_path / "model")


def test_an_export_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    plan, folder = kind_plan("built-in"), tmp_path / "model"
    exported("built-in", folder)
    for broken in ("{", '["llama"]', "3"):
        (folder / "config.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"cannot read .*config.json \(.*\); name an export of a run"):
            read_start(plan, folder)
    (folder / "config.json").unlink()
    read_start(plan, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=r"model.safetensors is not a safetensors file \("):
        read_start(plan, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model.safetensors or adapter_model.safetensors; name an export"):
        read_start(plan, folder)
