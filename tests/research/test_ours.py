"""p2p_diloco on the bench: by hand where it equals the textbook, and by what it promises where it does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scripted_learners import ScriptedLearners, at_right_angles, lengths_of_blocks

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.span.reduce import Codecs
from research.ours import OurRule, OurSwarm, exchanged_bytes

FLOAT32, INT4 = codec_named("float32"), codec_named("int4")


def swarm(learners: ScriptedLearners, *, codec: str = "float32", **changes: object) -> OurSwarm:
    wire = codec_named(codec)
    values: dict[str, object] = {
        "sync_every": 2, "delay": 0, "outer": OuterRule(learning_rate=1.0, momentum=0.5),
        "codecs": Codecs(contribution=wire, row_mean=FLOAT32, entry=wire, rounds_stochastically=False),
        "radius_factor": 100.0,
    }  # fmt: skip
    return OurSwarm(learners, OurRule(**(values | changes)), seed=0)  # type: ignore[arg-type]


def anchor(ours: OurSwarm) -> list[float]:
    return [float(part_N[0]) for part_N in ours.models()[0]]


def test_without_delay_and_rounding_it_is_the_textbook() -> None:
    learners = ScriptedLearners([-1.0, -3.0])
    ours = swarm(learners)
    learners.play(ours.border, range(1, 3))
    assert anchor(ours) == [-6.0]
    assert learners.local[:, 0].tolist() == [-6.0, -6.0]
    learners.play(ours.border, range(3, 5))
    assert anchor(ours) == [-13.0]


def test_steps_made_while_an_entry_is_under_way_are_kept_and_sent_next_time() -> None:
    learners = ScriptedLearners([-1.0, -3.0])
    ours = swarm(learners, delay=1, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    learners.play(ours.border, range(1, 4))
    assert anchor(ours) == [-4.0]
    assert learners.local[:, 0].tolist() == [-5.0, -7.0]  # φ plus the one step since the snapshot
    learners.play(ours.border, range(4, 6))
    assert anchor(ours) == [-8.0]


def test_all_that_was_learnt_is_in_the_anchor_in_the_end() -> None:
    learners = ScriptedLearners([-1 / 64, -3 / 64], lengths=(2, 2))
    ours = swarm(learners, sync_every=4, delay=1, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    learners.play(ours.border, range(1, 13))
    ours.settle(12)
    assert anchor(ours) == [-24 / 64, -24 / 64]
    assert len(ours.entries) == 7  # the round at the very end of the settling has nothing new


def test_an_island_that_is_far_too_long_keeps_four_limits_and_the_rest_is_counted() -> None:
    learners = ScriptedLearners([-1.0, -1.0, -200.0])
    ours = swarm(learners, radius_factor=4.0, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    learners.play(ours.border, range(1, 101))
    limit = 4.0 * ours.entries[-1].absorbed().radius
    rest_N = np.asarray(ours.models()[0][0]) - learners.local[2]
    assert np.linalg.norm(rest_N) == pytest.approx(4.0 * limit, rel=1e-3)
    slow, fast = ours.lengths[0], ours.lengths[2]
    assert slow.learnt == slow.sent > slow.given_up == 0.0
    assert fast.sent < 0.1 * fast.learnt < fast.given_up
    assert ours.sent_shares() == (1.0, 1.0, pytest.approx(fast.sent / fast.learnt))
    assert ours.sent_shares()[2] < 1.0


def test_a_contribution_that_is_lost_is_not_counted_and_not_sent_again() -> None:
    learners = ScriptedLearners([-1.0] * 8)
    ours = swarm(learners, lost_share=0.4, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    learners.play(ours.border, range(1, 41))
    included = [sum(bin(byte).count("1") for byte in entry.included) for entry in ours.entries]
    assert len(ours.entries) == 20
    assert {entry.present for entry in ours.entries} == {b"\xff"}
    assert 1 <= min(included) <= 4, "no majority is in the mean, and none is needed"
    # What is lost is made good by the others, who learnt as much.
    assert anchor(ours)[0] == pytest.approx(-40.0)
    assert np.ptp(learners.local[:, 0]) == 0.0


def test_fewer_tokens_weigh_less_and_four_bits_cost_an_eighth() -> None:
    learners = ScriptedLearners([-1.0, -1.0], lengths=(256,))
    ours = swarm(learners, codec="int4", sync_every=4, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    for tick in range(1, 5):
        learners.step(0)
        if tick == 4:
            learners.step(1)
        ours.border(tick)
    entry = ours.entries[0]
    assert entry.weights == (40.0, 10.0)
    assert anchor(ours)[0] == pytest.approx(-(400 * 4 + 100 * 1) / 500, rel=0.1)
    assert ours.sent_bytes == pytest.approx(2 * 0.5 * INT4.encoded_bytes(256))
    alike = ScriptedLearners([-1.0, -1.0])
    even = swarm(alike, weights_by_tokens=False)
    alike.play(even.border, range(1, 3))
    assert even.entries[0].weights == (1.0, 1.0)


def test_without_rounding_two_rows_have_the_mean_of_one() -> None:
    moves = [-1.0, -3.0, -5.0, -7.0, -9.0]
    one_row, two_rows = ScriptedLearners(moves), ScriptedLearners(moves)
    whole, grid = swarm(one_row), swarm(two_rows, rows=2)
    for learners, ours in ((one_row, whole), (two_rows, grid)):
        learners.play(ours.border, range(1, 7))
    assert anchor(grid) == pytest.approx(anchor(whole))
    assert [sum(entry.weights) for entry in grid.entries] == [sum(entry.weights) for entry in whole.entries]


def test_means_of_rows_are_rounded_once_more() -> None:
    moves = [-0.1, -0.31, -0.57, -0.73]
    learners = ScriptedLearners(moves, lengths=(64,))
    codecs = Codecs(contribution=FLOAT32, row_mean=codec_named("int8"), entry=FLOAT32, rounds_stochastically=False)
    ours = swarm(learners, rows=2, codecs=codecs, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    learners.play(ours.border, range(1, 3))
    exact = 2 * sum(moves) / 4
    assert anchor(ours)[0] != exact
    assert anchor(ours)[0] == pytest.approx(exact, rel=0.01)


def test_a_row_whose_contributions_are_all_lost_is_left_out() -> None:
    learners = ScriptedLearners([-1.0] * 4)
    ours = swarm(learners, rows=4, lost_share=0.5, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    learners.play(ours.border, range(1, 41))
    included = [len(entry.weights) for entry in ours.entries]
    assert min(included) < 4
    assert anchor(ours)[0] < 0.0


def test_bytes_of_rows_are_counted_by_hand() -> None:
    # 2 rows of 2: half of a contribution to the other reducer, half of the spans' means to the owner of half of those,
    # half of an entry to the row, and half of that half to the other row.
    assert exchanged_bytes(4, 2, 100.0, 200.0, 100.0) == 50.0 + 50.0 + 50.0 + 25.0
    assert exchanged_bytes(4, 1, 100.0, 200.0, 100.0) == 150.0


def test_more_rows_than_islands_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 rows do not fit 2 islands"):
        swarm(ScriptedLearners([-1.0, -1.0]), rows=3)


@pytest.mark.parametrize(("is_radial", "kept"), [(True, 1.0), (False, math.sqrt(0.5))], ids=["radial", "plain"])
def test_moves_at_right_angles_keep_their_length_in_a_radial_mean_but_not_in_embeddings(
    is_radial: bool, kept: float
) -> None:
    # Each fragment's round has the steps until then: one tick of the second fragment, two of the first.
    learners = ScriptedLearners(at_right_angles(2, 256), lengths=(64, 192), embeddings=[(128, 192)])
    ours = swarm(learners, is_radial=is_radial, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    learners.play(ours.border, range(1, 3))
    first_N, second_N = ours.models()[0]
    assert lengths_of_blocks(first_N) == pytest.approx([2.0 * kept])
    assert lengths_of_blocks(second_N) == pytest.approx([kept, math.sqrt(0.5), kept])


def test_what_does_not_fit_a_cycle_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide into 2 rounds"):
        swarm(ScriptedLearners([-1.0], lengths=(1, 1)), sync_every=3)
    with pytest.raises(ConfigError, match="does not fit into a cycle"):
        swarm(ScriptedLearners([-1.0]), delay=2)


def test_who_was_away_made_no_steps_and_returns_with_what_is_agreed() -> None:
    learners = ScriptedLearners([-1.0] * 8)
    ours = swarm(learners, away_share=0.5, outer=OuterRule(learning_rate=1.0, momentum=0.0))
    returned = 0
    before: set[int] = set()
    for tick in range(1, 41):
        for learner in range(8):
            if not ours.is_away(learner):
                learners.step(learner)
        ours.border(tick)
        away = {learner for learner in range(8) if ours.is_away(learner)}
        for learner in before - away:
            assert learners.local[learner, 0] == anchor(ours)[0]
            returned += 1
        before = away
    assert returned > 20
    assert {bin(byte).count("1") for entry in ours.entries for byte in entry.included} >= {3, 4, 5}
    ours.settle(40)
    assert not any(ours.is_away(learner) for learner in range(8))


def test_the_outer_rate_may_fall_at_the_end() -> None:
    learners = ScriptedLearners([-1.0, -3.0])
    falling = OuterRule(learning_rate=1.0, momentum=0.0, final_share=0.5, planned_entries=1)
    ours = swarm(learners, outer=falling)
    learners.play(ours.border, range(1, 3))
    assert anchor(ours) == [-4.0]
    learners.play(ours.border, range(3, 5))
    assert anchor(ours) == [-6.0]
