"""Precision by device, and training in half precision with scaled losses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.text.data import BatchStream, Corpus
from p2p_diloco.app.training import precision
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.precision import PrecisionSetting, choose_precision
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.ids import Digest, PeerId


@pytest.mark.parametrize(
    ("agreed", "own", "device", "capability", "chosen"),
    [
        ("float32", "auto", "cuda", (9, 0), "matrix products in float32 (set by the run)"),
        ("bfloat16", "auto", "cuda", (8, 0), "matrix products in bfloat16 (set by the run)"),
        ("bfloat16", "auto", "cuda", (7, 5), "matrix products in float16 (this GPU has no fast bfloat16)"),
        ("bfloat16", "auto", "cuda", None, "matrix products in bfloat16 (set by the run)"),
        (
            "bfloat16",
            "auto",
            "mps",
            None,
            "matrix products in float32 (less was not tried on Apple GPUs; see --precision)",
        ),
        ("float32", "float16", "cuda", (7, 5), "matrix products in float16 (chosen with --precision)"),
        ("bfloat16", "float32", "cpu", None, "matrix products in float32 (chosen with --precision)"),
    ],
)
def test_the_precision_suits_run_and_device(
    agreed: str, own: PrecisionSetting, device: str, capability: tuple[int, int] | None, chosen: str
) -> None:
    found = choose_precision(agreed, own, torch.device(device), capability)
    assert str(found) == chosen
    assert found.scales == (found.name == "float16")


@pytest.mark.parametrize("has_it", [True, False])
def test_a_processor_uses_bfloat16_only_if_it_has_instructions(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_has_fast_bfloat16", lambda: has_it)
    assert choose_precision("bfloat16", "auto", torch.device("cpu")).name == ("bfloat16" if has_it else "float32")


def test_half_precision_learns_like_float32_and_survives_an_overflow(corpus: Corpus, shape: ModelShape) -> None:
    rule = InnerRule(batch=8, warmup_steps=1, learning_rate=4e-3)
    loops = []
    for name in ("float32", "float16"):
        stream = BatchStream(corpus, Digest(bytes(32)), PeerId(bytes(32)), batch=8, context=shape.context)
        own = choose_precision("bfloat16", name, torch.device("cpu"))  # type: ignore[arg-type]
        loops.append(InnerLoop(build_model(shape, 0), stream, rule, precision=own))
    losses = [[loop.step() for _ in range(40)] for loop in loops]
    assert all(step.applied for step in losses[0])
    assert sum(step.applied for step in losses[1]) > 30, "a too large scale may cost a few steps"
    assert losses[1][-1].loss < 0.6 * losses[1][0].loss
    assert losses[1][-1].loss == pytest.approx(losses[0][-1].loss, rel=0.1)
    assert dataclasses.replace(rule, precision="bfloat16").precision == "bfloat16"


def test_the_scale_of_losses_recovers_after_many_bad_steps(corpus: Corpus, shape: ModelShape) -> None:
    stream = BatchStream(corpus, Digest(bytes(32)), PeerId(bytes(32)), batch=2, context=shape.context)
    own = choose_precision("bfloat16", "float16", torch.device("cpu"))
    loop = InnerLoop(build_model(shape, 0), stream, InnerRule(batch=2, warmup_steps=1), precision=own)
    loop.model.norm.gain.data.fill_(float("nan"))
    for _ in range(200):
        assert not loop.step().applied
    loop.model.norm.gain.data.fill_(1.0)
    assert any(loop.step().applied for _ in range(5))
