"""Baselines against trajectories worked out by hand from their papers' rules."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scripted_learners import ScriptedLearners

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.outer_step import OuterRule
from research.baselines import (
    CentralDiloco,
    CentralRule,
    DataParallel,
    NoLoCo,
    SparseLoCo,
    as_e3m0,
    as_float32,
    as_int4,
    as_sparse_two_bits,
    draw_pairs,
)

HALF_MOMENTUM = OuterRule(learning_rate=1.0, momentum=0.5)


def rule(**changes: object) -> CentralRule:
    values: dict[str, object] = {
        "sync_every": 2, "delay": 0, "local_share": 0.0, "outer": HALF_MOMENTUM, "quantise": as_float32,
        "bytes_up": 4.0, "bytes_down": 4.0,
    }  # fmt: skip
    return CentralRule(**(values | changes))  # type: ignore[arg-type]


def test_textbook_diloco_takes_a_nesterov_step_along_the_mean_and_overwrites() -> None:
    learners = ScriptedLearners([-1.0, -3.0])
    diloco = CentralDiloco(learners, rule())
    learners.play(diloco.border, range(1, 3))
    # Pseudo-gradients 2 and 6, mean 4: m = 4, φ = 0 − (4 + ½ · 4).
    assert diloco.models()[0][0].tolist() == [-6.0, -6.0]
    assert learners.local.tolist() == [[-6.0, -6.0]] * 2
    learners.play(diloco.border, range(3, 5))
    # m = ½ · 4 + 4 = 6, φ = −6 − (4 + ½ · 6).
    assert diloco.models()[0][0].tolist() == [-13.0, -13.0]
    assert diloco.sent_bytes == 2 * 8 * 2


def test_textbook_diloco_may_have_an_outer_rate_that_falls_at_the_end() -> None:
    learners = ScriptedLearners([-1.0, -3.0])
    falling = OuterRule(learning_rate=1.0, momentum=0.0, final_share=0.5, planned_entries=1)
    diloco = CentralDiloco(learners, rule(outer=falling))
    learners.play(diloco.border, range(1, 5))
    assert diloco.models()[0][0].tolist() == [-6.0, -6.0]  # a step of 4, then half of one


def test_a_contribution_that_a_server_does_not_get_is_left_out_of_the_mean_and_overwritten() -> None:
    moves = [-1.0, -3.0, -5.0, -7.0]
    learners = ScriptedLearners(moves)
    diloco = CentralDiloco(learners, rule(lost_share=0.5, outer=OuterRule(learning_rate=1.0, momentum=0.0)), seed=3)
    learners.play(diloco.border, range(1, 3))
    lot = random.Random(3)
    arrived = [2 * move for move in moves if lot.random() >= 0.5]
    assert 0 < len(arrived) < 4
    assert diloco.models()[0][0][0] == pytest.approx(sum(arrived) / len(arrived))
    assert len(set(learners.local[:, 0].tolist())) == 1


def test_streaming_diloco_blends_what_comes_late_into_what_went_on() -> None:
    learners = ScriptedLearners([-1.0, -3.0])
    streaming = CentralDiloco(learners, rule(delay=1, local_share=0.5))
    learners.play(streaming.border, range(1, 4))
    # φ = −6 of tick 2 meets θ = −3 and −9 of tick 3, half and half.
    assert learners.local[:, 0].tolist() == [-4.5, -7.5]
    # Fragments take turns: of two, each is exchanged every other time.
    two = ScriptedLearners([-1.0, -3.0], lengths=(1, 1))
    turns = CentralDiloco(two, rule())
    two.play(turns.border, range(1, 2))
    assert [part_N.tolist() for part_N in turns.models()[0]] == [[0.0], [-3.0]]
    two.play(turns.border, range(2, 3))
    assert [part_N.tolist() for part_N in turns.models()[0]] == [[-6.0], [-3.0]]


def test_after_the_last_step_every_fragment_is_exchanged_once_more() -> None:
    learners = ScriptedLearners([-1.0, -1.0], lengths=(1, 1))
    plain = CentralDiloco(learners, rule(outer=OuterRule(learning_rate=1.0, momentum=0.0)))
    learners.play(plain.border, range(1, 3))
    assert [part_N.tolist() for part_N in plain.models()[0]] == [[-2.0], [-1.0]]
    plain.settle(2)
    assert [part_N.tolist() for part_N in plain.models()[0]] == [[-2.0], [-2.0]]


def test_decoupled_diloco_weighs_by_quantity_times_quality() -> None:
    learners = ScriptedLearners([-1.0, -3.0])
    decoupled = CentralDiloco(learners, rule(weights_by_tokens=True, sync_every=4))
    for tick in range(1, 5):
        learners.step(0)
        if tick == 4:
            learners.step(1)
        decoupled.border(tick)
    # Weights 40 · 40 / 4 = 400 and 10 · 10 / 1 = 100; pseudo-gradients 4 and 3.
    mean = (400 * 4 + 100 * 3) / 500
    assert decoupled.models()[0][0].tolist() == pytest.approx([-1.5 * mean] * 2)


def test_who_made_no_step_is_not_averaged() -> None:
    learners = ScriptedLearners([-1.0, -3.0])
    central = CentralDiloco(learners, rule())
    learners.step(0)
    central.border(2)
    assert central.models()[0][0].tolist() == [-1.5, -1.5]
    central.border(4)
    assert central.models()[0][0].tolist() == [-1.5, -1.5]


def test_noloco_follows_the_rule_of_its_paper() -> None:
    learners = ScriptedLearners([-1.0, -3.0], starts=[0.0, 2.0])
    noloco = NoLoCo(learners, sync_every=2, seed=0)
    learners.play(noloco.border, range(1, 3))
    # δ = 0.7 · (−2 − 6) / 2 − 0.7 · (φ − 1)
    assert [model[0][0] for model in noloco.models()] == pytest.approx([-2.1, -1.5])
    learners.play(noloco.border, range(3, 5))
    # δ = 0.5 δ + 0.7 · (−4) − 0.7 · (φ + 1.8)
    first, second = 0.5 * -2.1 - 2.8 - 0.7 * -0.3, 0.5 * -3.5 - 2.8 - 0.7 * 0.3
    assert [model[0][0] for model in noloco.models()] == pytest.approx([-2.1 + first, -1.5 + second])
    assert learners.local[:, 0].tolist() == pytest.approx([-2.1 + first, -1.5 + second])


def test_noloco_pulls_anchors_together_as_fast_as_gamma_says() -> None:
    learners = ScriptedLearners([-1.0, -3.0], starts=[0.0, 2.0])
    noloco = NoLoCo(learners, sync_every=2, seed=0, alpha=0.3, beta=1.0, gamma=0.5)
    learners.play(noloco.border, range(1, 3))
    # δ = (−2 − 6) / 2 − 0.5 · (φ − 1)
    assert [model[0][0] for model in noloco.models()] == pytest.approx([-3.5, -2.5])


def test_data_parallel_is_one_learner_and_pays_for_every_step() -> None:
    learners = ScriptedLearners([-1.0])
    parallel = DataParallel(learners, num_islands=4)
    learners.play(parallel.border, range(1, 4))
    assert parallel.models()[0][0].tolist() == [-3.0, -3.0]
    assert parallel.sent_bytes == pytest.approx(3 * 2 * 0.75 * 2.0 * 2)
    with pytest.raises(ConfigError, match="one learner"):
        DataParallel(ScriptedLearners([-1.0, -1.0]), num_islands=2)


def test_data_parallel_with_accumulated_gradients_pays_only_when_it_sends() -> None:
    learners = ScriptedLearners([-1.0])
    parallel = DataParallel(learners, num_islands=4, accumulate=2, bytes_each=0.5)
    for tick in range(1, 5):
        parallel.border(tick)
    assert parallel.sent_bytes == pytest.approx(2 * 2 * 0.75 * 0.5 * 2)


def test_averaged_parameters_are_a_running_mean_that_soon_forgets_the_first() -> None:
    learners = ScriptedLearners([-1.0])
    averaged = DataParallel(learners, num_islands=2, averaging=0.25)
    learners.play(averaged.border, range(1, 4))
    # Decays 2/11 at first, then a quarter; θ = −1, −2, −3.
    first = -9 / 11
    second = 0.25 * first - 0.75 * 2
    assert averaged.models()[0][0].tolist() == pytest.approx([0.25 * second - 0.75 * 3] * 2)


def test_sparseloco_sends_the_largest_of_what_has_gathered_and_keeps_the_rest() -> None:
    moves = np.zeros((2, 4096), np.float32)
    moves[:, :128], moves[:, 128:256] = -1.0, -0.4
    moves[1] *= 3
    learners = ScriptedLearners(moves, lengths=(4096,))
    sparse = SparseLoCo(learners, sync_every=1, outer_rate=0.5, decay=0.9)
    learners.play(sparse.border, range(1, 2))
    # The 128 largest are alike, so two bits lose nothing: 1 and 3, mean 2, half of it.
    anchor_N = sparse.models()[0][0]
    assert anchor_N[:128].tolist() == pytest.approx([-1.0] * 128)
    assert not anchor_N[128:].any(), "the rest waits in the buffer"
    assert np.array_equal(learners.local, np.stack([anchor_N, anchor_N]))
    for tick in range(2, 4):
        learners.play(sparse.border, range(tick, tick + 1))
        # The rest has grown to 0.4 · 1.9 = 0.76, then to 0.4 · 2.71 = 1.084, which is more than 1.
        assert bool(sparse.models()[0][0][128:256].any()) == (tick == 3)
    assert sparse.models()[0][0][128:256].tolist() == pytest.approx([-0.5 * 2 * 1.084] * 128)
    assert sparse.models()[0][0][:128].tolist() == pytest.approx([-2.0] * 128)
    assert sparse.sent_bytes == pytest.approx(3 * 4096 * 128 / 4096 * 14 / 8)


def test_a_cycle_divides_into_its_exchanges() -> None:
    with pytest.raises(ConfigError, match="3 steps do not divide into 2"):
        CentralDiloco(ScriptedLearners([-1.0], lengths=(1, 1)), rule(sync_every=3))


def test_pairs_hold_everybody_once_and_nobody_alone() -> None:
    rng = random.Random(1)
    for num_learners in range(2, 12):
        groups = draw_pairs(rng, num_learners)
        assert sorted(learner for group in groups for learner in group) == list(range(num_learners))
        assert min(map(len, groups)) >= 2


def test_e3m0_knows_seven_powers_of_two_and_zero() -> None:
    vector_N = np.array([8.0, -4.0, 3.2, 2.4, 1.0, -0.125, 0.07, 0.06, 0.0], np.float32)
    assert as_e3m0(vector_N).tolist() == [8.0, -4.0, 4.0, 2.0, 1.0, -0.125, 0.125, 0.0, 0.0]
    assert as_e3m0(np.zeros(200, np.float32)).tolist() == [0.0] * 200


def test_e3m0_takes_the_nearest_power() -> None:
    values_N = np.append(np.geomspace(0.002, 0.999, 126), [1.0, -1.0]).astype(np.float32)
    powers = np.array([0.0, *(2.0**-i for i in range(7))])
    nearest_N = [min(powers, key=lambda power: abs(power - abs(value))) * np.sign(value) for value in values_N]
    assert as_e3m0(values_N).tolist() == nearest_N


def test_four_bits_as_decoupled_diloco_sends_them_are_of_the_codec() -> None:
    vector_N = np.random.Generator(np.random.Philox(key=3)).standard_normal(200, dtype=np.float32)
    codec = codec_named("int4")
    assert as_int4(vector_N).tolist() == codec.decode(codec.encode(vector_N), 200).tolist()


def test_two_bits_are_the_means_of_four_bins_of_the_largest() -> None:
    vector_N = np.full(4096, 0.01, np.float32)
    vector_N[:128] = np.repeat([4.0, -4.0, 1.0, -1.0], 32)
    decoded_N = as_sparse_two_bits(vector_N)
    assert not decoded_N[128:].any()
    # The deviation is 2.93 and a bin 4.39 wide: ±4 lie nearly one width from the mean, ±1 in the middle.
    assert decoded_N[:128].tolist() == pytest.approx(np.repeat([4.0, -4.0, 0.0, 0.0], 32).tolist(), abs=1e-5)
    short_N = np.array([3.0, 0.0, -3.0], np.float32)
    assert as_sparse_two_bits(short_N).shape == (3,)
    assert as_sparse_two_bits(np.zeros(5000, np.float32)).tolist() == [0.0] * 5000
