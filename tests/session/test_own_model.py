"""Custom models and optimisers: which may take part, and how the steps of a custom loop are counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from small_run import ORGANISER, start_states, update_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from p2p_diloco.app.models.exported_model import files_of, provenance_of
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import draft_manifest, read_run_toml, write_run_toml
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import SpanId
from p2p_diloco.island.inner_state import INNER_FILE
from p2p_diloco.session import trained_state
from p2p_diloco.session.founding import start_from
from p2p_diloco.session.learnt_model import learnt_model
from p2p_diloco.session.own_model import OwnModel, check_model, describe_model
from p2p_diloco.session.training import TrainingHost


class Small(nn.Module):
    """An embedding tied to the head, a frozen layer, a norm with buffers, and sizes that fill no whole block."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.hidden = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.frozen(self.hidden(self.embedding(words)))))
        return found


def small(seed: int = 0, **sizes: int) -> Small:
    torch.manual_seed(seed)
    return Small(**sizes)


def manifest_for(model: nn.Module, **more: Any) -> RunManifest:
    rounds = {"clock_start": 1e6, "round_seconds": 8.0, "fragments": 2, "spans_per_fragment": 2}
    values = {"model": describe_model(model, **more), "rounds": rounds}
    return draft_manifest(organiser=ORGANISER.peer, now_seconds=1e6, name="own", values=values)


def opened(
    model: nn.Module,
    plan: RunPlan,
    *optimizers: torch.optim.Optimizer,
    folder: Path = Path(os.devnull),
    report: Callable[[str, str], None] = lambda topic, text: None,
) -> OwnModel:
    own = OwnModel(model, optimizers)
    own.open(
        TrainingHost(
            plan=plan,
            peer=ORGANISER.peer,
            incarnation=1,
            settings=PeerSettings(),
            folder=folder,
            now=lambda: 0.0,
            in_loop=lambda call: call(),
            died=_refuse,
            damaged=_refuse,
            report=report,
            reporter=cast(Any, None),
            engine=cast(Any, None),
            archive=cast(Any, None),
            written=cast(Any, None),
        )
    )
    return own


def _refuse(*said: object) -> None:
    raise AssertionError(said)


@pytest.fixture
def hold() -> Iterator[Callable[[OwnModel, RunPlan, nn.Module], None]]:
    held: list[OwnModel] = []

    def begin(own: OwnModel, plan: RunPlan, founder: nn.Module) -> None:
        assert own.state is not None
        held.append(own)
        own.state.hold(start_states(plan, founder))
        assert own.state.begin()

    yield begin
    for own in held:
        assert own.state is not None
        own.state.close()
        own.close()


# -- the manifest


def test_trained_tensors_are_listed_once_with_their_means() -> None:
    rows = {name: (tuple(shape), mean) for name, shape, mean in describe_model(small())["tensors"]}
    assert rows == {
        "embedding.weight": ((50, 12), "plain"),
        "hidden.weight": ((12, 12), "radial"),
        "hidden.bias": ((12,), "radial"),
        "norm.weight": ((12,), "radial"),
        "norm.bias": ((12,), "radial"),
    }


