"""Measuring an inner step on this machine."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import torch

from p2p_diloco.app.training import step_benchmark
from p2p_diloco.app.training.step_benchmark import Unmeasured, measure_inner_step
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import SigningKey

SMALLEST = {"layers": 1, "width": 16, "heads": 1, "feed_forward": 16, "context": 16}


def manifest(**model: Any) -> RunManifest:
    return draft_manifest(organiser=SigningKey(bytes(32)).peer, now_seconds=1e6, values={"model": model})


def test_a_small_model_is_measured_in_whole_steps_and_threads_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_benchmark, "BUDGET_SECONDS", 0.1)
    threads = torch.get_num_threads()
    step = measure_inner_step(manifest(**SMALLEST), device="cpu", threads=1)
    assert not step.is_estimated
    assert 0.0 < step.seconds < 60.0
    assert torch.get_num_threads() == threads


def test_a_machine_used_by_others_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps took seven times as long beside a demo, and had more than one core."""
    monkeypatch.setattr(step_benchmark, "BUDGET_SECONDS", 0.1)
    cores = psutil.cpu_count() or 1
    for by_others, is_noticed in ((cores - 1.0, False), (cores - 0.5, True)):
        begin = time.perf_counter()
        monkeypatch.setattr(
            step_benchmark,
            "_processor_seconds_of_others",
            lambda begin=begin, cores=by_others: cores * (time.perf_counter() - begin),
        )
        step = measure_inner_step(manifest(**SMALLEST), device="cpu", threads=1)
        assert step.is_disturbed == is_noticed


def test_a_large_model_is_estimated_from_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has eight blocks and eight windows; one block is measured with one window and with two."""
    monkeypatch.setattr(step_benchmark, "SMALL_STEP", 0.0)
    monkeypatch.setattr(step_benchmark, "BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(step_benchmark, "PART_SECONDS", 0.2)
    played: list[tuple[int, int]] = []
    made = step_benchmark.InnerLoop

    def watched(model: Any, stream: Any, rule: Any, device: Any) -> Any:
        played.append((model.shape.layers, rule.batch))
        return made(model, stream, rule, device)

    monkeypatch.setattr(step_benchmark, "InnerLoop", watched)
    step = measure_inner_step(manifest(**{**SMALLEST, "layers": 8}), device="cpu", threads=1)
    assert step.is_estimated
    assert step.seconds > 0.0
    assert set(played) == {(1, 1), (1, 2)}


def test_a_model_that_cannot_be_trained_here_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unmeasured, match="the run trains its own model"):
        measure_inner_step(manifest(tensors=[("weight", (64, 64), "radial")]))
    monkeypatch.setattr(step_benchmark, "BYTES_OF_A_PARAMETER", psutil.virtual_memory().total)
    with pytest.raises(Unmeasured, match=r"training 1,012,320 parameters takes at least .* GB of memory, and .* free"):
        measure_inner_step(manifest(), device="cpu")
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        measure_inner_step(manifest(), device="tpu")
