"""The search for the windows that fit into memory, with real allocations that fail, and steps in parts."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from p2p_diloco.app.models.model import build_model
from p2p_diloco.app.models.text_model import TextModel, decoder_text_model
from p2p_diloco.app.text.data import BatchStream, Corpus
from p2p_diloco.app.training.inner_loop import InnerLoop
from p2p_diloco.app.training.micro_batch import Recompute, is_out_of_memory, most_windows, with_margin
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.inner_rule import InnerRule
from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId

SEARCH = Path(__file__).with_name("search_memory.py")
RULE = InnerRule(batch=8, warmup_steps=1)


@given(st.integers(0, 300), st.integers(1, 300))
def test_the_search_finds_the_largest_number_that_fits_with_few_tries(limit: int, wanted: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = most_windows(fits, wanted)
    assert found == max((number for number in range(wanted + 1) if number <= limit), default=0)
    assert len(tried) <= 2 * wanted.bit_length() + 1
    assert all(1 <= number <= wanted for number in tried)


def test_a_margin_is_left_unless_everything_fits() -> None:
    assert with_margin(64, 64) == 64
    assert with_margin(63, 64) == 56
    assert (with_margin(1, 64), with_margin(0, 64)) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize("model", ["wide", "deep", "long"])
def test_the_search_agrees_with_trying_every_number_in_limited_memory(model: str) -> None:
    """In a process with a limit on its memory, where allocations really fail."""
    found = searched(model)
    assert 1 < found["search"] < found["wanted"], "the limit must cut into the range"
    # What fits varies by a little with the layout of the process's memory.
    assert abs(found["search"] - found["exhaustive"]) <= max(1, 0.05 * found["exhaustive"])


def searched(model: str) -> dict[str, Any]:
    """Return what the process with little memory has found."""
    # Large tensors are mapped one by one, so that fragments of earlier tries do not use up the address space.
    own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(SEARCH), model]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250, env=own)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def loop_of(
    corpus: Corpus,
    model: TextModel,
    rule: InnerRule = RULE,
    windows_at_once: int | None = None,
    report: Callable[[str], None] = lambda text: None,
    recompute: Recompute = "auto",
) -> InnerLoop:
    stream = BatchStream(corpus, Digest(bytes(32)), PeerId(bytes(32)), batch=rule.batch, context=model.context)
    loop = InnerLoop(model, stream, rule, report=report, recompute=recompute)
    if windows_at_once is not None:
        loop.windows_at_once = windows_at_once
    return loop


@pytest.mark.parametrize("windows_at_once", [1, 3, 8, 100])
def test_a_step_in_parts_equals_a_whole_step(corpus: Corpus, shape: ModelShape, windows_at_once: int) -> None:
    whole = loop_of(corpus, decoder_text_model(build_model(shape, 0)))
    parts = loop_of(corpus, decoder_text_model(build_model(shape, 0)), windows_at_once=windows_at_once)
    for _ in range(3):
        one, two = whole.step(), parts.step()
        assert one.loss == pytest.approx(two.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-4)
        assert one.tokens == two.tokens == 8 * shape.context


class Greedy(nn.Module):
    """Runs out of memory with more than some windows."""

    def __init__(self, shape: ModelShape, most: int) -> None:
        super().__init__()
        self.inner = build_model(shape, 0)
        self.most = most
        self.seen: list[int] = []

    def loss(self, windows_BT: Tensor) -> Tensor:
        self.seen.append(len(windows_BT))
        if len(windows_BT) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.inner.loss(windows_BT)


def greedy(shape: ModelShape, most: int) -> TextModel:
    return TextModel(
        module=Greedy(shape, most), loss=lambda m, windows: m.loss(windows), context=shape.context, vocabulary=256
    )


def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_parts(corpus: Corpus, shape: ModelShape) -> None:
    said: list[str] = []
    loop = loop_of(corpus, greedy(shape, 3), report=said.append)
    calm = loop_of(corpus, greedy(shape, 8))
    calm.model.load_state_dict(copy.deepcopy(loop.model.state_dict()))
    step, expected = loop.step(), calm.step()
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4), (
        "gradients of the failed try were kept"
    )
    assert loop.model.seen == [8, 4, 2, 2, 2, 2]
    assert loop.windows_at_once == 2
    assert said == [
        "out of memory on cpu with 8 windows at a time; using 4, with the same gradients",
        "out of memory on cpu with 4 windows at a time; using 2, with the same gradients",
    ]
    assert loop.step().applied


def limited(shape: ModelShape, most_bytes: int) -> TextModel:
    """Return a model whose forward pass runs out of memory once it keeps more bytes for the backward pass."""

    def loss(module: nn.Module, windows_BT: Tensor) -> Tensor:
        kept = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.nbytes
            if kept > most_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            return plain.loss(module, windows_BT)

    plain = decoder_text_model(build_model(shape, 0))
    return dataclasses.replace(plain, loss=loss)


def test_activations_are_recomputed_once_one_window_does_not_fit(corpus: Corpus, shape: ModelShape) -> None:
    deep = dataclasses.replace(shape, layers=8)
    said: list[str] = []
    loop = loop_of(corpus, limited(deep, 60_000), report=said.append)
    calm = loop_of(corpus, decoder_text_model(build_model(deep, 0)))
    step, expected = loop.step(), calm.step()
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert step.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    assert (loop.windows_at_once, loop.recomputes) == (1, True)
    assert len(said) == 4
    assert said[3] == (
        "out of memory on cpu with one window at a time; recomputing activations in the backward pass, with the same "
        "gradients and about a third more work"
    )
    assert loop.step().applied
    assert len(said) == 4


@pytest.mark.parametrize(("recompute", "most_bytes"), [("never", 60_000), ("auto", 1000), ("always", 1000)])
def test_if_even_that_does_not_help_it_is_an_error(
    corpus: Corpus, shape: ModelShape, recompute: Recompute, most_bytes: int
) -> None:
    loop = loop_of(corpus, limited(dataclasses.replace(shape, layers=8), most_bytes), recompute=recompute)
    with pytest.raises(StateError, match=r"not enough memory on cpu for one window of 12 tokens; free memory there"):
        loop.step()


@pytest.mark.long
def test_a_window_that_does_not_fit_is_trained_by_recomputing_in_limited_memory() -> None:
    """In a process with a limit on its memory, where allocations really fail."""
    found = searched("recompute")
    assert found["fits"] == [False, True]
    assert found["said"][0].startswith("out of memory on cpu with one window at a time; recomputing activations")
    assert found["applied"]


def test_memory_for_less_than_one_window_is_an_error_with_a_remedy(corpus: Corpus, shape: ModelShape) -> None:
    loop = loop_of(corpus, greedy(shape, 0))
    with pytest.raises(StateError, match=r"not enough memory on cpu for one window of 12 tokens; free memory there"):
        loop.step()


def test_other_errors_are_not_taken_for_memory(corpus: Corpus, shape: ModelShape) -> None:
    assert is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
    )
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))

    def broken(module: nn.Module, windows: Tensor) -> Tensor:
        raise RuntimeError("shapes cannot be multiplied")

    model = dataclasses.replace(decoder_text_model(build_model(shape, 0)), loss=broken)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        loop_of(corpus, model).step()
