from __future__ import annotations

import dataclasses
import math
import os
import sys
import threading

import numpy as np
import pytest
import torch

from p2p_diloco.app.models.evaluation import held_out_loss
from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.data import BatchStream, Corpus, open_corpus
from p2p_diloco.app.training.inner_loop import InnerLoop, StepResult, choose_device
from p2p_diloco.app.training.muon import Muon
from p2p_diloco.config.decoder import MODEL_SIZES, ModelShape
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.island.parameters import LocalParameters, sizes
from p2p_diloco.outer.fragments import plan_fragments

RULE = InnerRule(optimizer="adamw", learning_rate=4e-3, embedding_rate=4.0, beta2=0.95, warmup_steps=5, batch=4)


def loop_of(shape: ModelShape, corpus: Corpus, rule: InnerRule = RULE, peer: bytes = b"a") -> InnerLoop:
    stream = BatchStream(corpus, Digest(b"r" * 32), PeerId(peer * 32), batch=rule.batch, context=shape.context)
    return InnerLoop(build_model(shape, seed=0), stream, rule)


def weights(loop: InnerLoop) -> np.ndarray:
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()]).numpy().copy()


def test_a_step_reports_its_results(shape: ModelShape, corpus: Corpus) -> None:
    loop = loop_of(shape, corpus)
    step = loop.step()
    assert step.loss == pytest.approx(math.log(256), abs=1e-4)
    assert step.tokens == 4 * 12
    assert step.gradient_norm > 0
    assert step.learning_rate == pytest.approx(RULE.learning_rate / 5)
    assert step.applied
    assert (loop.steps, loop.tokens, loop.stream.position) == (1, 48, 4)


def test_steps_learn_the_small_language(shape: ModelShape, corpus: Corpus) -> None:
    loop = loop_of(shape, corpus)
    for _ in range(150):
        loop.step()
    assert held_out_loss(loop.model, corpus) < 2.0


@pytest.mark.slow
def test_the_tiny_model_learns_python_within_a_hundred_steps() -> None:
    corpus = open_corpus(None)
    loop = loop_of(MODEL_SIZES["tiny"], corpus, InnerRule())
    for _ in range(100):
        loop.step()
    assert held_out_loss(loop.model, corpus) < 3.0  # byte frequencies alone reach 3.24


def test_the_same_start_and_stream_give_the_same_bits(shape: ModelShape, corpus: Corpus) -> None:
    first, second = loop_of(shape, corpus), loop_of(shape, corpus)
    assert [first.step() for _ in range(5)] == [second.step() for _ in range(5)]
    assert np.array_equal(weights(first), weights(second))


def test_a_separate_thread_gives_the_same_bits(shape: ModelShape, corpus: Corpus) -> None:
    expected, loop = loop_of(shape, corpus), loop_of(shape, corpus)
    done: list[StepResult] = []
    thread = threading.Thread(target=lambda: done.extend(loop.step() for _ in range(5)))
    thread.start()
    thread.join()
    assert done == [expected.step() for _ in range(5)]
    assert np.array_equal(weights(loop), weights(expected))


def test_a_step_lets_other_threads_run() -> None:
    # The switch interval is so long that no thread has to yield the interpreter: the counter advances during the
    # steps only because PyTorch releases it.
    loop, turns, interval = loop_of(MODEL_SIZES["tiny"], open_corpus(None)), [0], sys.getswitchinterval()
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            os.sched_yield()

    thread = threading.Thread(target=count)
    sys.setswitchinterval(100.0)
    try:
        thread.start()
        before = turns[0]
        for _ in range(5):
            loop.step()
        gained = turns[0] - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert gained > 0


def test_different_peers_train_on_different_text(shape: ModelShape, corpus: Corpus) -> None:
    first, second = loop_of(shape, corpus), loop_of(shape, corpus, peer=b"b")
    first.step()
    second.step()
    assert not np.array_equal(weights(first), weights(second))


def test_momentum_survives_a_merge(shape: ModelShape, corpus: Corpus) -> None:
    merged, plain = loop_of(shape, corpus), loop_of(shape, corpus)
    local = LocalParameters(merged.model, plan_fragments(sizes(merged.model), 2))
    for _ in range(3):
        merged.step()
        plain.step()
    local.load_flat(local.read_all())
    assert merged.step() == plain.step()
    assert np.array_equal(weights(merged), weights(plain))


