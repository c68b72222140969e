"""Rounds of a new run are chosen from an inner step, the line and the islands."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.planning.rounds import ChosenRounds, Conditions, choose_rounds, format_step, plan_end
from p2p_diloco.signing import SigningKey

ORGANISER = SigningKey(bytes(32)).peer
TRIALS = "(short trials; decision 0033)"


def chosen(
    step_seconds: float, uplink_bits: float = 20e6, islands: int = 4, values: dict[str, Any] | None = None
) -> ChosenRounds:
    manifest = draft_manifest(organiser=ORGANISER, now_seconds=1e6, values=values)
    conditions = Conditions(islands=islands, uplink_bits=uplink_bits, step_seconds=step_seconds)
    rounds = choose_rounds(manifest, (values or {}).keys(), conditions)
    draft_manifest(organiser=ORGANISER, now_seconds=1e6, values={**(values or {}), **rounds.values})  # fits
    return rounds


@pytest.mark.parametrize(
    ("size", "step_seconds", "uplink_bits", "islands", "steps", "fragments", "round_seconds"),
    [
        ("tiny", 0.045, 20e6, 2, 45, 1, 2.025),
        ("tiny", 0.045, 20e6, 4, 45, 1, 2.025),
        ("tiny", 0.045, 2e6, 4, 144, 3, 2.16),
        ("tiny", 0.045, 2e6, 16, 180, 4, 2.025),
        ("tiny", 0.045, 20e6, 64, 45, 1, 2.025),
        ("tiny", 0.5, 20e6, 4, 8, 2, 2.0),
        ("small", 1.1, 20e6, 4, 8, 2, 4.4),
        ("small", 0.045, 20e6, 4, 143, 3, 2.145),
        ("small", 0.045, 1e9, 4, 45, 1, 2.025),
        ("base", 30.0, 20e6, 4, 8, 2, 120.0),
        ("base", 0.5, 20e6, 4, 160, 4, 20.0),
        ("base", 0.5, 1e9, 16, 26, 4, 3.25),
    ],
)
def test_a_cycle_has_eight_steps_where_line_cores_and_clock_allow(
    size: str,
    step_seconds: float,
    uplink_bits: float,
    islands: int,
    steps: int,
    fragments: int,
    round_seconds: float,
) -> None:
    values = dict(chosen(step_seconds, uplink_bits, islands, {"model.size": size}).values)
    values.pop("rounds.retained_cycles", None)
    assert values == {
        "rounds.round_seconds": round_seconds,
        "rounds.fragments": fragments,
        "rounds.planned_steps": steps,
    }


@pytest.mark.parametrize(
    ("step_seconds", "uplink_bits", "values", "notes"),
    [
        (0.5, 20e6, {}, ("a cycle is 8 steps of 500 ms, 2 rounds of 2 s; 1.61 Mbit/s each way",)),
        (
            0.045,
            20e6,
            {},
            (
                "a cycle is 45 steps of 45 ms, 1 round of 2.02 s; 3.19 Mbit/s each way",
                "set by the shortest safe round: rounds under 2 s lose contributions over the internet; cycles of 45 "
                f"steps end with a loss about 6 % above that of 8 {TRIALS}",
            ),
        ),
        (
            0.045,
            1e6,
            {},
            (
                "a cycle is 287 steps of 45 ms, 4 rounds of 3.23 s; 500 kbit/s each way",
                "set by the uplink: an exchange takes 6.5 s at 1 Mbit/s, and should take at most 50 % of a cycle; "
                f"cycles of 287 steps end with a loss more than 18 % above that of 8 {TRIALS}",
            ),
        ),
        (
            0.5,
            20e6,
            {"rounds.fragments": 8},
            (
                "a cycle is 32 steps of 500 ms, 8 rounds of 2 s; 403 kbit/s each way",
                "set by its 8 fragments: each round has 4 steps; cycles of 32 steps end with a loss about 4.2 % "
                f"above that of 8 {TRIALS}",
            ),
        ),
        (
            0.045,
            20e6,
            {"rounds.round_seconds": 5.0},
            (
                "a cycle is 444 steps of 45 ms, 4 rounds of 5 s; 323 kbit/s each way",
                "without rounds.round_seconds a cycle would be 45 steps; cycles of 444 steps end with a loss more "
                f"than 18 % above that of 8 {TRIALS}",
            ),
        ),
        (
            0.045,
            2e6,
            {"rounds.round_seconds": 0.5, "rounds.fragments": 2},
            (
                "a cycle is 22 steps of 45 ms, 2 rounds of 0.5 s; 6.45 Mbit/s each way",
                "rounds of 0.5 s are short: rounds under 2 s lose contributions over the internet",
                "the uplink is too slow for that: an exchange takes 3.2 s at 2 Mbit/s, more than 50 % of the cycle, so "
                "contributions arrive late; rounds of 3.23 s are long enough",
            ),
        ),
    ],
)
def test_notes_name_what_sets_the_cycle_and_its_cost(
    step_seconds: float, uplink_bits: float, values: dict[str, Any], notes: tuple[str, ...]
) -> None:
    assert chosen(step_seconds, uplink_bits, values=values).notes == notes


def test_values_set_by_the_organiser_are_kept() -> None:
    assert chosen(0.045, values={"rounds.round_seconds": 5.0}).values == {"rounds.planned_steps": 444}
    assert chosen(0.045, values={"rounds.planned_steps": 10, "rounds.retained_cycles": 16}).values == {
        "rounds.round_seconds": 2.025,
        "rounds.fragments": 1,
    }
    assert chosen(0.5, values={"rounds.fragments": 1}).values == {
        "rounds.round_seconds": 4.0,
        "rounds.planned_steps": 8,
        "rounds.retained_cycles": 80,
    }


@pytest.mark.parametrize(("step_seconds", "retained"), [(0.045, 159), (0.5, 80), (1.1, 37), (30.0, None)])
def test_short_cycles_make_no_more_checkpoints_than_long_ones(step_seconds: float, retained: int | None) -> None:
    values = chosen(step_seconds).values
    assert values.get("rounds.retained_cycles") == retained
    seconds = values["rounds.round_seconds"] * values["rounds.fragments"] * (retained or 16)
    assert seconds >= 320.0


def test_a_custom_model_has_the_size_of_its_tensors() -> None:
    tensors = [["weight", [5000, 2000], "radial"], ["bias", [81_600], "plain"]]
    own = chosen(0.045, values={"model.tensors": tensors})
    assert (
        own.values["rounds.planned_steps"]
        == chosen(0.045, values={"model.size": "small"}).values["rounds.planned_steps"]
    )


def test_a_model_of_few_tensors_has_no_more_fragments_than_tensors() -> None:
    tensors = [["weight", [3162, 3162], "radial"]]
    values = chosen(0.045, values={"model.tensors": tensors}).values
    assert (values["rounds.fragments"], values["rounds.planned_steps"]) == (1, 142)


def test_a_planned_end_sets_the_cycles_and_a_falling_learning_rate() -> None:
    manifest = draft_manifest(
        organiser=ORGANISER, now_seconds=1e6, values={"rounds.round_seconds": 2.0, "rounds.fragments": 2}
    )
    end = plan_end(manifest, {}, 12.0)
    assert end.values == {"rounds.planned_cycles": 10_800, "inner.schedule": "cosine", "outer.final_share": 0.25}
    assert end.notes == (
        "planned for 12 h, 10800 cycles: the inner learning rate falls until then, and the outer one over the last "
        "quarter; the run continues afterwards",
    )
    constant = plan_end(manifest, {"inner.schedule": "constant"}, 12.0)
    assert constant.values == {"rounds.planned_cycles": 10_800}
    assert constant.notes == (
        "planned for 12 h, 10800 cycles: learning rates stay constant; the run continues afterwards",
    )
    for hours in (0.0, -1.0, 1e6, float("nan")):
        with pytest.raises(ConfigError, match=r"--hours is .*; expected 0.00111 to 1165, from one cycle of 4 s to"):
            plan_end(manifest, {}, hours)


@pytest.mark.parametrize(("seconds", "text"), [(0.045, "45 ms"), (1.25, "1.25 s"), (9000.0, "2.5 h")])
def test_steps_have_a_unit(seconds: float, text: str) -> None:
    assert format_step(seconds) == text


def test_senseless_conditions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"step_seconds is 0; expected more than 0, such as 0\.045"):
        chosen(0.0)
