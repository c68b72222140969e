"""Rounds of a new run are chosen from an inner step, the line and the islands."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.config.rounds import ChosenRounds, Conditions, choose_rounds, format_step, plan_end, read_conditions
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.signing import SigningKey

ORGANISER = SigningKey(bytes(32)).peer
TRIALS = "(short trials)"


def chosen(
    step_seconds: float,
    uplink_bits: float = 20e6,
    islands: int = 4,
    values: dict[str, Any] | None = None,
    **others: Any,
) -> ChosenRounds:
    manifest = draft_manifest(organiser=ORGANISER, now_seconds=1e6, values=values)
    conditions = Conditions(islands=islands, uplink_bits=uplink_bits, step_seconds=step_seconds, **others)
    rounds = choose_rounds(manifest, (values or {}).keys(), conditions)
    draft_manifest(organiser=ORGANISER, now_seconds=1e6, values={**(values or {}), **rounds.values})  # fits
    return rounds


@pytest.mark.parametrize(
    ("size", "step_seconds", "uplink_bits", "islands", "steps", "fragments", "round_seconds"),
    [
        ("tiny", 0.045, 20e6, 2, 89, 1, 4.005),
        ("tiny", 0.045, 20e6, 4, 89, 1, 4.005),
        ("tiny", 0.045, 2e6, 4, 245, 1, 11.025),
        ("tiny", 0.045, 2e6, 16, 245, 1, 11.025),
        ("tiny", 0.045, 20e6, 64, 89, 1, 4.005),
        ("tiny", 0.5, 20e6, 4, 8, 1, 4.0),
        ("small", 1.1, 20e6, 4, 8, 1, 8.8),
        ("small", 0.045, 20e6, 4, 143, 1, 6.435),
        ("small", 0.045, 1e9, 4, 89, 1, 4.005),
        ("base", 30.0, 20e6, 4, 8, 2, 120.0),
        ("base", 0.5, 20e6, 4, 160, 4, 20.0),
        ("base", 0.5, 1e9, 16, 26, 3, 4.334),
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
        (0.5, 20e6, {}, ("a cycle is 8 steps of 500 ms, 1 round of 4 s; 1.69 Mbit/s each way",)),
        (
            0.045,
            20e6,
            {},
            (
                "a cycle is 89 steps of 45 ms, 1 round of 4 s; 1.68 Mbit/s each way",
                "set by the shortest round: over the internet rounds under 4 s leave far machines out; "
                f"cycles of 89 steps end with a loss about 10 % above that of 8 {TRIALS}",
            ),
        ),
        (
            0.045,
            1e6,
            {},
            (
                "a cycle is 340 steps of 45 ms, 1 round of 15.3 s; 441 kbit/s each way",
                "set by the shortest round: half of 15.3 s holds a step, a contribution, 0.8 s on the way and 2.5 s "
                "for packets that uplinks under 10 Mbit/s may lose; cycles of 340 "
                f"steps end with a loss more than 18 % above that of 8 {TRIALS}",
            ),
        ),
        (
            0.5,
            20e6,
            {"rounds.fragments": 8},
            (
                "a cycle is 64 steps of 500 ms, 8 rounds of 4 s; 211 kbit/s each way",
                "set by the shortest round: over the internet rounds under 4 s leave far machines out; "
                f"cycles of 64 steps end with a loss about 7.9 % above that of 8 {TRIALS}",
            ),
        ),
        (
            0.045,
            20e6,
            {"rounds.round_seconds": 5.0},
            (
                "a cycle is 444 steps of 45 ms, 4 rounds of 5 s; 337 kbit/s each way",
                "without rounds.round_seconds a cycle would be 89 steps; cycles of 444 steps end with a loss more "
                f"than 18 % above that of 8 {TRIALS}",
            ),
        ),
        (
            0.045,
            2e6,
            {"rounds.round_seconds": 0.5, "rounds.fragments": 2},
            (
                "a cycle is 22 steps of 45 ms, 2 rounds of 0.5 s; 6.74 Mbit/s each way",
                "rounds of 0.5 s are short: half of 8.84 s holds a step, a contribution, 0.8 s on the way and 2.5 s "
                "for packets that uplinks under 10 Mbit/s may lose",
                "the uplink is too slow for that: an exchange takes 3.2 s at 2 Mbit/s, more than 50 % of the cycle, so "
                "contributions arrive late; rounds of 8.84 s are long enough",
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
        "rounds.round_seconds": 4.005,
        "rounds.fragments": 1,
    }
    assert chosen(0.5, values={"rounds.fragments": 1}).values == {
        "rounds.round_seconds": 4.0,
        "rounds.planned_steps": 8,
        "rounds.retained_cycles": 80,
    }


def test_limited_traffic_is_kept_and_its_cost_is_told() -> None:
    limited = chosen(0.045, traffic_bytes=20e9)
    assert limited.notes == (
        "a cycle is 203 steps of 45 ms, 2 rounds of 4.57 s; 738 kbit/s each way",
        "set by 20.0 GB a day, sent and received: 2.3 times the best cycle of 89 steps, which costs about 5.8 % of the "
        f"loss; cycles of 203 steps end with a loss about 16 % above that of 8 {TRIALS}",
    )
    with pytest.raises(
        ConfigError, match=r"^10\.0 GB a day does not fit: 12\.0 GB a day, sent and received, with cycles"
    ):
        chosen(0.045, traffic_bytes=10e9)
    with pytest.raises(
        ConfigError, match=r"^20\.0 GB a day does not fit: 37\.0 GB .* given rounds\.round_seconds; leave"
    ):
        chosen(0.045, values={"rounds.round_seconds": 5.0, "rounds.fragments": 1}, traffic_bytes=20e9)


def test_on_one_network_no_way_is_long() -> None:
    assert (
        chosen(0.045, 2e6, is_lan=True).values["rounds.round_seconds"]
        < chosen(0.045, 2e6).values["rounds.round_seconds"]
    )
    assert chosen(0.045, 1e8, is_lan=True).values["rounds.round_seconds"] == 2.025


def test_conditions_are_read_as_an_organiser_writes_them() -> None:
    given = {"islands": None, "uplink": None, "step_seconds": 0.1, "lan": False, "traffic": None}
    assert read_conditions(**given) == Conditions(islands=None, uplink_bits=20e6, step_seconds=0.1)
    assert read_conditions(**(given | {"lan": True})).uplink_bits == 100e6
    assert read_conditions(**(given | {"traffic": "300GB/month"})).traffic_bytes == 10e9
    for wrong in ("10GB", "10/day", "ten GB/day", "10GB/year", "-1GB/day"):
        with pytest.raises(
            ConfigError, match=r"^--traffic is '.*'; expected an amount per day or month, such as 10GB/day"
        ):
            read_conditions(**(given | {"traffic": wrong}), flag="--")


@pytest.mark.parametrize(("step_seconds", "retained"), [(0.045, 80), (0.5, 80), (1.1, 37), (30.0, None)])
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
