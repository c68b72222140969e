"""Measuring an inner step on this machine."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import torch

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.planning import inner_step
from p2p_diloco.planning.inner_step import Unmeasured, measure_inner_step
from p2p_diloco.signing import SigningKey

SMALLEST = {"layers": 1, "width": 16, "heads": 1, "feed_forward": 16, "context": 16}


def manifest(**model: Any) -> RunManifest:
    return draft_manifest(organiser=SigningKey(bytes(32)).peer, now_seconds=1e6, values={"model": model})


def test_whole_steps_of_a_small_model_are_made_and_the_threads_stay_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inner_step, "BUDGET_SECONDS", 0.1)
    threads = torch.get_num_threads()
    step = measure_inner_step(manifest(**SMALLEST), device="cpu", threads=1)
    assert not step.is_estimated
    assert 0.0 < step.seconds < 60.0
    assert torch.get_num_threads() == threads


def test_a_machine_that_others_use_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps took seven times as long beside a demo, and had more than a core."""
    monkeypatch.setattr(inner_step, "BUDGET_SECONDS", 0.1)
    cores = psutil.cpu_count() or 1
    for by_others, is_noticed in ((cores - 1.0, False), (cores - 0.5, True)):
        begin = time.perf_counter()
        monkeypatch.setattr(
            inner_step,
            "_processor_seconds_of_others",
            lambda begin=begin, cores=by_others: cores * (time.perf_counter() - begin),
        )
        step = measure_inner_step(manifest(**SMALLEST), device="cpu", threads=1)
        assert step.is_disturbed == is_noticed


def test_of_a_large_model_only_a_part_is_made_and_tells_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks of eight windows, of which one block makes one window and two."""
    monkeypatch.setattr(inner_step, "SMALL_STEP", 0.0)
    monkeypatch.setattr(inner_step, "BUDGET_SECONDS", 0.0)
    monkeypatch.setattr(inner_step, "PART_SECONDS", 0.2)
    played: list[tuple[int, int]] = []
    made = inner_step.InnerLoop

    def watched(model: Any, stream: Any, rule: Any, device: Any) -> Any:
        played.append((model.shape.layers, rule.batch))
        return made(model, stream, rule, device)

    monkeypatch.setattr(inner_step, "InnerLoop", watched)
    step = measure_inner_step(manifest(**{**SMALLEST, "layers": 8}), device="cpu", threads=1)
    assert step.is_estimated
    assert step.seconds > 0.0
    assert set(played) == {(1, 1), (1, 2)}


def test_what_cannot_be_trained_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unmeasured, match="the run trains its own model"):
        measure_inner_step(manifest(tensors=[("weight", (64, 64), "radial")]))
    monkeypatch.setattr(inner_step, "BYTES_OF_A_PARAMETER", psutil.virtual_memory().total)
    with pytest.raises(Unmeasured, match=r"training 1,012,320 parameters takes at least .* GB of memory, and .* free"):
        measure_inner_step(manifest(), device="cpu")
    with pytest.raises(ConfigError, match="unknown device 'tpu'"):
        measure_inner_step(manifest(), device="tpu")