def test_a_run_file_of_a_model_is_read_back_as_written(tmp_path: Path) -> None:
    manifest = manifest_for(small())
    write_run_toml(tmp_path / "run.toml", manifest)
    assert read_run_toml(tmp_path / "run.toml") == manifest
    assert plan_run(manifest).num_parameters == 50 * 12 + 12 * 12 + 3 * 12


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tensors": [["a", [2], "plain"], ["a", [3], "plain"]]}, "tensor 'a' is listed twice"),
        ({"tensors": [["__metadata__", [2], "plain"]]}, "a tensor cannot be called __metadata__, because files"),
        ({"tensors": [["a", [2**40, 2**20], "plain"]]}, "has 1,152,921,504,606,846,976 parameters; expected at most"),
        ({"ignored": ["a"]}, "rest and ignored only apply to your own model"),
    ],
)
def test_invalid_tensors_are_refused(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        draft_manifest(organiser=ORGANISER.peer, now_seconds=1e6, name="run", values={"model": values})


# -- which models may take part


def test_the_same_model_built_elsewhere_may_join() -> None:
    check_model(small(seed=0), manifest_for(small(seed=0)).model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_wrapped_models_have_the_names_of_the_wrapped_model() -> None:
    model = small()
    check_model(torch.compile(model), manifest_for(model).model)  # type: ignore[arg-type]


def other_layer() -> nn.Module:
    model = small()
    model.extra = nn.Linear(3, 3)
    return model


def without_bias() -> nn.Module:
    model = small()
    model.hidden = nn.Linear(12, 12, bias=False)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: small(width=16), r"tensor embedding.weight has shape \(50, 16\) here and \(50, 12\) in the run"),
        (other_layer, r"this model trains extra.weight of shape \(3, 3\), which the run does not"),
        (without_bias, r"the run trains a tensor hidden.bias of shape \(12,\), which this model lacks"),
        (lambda: small(seed=1), "frozen parameters or buffers of this model differ from those of the run"),
    ],
    ids=["other width", "one more", "one less", "other base"],
)
def test_another_model_is_refused_with_the_difference(model: Callable[[], nn.Module], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_model(model(), manifest_for(small()).model)


def test_a_tensor_unknown_to_the_run_is_refused_too() -> None:
    """A frozen layer that no digest covers would give the joiner another loss."""
    run = manifest_for(nn.Linear(3, 3)).model
    model = nn.Linear(3, 3)
    model.register_buffer("scale", torch.ones(3))
    with pytest.raises(ConfigError, match="frozen parameters or buffers of this model differ"):
        check_model(model, run)


def test_tensors_that_the_organiser_ignores_may_differ() -> None:
    ignore = ("frozen.weight", "frozen.bias")
    check_model(small(seed=1), manifest_for(small(), ignore=ignore).model)


def transposed() -> nn.Module:
    model = nn.Linear(4, 6)
    model.weight.data = model.weight.data.t().contiguous().t()
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: nn.Linear(4, 4).requires_grad_(False), "the model has no parameter that requires a gradient"),
        (lambda: nn.Linear(4, 4).bfloat16(), "parameter weight is bfloat16; trained parameters must be float32"),
        (lambda: nn.Linear(4, 4, device="meta"), "weight is on the meta device and has no values"),
        (transposed, "parameter weight is not contiguous in memory"),
    ],
    ids=["frozen", "bfloat16", "meta", "transposed"],
)
def test_a_model_that_cannot_take_part_is_refused_by_name(model: Callable[[], nn.Module], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        OwnModel(model(), ())


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.parametrize("keeps_names", [False, True])
def test_a_model_sharded_by_version_one_of_fsdp_is_refused(keeps_names: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=cpu, use_orig_params=keeps_names)
        with pytest.raises(ConfigError, match=r"FSDP version 1 .*; shard it with torch.distributed.fsdp.fully_shard"):
            OwnModel(model, ())
    finally:
        dist.destroy_process_group()


def test_a_model_takes_part_in_one_run_at_a_time() -> None:
    model = small()
    first = OwnModel(model, ())
    with pytest.raises(ConfigError, match="this model is already in a run"):
        OwnModel(model, ())
    first.close()
    OwnModel(model, ()).close()


def test_an_optimiser_known_to_keep_a_copy_is_refused() -> None:
    kind = type("AdamWScheduleFree", (torch.optim.SGD,), {"__module__": "schedulefree.adamw"})
    model = small()
    with pytest.raises(ConfigError, match="AdamWScheduleFree keeps a copy of the parameters"):
        OwnModel(model, (kind(model.parameters(), lr=0.1),))


# -- counting


def test_optimiser_steps_are_counted_rather_than_calls(hold: Callable[..., None]) -> None:
    model, plan = small(), plan_run(manifest_for(small()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = opened(model, plan, optimizer)
    hold(own, plan, model)
    assert own.state is not None
    for is_step in (False, False, True, False, True):
        if is_step:
            optimizer.step()
        own.stepped(10, None)
    progress = own.state.progress()
    assert (progress.steps, progress.tokens) == (2, 50)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_skipped_by_a_grad_scaler_is_not_counted(fused: bool, hold: Callable[..., None]) -> None:
    """A fused optimiser is called anyway; its kernel changes nothing."""
    model, plan = small(), plan_run(manifest_for(small()))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=fused)
    own = opened(model, plan, optimizer)
    hold(own, plan, model)
    assert own.state is not None
    scaler = torch.amp.GradScaler("cpu")
    moved = []
    for gradient in (1.0, float("inf"), 1.0):
        before = model.hidden.weight.detach().clone()
        for parameter in trained:
            parameter.grad = torch.full_like(parameter, gradient)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        own.stepped(10, None)
        moved.append(not torch.equal(before, model.hidden.weight))
    progress = own.state.progress()
    assert moved == [True, False, True]
    assert (progress.steps, progress.tokens) == (2, 30)


def test_without_an_optimiser_every_call_is_a_step(hold: Callable[..., None]) -> None:
    model, plan = small(), plan_run(manifest_for(small()))
    own = opened(model, plan)
    hold(own, plan, model)
    assert own.state is not None
    for _ in range(3):
        own.stepped(10, 2.0)
    progress = own.state.progress()
    assert (progress.steps, progress.tokens, progress.loss) == (3, 30, 2.0)


@pytest.mark.parametrize(("planned_steps", "scale"), [(8, 2.0), (64, 0.25), (None, 1.0)])
def test_a_loop_is_advised_by_its_own_step_times_and_nothing_is_applied(
    monkeypatch: pytest.MonkeyPatch, hold: Callable[..., None], planned_steps: int | None, scale: float
) -> None:
    """A cycle has 16 s."""
    model, manifest, now = small(), manifest_for(small()), [0.0]
    rounds = manifest.rounds.model_copy(update={"planned_steps": planned_steps})
    plan = plan_run(manifest.model_copy(update={"rounds": rounds}))
    monkeypatch.setattr(trained_state, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    own = opened(model, plan)
    hold(own, plan, model)
    assert own.batch_scale == 1.0
    for _ in range(30):
        now[0] += 1.0
        own.stepped(10, 2.0)
    assert own.batch_scale == scale


class Stubborn(torch.optim.Optimizer):
    """An optimiser with master weights: its next step overwrites any other change of θ."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4})
        self.masters = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter, master in zip(group["params"], self.masters, strict=True):
                master.sub_(1e-4 * torch.ones_like(master))
                parameter.copy_(master)


def step_by(optimizer: torch.optim.Optimizer, gradient: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()


def merge(own: OwnModel, plan: RunPlan) -> float:
    """Let all parameters follow an entry; return the mean move of the first."""
    assert own.state is not None
    first = next(own.model.parameters())
    before = first.detach().clone()
    for span in plan.places:
        halves_N = np.full(plan.rules.span_elements[span], 0.5, np.float32)
        own.state.apply(update_of(span, span.fragment, plan.codecs.entry.encode(halves_N)))
    own.state.wait_until_idle()
    own.border()
    return float((first.detach() - before).mean())


@pytest.mark.parametrize("kind", [Stubborn, lambda parameters: torch.optim.SGD(parameters, lr=1e-3)])
def test_an_optimiser_that_undoes_merges_is_detected(kind: Any, hold: Callable[..., None]) -> None:
    model, plan = small(), plan_run(manifest_for(small()))
    optimizer = kind([p for p in model.parameters() if p.requires_grad])
    own = opened(model, plan, optimizer)
    hold(own, plan, model)
    own.border()
    step_by(optimizer, 1.0)
    own.stepped(1, None)
    merge(own, plan)
    step_by(optimizer, 1.0)
    if kind is Stubborn:
        with pytest.raises(ConfigError, match="the optimiser overwrote a merge with its own copy of the parameters"):
            own.stepped(1, None)
    else:
        own.stepped(1, None)


def test_a_step_that_reverts_a_merge_by_chance_is_accepted(hold: Callable[..., None]) -> None:
    """In a round of few steps a merge takes them back, and the next step may make them again."""
    model, plan = small(), plan_run(manifest_for(small()))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    own = opened(model, plan, optimizer)
    hold(own, plan, model)
    own.border()
    step_by(optimizer, 0.2)
    own.stepped(1, None)
    step_by(optimizer, merge(own, plan))
    own.stepped(1, None)


def test_the_initial_state_is_the_founders_model() -> None:
    model = small(seed=7)
    plan = plan_run(manifest_for(model))
    own = opened(model, plan)
    assert own.state is not None
    start = start_from(plan, own.state.local.parameters)
    flat = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    assert sum(len(vector_N) for vector_N in start.values()) == len(flat)
    assert sum(float(vector_N.sum()) for vector_N in start.values()) == pytest.approx(float(flat.sum()), abs=1e-4)
    assert SpanId(0, 0) in start
    own.state.close()
    own.close()


def test_momentum_survives_a_restart_and_is_reset_for_another_optimiser(
    tmp_path: Path, hold: Callable[..., None]
) -> None:
    plan, heard = plan_run(manifest_for(small())), list[tuple[str, str]]()

    def start(kind: type[torch.optim.Optimizer]) -> tuple[OwnModel, torch.optim.Optimizer]:
        model = small()
        optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-3)  # type: ignore[call-arg]
        own = opened(model, plan, optimizer, folder=tmp_path, report=lambda *said: heard.append(said))
        hold(own, plan, model)
        return own, optimizer

    own, optimizer = start(torch.optim.AdamW)
    for parameter in own.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    own.stepped(1, None)
    assert own.state is not None
    own.state.keep_inner()
    assert not list(tmp_path.iterdir()), "the training thread writes, at its boundary"
    own.border()
    again, restored = start(torch.optim.AdamW)
    assert [tensor.tolist() for tensor in _moments(restored)] == [tensor.tolist() for tensor in _moments(optimizer)]
    assert _moments(restored)
    again.close()
    _, other = start(torch.optim.SGD)
    assert not _moments(other)
    assert [topic for topic, _ in heard] == ["inner"]
    assert "does not match, so these are reset: optimizer 0 (it was a torch.optim.adamw.AdamW)" in heard[0][1]


def test_leaving_from_another_thread_saves_nothing(tmp_path: Path, hold: Callable[..., None]) -> None:
    """The optimiser may be in the middle of a step."""
    model, plan = small(), plan_run(manifest_for(small()))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    own = opened(model, plan, optimizer, folder=tmp_path)
    hold(own, plan, model)
    optimizer.step()
    own.stepped(1, None)
    other = threading.Thread(target=own.close)
    other.start()
    other.join()
    assert not list(tmp_path.iterdir())
    own.close()
    assert [path.name for path in tmp_path.iterdir()] == [INNER_FILE]


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_step_that_breaks_the_model_is_undone_and_counts_for_nothing(kind: Any, hold: Callable[..., None]) -> None:
    plan, model, heard = plan_run(manifest_for(small())), small(), list[tuple[str, str]]()
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    own = opened(model, plan, optimizer, report=lambda *said: heard.append(said))
    hold(own, plan, model)
    assert own.state is not None
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step_by(optimizer, 1.0)
    own.stepped(10, 1.0, own.first_not_finite())
    own.border()
    model.norm.running_var.fill_(float("nan"))  # type: ignore[operator]
    step_by(optimizer, float("nan"))
    assert own.first_not_finite() == "embedding.weight"
    own.stepped(10, float("nan"), own.first_not_finite())
    own.border()
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    progress = own.state.progress()
    assert (progress.steps, progress.tokens, progress.loss, progress.undone) == (1, 10, 1.0, 1)
    assert own.state.contribute(0, 0) is None, "what was learnt before is lost"
    text = "step 2 left embedding.weight not finite (loss nan); continuing from the shared model with new moments; "
    assert heard == [("not-finite", f"{text}look at the learning rate, the batch and the precision")]
    step_by(optimizer, 1.0)
    own.stepped(7, 1.0, own.first_not_finite())
    contribution = own.state.contribute(0, 0)
    assert contribution is not None
    assert (contribution.steps, contribution.tokens) == (1, 7)
    assert all(torch.isfinite(moment).all() for moment in _moments(optimizer))


def test_a_model_that_breaks_again_and_again_ends_its_loop(hold: Callable[..., None]) -> None:
    plan, model = plan_run(manifest_for(small())), small()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    own = opened(model, plan, optimizer)
    hold(own, plan, model)
    for number in range(3):
        step_by(optimizer, float("inf"))
        own.stepped(1, None, own.first_not_finite())
        if number < 2:
            own.border()
    with pytest.raises(
        ConfigError, match=r"step 1 left .*, the third failure in a row or within a cycle \(16 s\); look"
    ):
        own.border()


def test_buffers_survive_a_restart_and_constants_that_are_infinite_are_left_alone(
    tmp_path: Path, hold: Callable[..., None]
) -> None:
    def made() -> Small:
        model = small()
        model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
        return model

    plan = plan_run(manifest_for(made()))
    model = made()
    own = opened(model, plan, folder=tmp_path)
    hold(own, plan, model)
    model(torch.arange(8))
    own.stepped(1, None, own.first_not_finite())
    own.close()
    again = made()
    hold(opened(again, plan, folder=tmp_path), plan, again)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(again.norm, name), getattr(model.norm, name))
    assert again.norm.num_batches_tracked == 1


def test_an_exported_checkpoint_holds_the_buffers_that_the_peer_saved(
    tmp_path: Path, hold: Callable[..., None]
) -> None:
    model = small()
    plan = plan_run(manifest_for(model))
    own = opened(model, plan, folder=tmp_path)
    hold(own, plan, model)
    model(torch.arange(8))
    own.stepped(1, None)
    own.close()
    learnt = learnt_model(plan, tmp_path, start_states(plan, model), rounds=3)
    path = tmp_path / "model.safetensors"
    path.write_bytes(files_of(learnt, provenance_of(learnt, None))["model.safetensors"])
    other = small(seed=1)
    missing = other.load_state_dict(load_file(path), strict=False)
    assert {name.partition(".")[0] for name in missing.missing_keys} == {"frozen", "head"}, "frozen, and tied"
    assert not missing.unexpected_keys
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)
