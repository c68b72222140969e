"""Trials in one stack of models give the results of trials that are played one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.inner_rule import InnerRule, OptimizerName
from p2p_diloco.errors import ConfigError
from research.learners import TextLearners, streams_of
from research.setting import OURS, SYSTEMS, Setting, run_together, run_trial, together_with
from research.stack import Crew, Stack
from research.table import stacks_of

SMALL = Setting(
    name="row", size="micro", islands=2, ticks=16, sync_every=8, fragments=2, delay=1, batch=1, judged_tokens=1024
)
SHAPE = ModelShape(layers=2, width=16, heads=2, feed_forward=24, context=16)
RULE = InnerRule(learning_rate=0.02, warmup_steps=3, batch=2, schedule="cosine", gradient_clip=0.5)


def in_a_stack(text: str, rules: list[InnerRule], seeds: list[int], device: str = "cpu") -> Stack:
    streams = [streams_of(open_corpus(text), SHAPE, seed, [2, 2]) for seed in seeds]
    crews = [Crew(rule=rule, seed=seed, streams=own) for rule, seed, own in zip(rules, seeds, streams, strict=True)]
    return Stack(SHAPE, 2, crews, device)


def one_by_one(text: str, rule: InnerRule, seed: int, device: str) -> TextLearners:
    return TextLearners(
        shape=SHAPE,
        corpus=open_corpus(text),
        rule=rule,
        num_learners=2,
        windows=2,
        num_fragments=2,
        seed=seed,
        device=device,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_steps_in_a_stack_are_those_of_the_inner_loop(optimizer: OptimizerName, device: str, text: str) -> None:
    """Two trials with inner rates of their own; one learner makes only every other step, and one is written to."""
    rules = [replace(RULE, optimizer=optimizer, learning_rate=rate) for rate in (0.02, 0.005)]
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no cuda here")
    stack = in_a_stack(text, rules, [3, 4], device)
    alone = [one_by_one(text, rule, seed, device) for rule, seed in zip(rules, (3, 4), strict=True)]
    for tick in range(12):
        for together, own in zip(stack.crews, alone, strict=True):
            for learners in (together, own):
                learners.progress(tick / 12)
                learners.step(0)
                if tick % 2:
                    learners.step(1)
        stack.step()
        if tick == 5:
            for learners in (*stack.crews, *alone):
                learners.write(1, 1, learners.read(0, 1))
    for together, own in zip(stack.crews, alone, strict=True):
        assert together.fragments == own.fragments
        assert together.tensors == own.tensors
        for learner in range(2):
            assert together.steps(learner) == own.steps(learner) == (12, 6)[learner]
            assert together.tokens(learner) == own.tokens(learner)
            for fragment in range(2):
                np.testing.assert_allclose(
                    together.read(learner, fragment), own.read(learner, fragment), rtol=1e-3, atol=1e-4
                )


def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_nobody_else(text: str) -> None:
    stack, sane = in_a_stack(text, [RULE], [3]), in_a_stack(text, [RULE], [3])
    for some in (stack, sane):
        some.mark(0)
        some.mark(1)
        some.step()
    wrong_N = stack.read(0, 0)
    wrong_N[:] = np.nan
    stack.write(0, 0, wrong_N)
    for some in (stack, sane):
        some.mark(0)
        some.mark(1)
        some.step()
    assert (stack.steps(0), stack.steps(1)) == (1, 2)
    assert np.array_equal(stack.read(1, 0), sane.read(1, 0))
    assert np.array_equal(stack.read(0, 1), in_a_step(text, sane).read(0, 1))


def in_a_step(text: str, like: Stack) -> Stack:
    """Return a stack after one step of both learners."""
    once = in_a_stack(text, [RULE], [3])
    once.mark(0)
    once.mark(1)
    once.step()
    assert once.plan == like.plan
    return once


@pytest.mark.parametrize("system", [system for system in SYSTEMS if system != "data-parallel-int4"])
def test_every_system_gets_the_same_result_in_a_stack(system: str, text: str) -> None:
    setting = replace(SMALL, system=system, stage="test", judged_tokens=16 * 128)
    alone = [run_trial(setting, seed, text) for seed in (2000, 2001)]
    for together, own in zip(run_together([(setting, 2000), (setting, 2001)], text, device="cpu"), alone, strict=True):
        assert together.loss == pytest.approx(own.loss, rel=2e-4)
        assert (together.seed, together.tokens) == (own.seed, own.tokens)
        assert together.bytes_sent_per_parameter == own.bytes_sent_per_parameter
        assert len(together.blocks) == len(own.blocks)


def test_a_stack_makes_no_step_that_nobody_asked_for(text: str) -> None:
    several = replace(SMALL, system="data-parallel", ticks=32, accumulate=8)
    (found,) = run_together([(several, 0)], text, device="cpu")
    assert found.tokens == run_trial(several, 0, text).tokens


def test_trials_share_a_stack_if_their_models_and_batches_are_alike() -> None:
    assert together_with(SMALL) == together_with(
        replace(SMALL, name="other", learning_rate=0.1, outer_rate=0.2, momentum=0.9, islands=4, lost_share=0.25)
    )
    for other in (
        replace(SMALL, fragments=4),
        replace(SMALL, batch=2),
        replace(SMALL, inner="muon"),
        replace(SMALL, ticks=32),
        replace(SMALL, inner_schedule="constant"),
    ):
        assert together_with(other) != together_with(SMALL)
    assert together_with(replace(SMALL, system="data-parallel-int4")) is None


def test_stacks_hold_every_trial_once_and_fill_the_processes() -> None:
    other = replace(SMALL, batch=2)
    alone = replace(SMALL, system="data-parallel-int4")
    trials = [(setting, seed) for setting in (SMALL, other, alone) for seed in range(20)]
    stacks = stacks_of(trials, 4)
    assert sorted((str(setting), seed) for stack in stacks for setting, seed in stack) == sorted(
        (str(setting), seed) for setting, seed in trials
    )
    assert all(len({together_with(setting) for setting, _ in stack}) == 1 for stack in stacks)
    assert max(map(len, stacks)) == 8
    assert [len(stack) for stack in stacks if stack[0][0] == alone] == [1] * 20
    assert [len(stack) for stack in stacks_of(trials[:10], 4)] == [2] * 5


def test_a_seed_of_another_stage_is_refused_in_a_stack(text: str) -> None:
    with pytest.raises(ConfigError, match="seed 7 is not one of the stage 'test'"):
        run_together([(replace(SMALL, system=OURS, stage="test"), 7)], text, device="cpu")