def test_the_rate_warms_up_and_stays_constant(shape: ModelShape, corpus: Corpus) -> None:
    loop = loop_of(shape, corpus)
    rates = [loop.step().learning_rate / RULE.learning_rate for _ in range(7)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(("progress", "share"), [(-1.0, 1.0), (0.0, 1.0), (0.5, 0.6), (1.0, 0.2), (3.0, 0.2)])
def test_a_cosine_rate_falls_with_the_runs_progress(
    shape: ModelShape, corpus: Corpus, progress: float, share: float
) -> None:
    loop = loop_of(shape, corpus, dataclasses.replace(RULE, schedule="cosine", final_share=0.2, warmup_steps=0))
    loop.set_progress(progress)
    assert loop.step().learning_rate == pytest.approx(RULE.learning_rate * share)


def test_a_constant_rate_ignores_progress(shape: ModelShape, corpus: Corpus) -> None:
    loop = loop_of(shape, corpus, dataclasses.replace(RULE, warmup_steps=0))
    loop.set_progress(1.0)
    assert loop.learning_rate == RULE.learning_rate


def test_a_step_that_is_not_finite_changes_only_the_position(shape: ModelShape, corpus: Corpus) -> None:
    loop = loop_of(shape, corpus)
    loop.step()
    with torch.no_grad():
        loop.model.norm.gain[0] = math.nan
    before = weights(loop)
    step = loop.step()
    assert not step.applied
    assert math.isnan(step.loss)
    assert np.array_equal(weights(loop), before, equal_nan=True)
    assert (loop.steps, loop.tokens, loop.stream.position) == (1, 48, 8)
    with torch.no_grad():
        loop.model.norm.gain[0] = 1.0
    assert loop.step().applied
    assert np.isfinite(weights(loop)).all()


def test_a_large_gradient_is_clipped(shape: ModelShape, corpus: Corpus) -> None:
    seen: list[float] = []
    loop = loop_of(shape, corpus, dataclasses.replace(RULE, gradient_clip=0.01))
    loop.optimizers[0].register_step_pre_hook(
        lambda *_: seen.append(math.sqrt(sum(float((p.grad**2).sum()) for p in loop.model.parameters())))
    )
    assert loop.step().gradient_norm > 0.01
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_only_matrices_decay_and_the_embedding_has_its_own_rate(shape: ModelShape, corpus: Corpus) -> None:
    loop = loop_of(shape, corpus)
    groups = loop.optimizers[0].param_groups
    assert [group["weight_decay"] for group in groups] == [RULE.weight_decay, 0.0, 0.0]
    assert [group["rate"] for group in groups] == [1.0, RULE.embedding_rate, 1.0]
    assert sum(parameter.numel() for group in groups for parameter in group["params"]) == shape.num_parameters
    assert groups[1]["params"][0] is loop.model.embedding
    assert all(parameter.ndim < 2 for parameter in groups[2]["params"])


def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(shape: ModelShape, corpus: Corpus) -> None:
    loop = loop_of(shape, corpus, dataclasses.replace(RULE, optimizer="muon", warmup_steps=0))
    adamw, muon = loop.optimizers
    assert isinstance(muon, Muon)
    by_muon = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    assert by_muon == {id(p) for name, p in loop.model.named_parameters() if name.startswith("blocks.") and p.ndim > 1}
    by_adamw = {id(parameter) for group in adamw.param_groups for parameter in group["params"]}
    assert not by_muon & by_adamw
    assert len(by_muon | by_adamw) == len(list(loop.model.parameters()))
    first, *_ = (loop.step().loss for _ in range(4))  # head and output projections are zero at first
    before = loop.model.blocks[0].feed_forward.gate_up.detach().clone()
    loop.step()
    moved = loop.model.blocks[0].feed_forward.gate_up.detach() - before * (1.0 - RULE.learning_rate * RULE.weight_decay)
    # Nearly orthogonal: the singular values are similar, and per element as long as AdamW's steps, 0.2 of the rate.
    values = torch.linalg.svdvals(moved)
    assert float(values.max() / values.median()) < 2.0
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * RULE.learning_rate, rel=0.3)
    for _ in range(40):
        last = loop.step().loss
    assert last < first - 1.0


def test_bfloat16_products_learn_too_and_leave_the_parameters_in_float32(shape: ModelShape, corpus: Corpus) -> None:
    loop = loop_of(shape, corpus, dataclasses.replace(RULE, precision="bfloat16"))
    first = loop.step().loss
    for _ in range(40):
        last = loop.step().loss
    assert last < first - 1.0
    assert {parameter.dtype for parameter in loop.model.parameters()} == {torch.float32}


def test_windows_longer_than_the_context_are_refused(shape: ModelShape, corpus: Corpus) -> None:
    stream = BatchStream(corpus, Digest(b"r" * 32), PeerId(b"a" * 32), batch=4, context=13)
    with pytest.raises(ConfigError, match=r"windows have 13 positions; the model takes at most 12"):
        InnerLoop(build_model(shape, seed=0), stream, RULE)


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"embedding_rate": -1.0},
        {"weight_decay": -0.1},
        {"beta1": 1.0},
        {"beta2": -0.5},
        {"batch": 0},
        {"warmup_steps": -1},
        {"schedule": "linear"},
        {"final_share": 1.5},
        {"gradient_clip": 0.0},
        {"precision": "float16"},
    ],
)
def test_a_figure_out_of_range_is_refused_by_name(change: dict[str, object]) -> None:
    (name,) = change
    with pytest.raises(ConfigError, match=rf"inner {name} is .*, which is out of range"):
        dataclasses.replace(RULE, **change)


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "chosen"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_selects_the_fastest_device(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, has_mps: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert choose_device() == torch.device(chosen)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown device .*; expected auto, cpu, cuda, cuda:N or mps"):
        choose_device(name)


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_missing_device_is_refused_with_those_available(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"device '{name}' is not available; PyTorch .* found: cpu; "):
        choose_device(name)


@pytest.mark.parametrize(
    ("name", "cuda", "remedy"),
    [
        (
            "cuda",
            None,
            "this build is CPU-only; install one for your GPU (pytorch.org/get-started/locally), or",
        ),
        (
            "cuda",
            "12.6",
            "this build supports GPUs but finds none; is the driver installed (check with nvidia-smi or rocminfo",
        ),
        ("mps", None, "mps needs a Mac with Apple silicon and a PyTorch build for it; leave --device out"),
    ],
)
def test_the_error_for_a_missing_device_explains_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, cuda: str | None, remedy: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError) as caught:
        choose_device(name)
    assert f"PyTorch {torch.__version__} found: cpu; {remedy}" in str(caught.value)


def test_a_cuda_index_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"device 'cuda:2' is not available; .*; the last one is cuda:1"):
        choose_device("cuda:2")
