"""Trials: every algorithm runs on real models, and the same trial gives the same figures."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
from scripted_learners import ScriptedLearners, at_right_angles, lengths_of_blocks

from p2p_diloco.errors import ConfigError
from research.setting import OURS, SYSTEMS, Setting, make_algorithm, run_trial
from research.stages import BLOCKS, SEEDS

SMALL = Setting(
    name="row", size="micro", islands=2, ticks=16, sync_every=8, fragments=2, delay=1, batch=1, judged_tokens=1024
)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_algorithm_learns_and_is_the_same_again(system: str, text: str) -> None:
    setting = replace(SMALL, system=system)
    outcome = run_trial(setting, 0, text)
    # ln 256 is 5.55; SparseLoCo has sent two times 3 % of its elements.
    assert outcome.loss < (5.53 if system == "sparseloco" else 5.4)
    assert outcome.tokens == 2 * 16 * 64
    assert outcome.bytes_sent_per_parameter > 0
    again = run_trial(setting, 0 if system != OURS else 1, text)
    assert (again.loss == outcome.loss) == (system != OURS), "another seed is another trial"


def test_slow_islands_make_a_quarter_of_the_steps(text: str) -> None:
    assert run_trial(replace(SMALL, slow=1), 0, text).tokens == (16 + 4) * 64


def test_islands_of_different_speed_train_on_as_many_windows_as_their_speed_says(text: str) -> None:
    mixed = replace(SMALL, speeds=(1.0, 4.0), batch=2)
    assert run_trial(mixed, 0, text).tokens == (1 + 4) * 16 * 2 * 64
    larger = replace(mixed, largest_batch=4.0)
    assert run_trial(larger, 0, text).tokens == (1 + 4) * 16 * 2 * 64
    assert run_trial(larger, 0, text).loss != run_trial(mixed, 0, text).loss, "fewer, larger steps"
    assert run_trial(replace(SMALL, speeds=(1.0, 0.25)), 0, text).tokens == (16 + 4) * 64


def test_a_liar_is_heard_only_as_far_as_the_rule_lets_it(text: str) -> None:
    five = replace(SMALL, islands=5, ticks=32)
    honest, tokens, equal = (
        run_trial(replace(five, lie=lie, has_strangers=strangers, weight_ratio=256.0), 0, text).loss
        for lie, strangers in (("", True), ("flip+claim", False), ("flip+claim", True))
    )
    assert equal < honest + 0.1 < tokens, "what it claims counts only by tokens"


def test_a_trial_may_end_before_its_last_entries_arrive(text: str) -> None:
    settled, cut_short = run_trial(SMALL, 0, text), run_trial(SMALL, 0, text, settles=False)
    assert cut_short.tokens == settled.tokens
    assert cut_short.bytes_sent_per_parameter < settled.bytes_sent_per_parameter
    assert settled.loss < cut_short.loss < 5.5


def test_accumulated_gradients_make_fewer_steps_on_as_many_tokens(text: str) -> None:
    each = replace(SMALL, system="data-parallel", ticks=32)
    several = replace(each, accumulate=8)
    often, seldom = run_trial(each, 0, text), run_trial(several, 0, text)
    assert often.tokens == seldom.tokens == 2 * 32 * 64
    assert seldom.bytes_sent_per_parameter == often.bytes_sent_per_parameter / 8
    assert seldom.loss > often.loss + 0.1, "four steps instead of 32"


def test_an_averaged_model_is_another_model_of_the_same_run(text: str) -> None:
    plain = replace(SMALL, system="data-parallel")
    assert run_trial(replace(plain, averaging=0.5), 0, text).loss != run_trial(plain, 0, text).loss


def test_a_constant_inner_rate_stays_what_it_is(text: str) -> None:
    cosine = run_trial(SMALL, 0, text)
    assert run_trial(replace(SMALL, inner_schedule="constant"), 0, text).loss != cosine.loss


def test_a_trial_of_the_test_judges_pieces_and_refuses_seeds_of_tuning(text: str) -> None:
    test = replace(SMALL, stage="test", judged_tokens=16 * 256)
    outcome = run_trial(test, SEEDS["test"].start, text)
    assert len(outcome.blocks) == BLOCKS
    assert len(set(outcome.blocks)) == BLOCKS, "each piece is other text"
    assert outcome.loss == pytest.approx(sum(outcome.blocks) / BLOCKS)
    assert run_trial(SMALL, 0, text).blocks == ()
    with pytest.raises(ConfigError, match="seed 1000 is not one of the stage 'test'; expected 2000 to 2999"):
        run_trial(test, 1000, text)


def test_four_bits_cost_less_than_float32(text: str) -> None:
    wide = replace(SMALL, contribution="float32", entry="float32")
    four_bits, float32 = run_trial(SMALL, 0, text), run_trial(wide, 0, text)
    assert four_bits.bytes_sent_per_parameter < 0.14 * float32.bytes_sent_per_parameter
    assert four_bits.loss == pytest.approx(float32.loss, rel=0.05)


@pytest.mark.parametrize(("mean", "length"), [("radial", 1.0), ("plain", math.sqrt(0.5))])
def test_the_mean_of_ours_is_the_one_that_the_setting_names(mean: Literal["plain", "radial"], length: float) -> None:
    setting = replace(
        SMALL, mean=mean, sync_every=1, fragments=1, delay=0, outer_rate=1.0, momentum=0.0,
        contribution="float32", entry="float32",
    )  # fmt: skip
    learners = ScriptedLearners(at_right_angles(2, 64), lengths=(64,))
    ours = make_algorithm(setting, learners, 0)  # type: ignore[arg-type]
    learners.play(ours.border, range(1, 2))
    assert lengths_of_blocks(ours.models()[0][0]) == pytest.approx([length])


def test_an_algorithm_that_nobody_wrote_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="unknown algorithm 'magic'"):
        run_trial(replace(SMALL, system="magic"), 0, text)
