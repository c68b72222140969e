"""Rows of evidence: the same number of tries for all, and settings that fit."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from p2p_diloco.config.rounds import FINAL_SHARE
from p2p_diloco.errors import ConfigError
from research.rows import (
    CIRCUMSTANCES,
    CYCLE,
    MIXED,
    ROWS,
    TRIES,
    as_tuned,
    every,
    first_tries,
    further_tries,
    primary_rows,
    row_named,
    setting_of,
    under,
)
from research.scope import Scope
from research.setting import SYSTEMS, Setting

SCOPE = Scope(ticks=64)
NAMES = [name if row.exchange == "steps" else every(name, CYCLE) for name, row in ROWS.items()]


@pytest.mark.parametrize("name", NAMES)
def test_every_row_has_eight_different_tries_with_its_default_first(name: str) -> None:
    first = first_tries(name, SCOPE)
    tries = [*first, *further_tries(name, first[1])]
    assert len(tries) == TRIES
    assert all(one not in tries[:number] for number, one in enumerate(tries))
    assert first[0]["learning_rate"] == SCOPE.rate_of("muon")
    assert {one["learning_rate"] for one in tries[len(first) :]} <= {first[1]["learning_rate"]}
    assert setting_of(name, SCOPE) == setting_of(name, SCOPE, first[0])


def test_all_systems_with_an_outer_nesterov_step_are_tried_with_the_same_pairs() -> None:
    pairs = {
        name: frozenset((one["outer_rate"], one["momentum"]) for one in ROWS[name].values)
        for name in ("p2p-diloco", "textbook-diloco", "textbook-diloco-int4", "decoupled-diloco", "one-island")
    }
    assert len(set(pairs.values())) == 1


MIXED_SCOPE = Scope(ticks=320, islands=5, windows=40, speeds=(1.0, 1.0, 1.0, 1.0, 16.0))


@pytest.mark.parametrize("circumstance", MIXED)
def test_mixed_islands_train_on_as_many_tokens_as_without(circumstance: str) -> None:
    setting = setting_of(f"p2p-diloco-every-8/{circumstance}", MIXED_SCOPE)
    assert setting.speeds == MIXED_SCOPE.speeds
    assert setting.ticks * sum(setting.speeds) == setting_of("p2p-diloco-every-8", MIXED_SCOPE).ticks * 5


def test_the_fastest_island_alone_takes_as_long_as_the_mixed_run() -> None:
    alone, mixed = (setting_of(name, MIXED_SCOPE) for name in ("alone/mixed", "p2p-diloco-every-8/mixed"))
    assert (alone.islands, alone.speeds, alone.batch) == (1, (16.0,), mixed.batch)
    assert alone.ticks == mixed.ticks


def test_mixed_islands_need_their_speeds() -> None:
    with pytest.raises(ConfigError, match="needs --speeds, a number for each island, such as 1,1,1,1,16"):
        setting_of("p2p-diloco-every-8/mixed", SCOPE)


def test_noloco_is_tried_within_its_paper_s_condition() -> None:
    for one in ROWS["noloco"].values:
        assert one["momentum"] < one["gamma"] < math.sqrt(2 + one["momentum"] ** 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("islands", [4, 16])
def test_settings_fit_their_system(name: str, islands: int) -> None:
    setting = setting_of(name, Scope(islands=islands, ticks=64))
    assert setting.system in SYSTEMS
    assert (setting.name, setting.stage, islands * setting.batch) == (name, "test", 32)
    assert setting.islands == (1 if name == "alone" else islands)
    assert setting.sync_every % setting.fragments == 0
    assert 0 <= setting.delay < setting.sync_every
    assert setting.judged_tokens == 131_072


def test_ours_has_the_rounds_of_plan_and_others_their_own() -> None:
    def shape(name: str) -> tuple[int, int, int]:
        setting: Setting = setting_of(name, SCOPE)
        return setting.sync_every, setting.fragments, setting.delay

    assert [shape(every("p2p-diloco", steps)) for steps in (4, 8, 32)] == [(4, 1, 1), (8, 2, 1), (32, 4, 2)]
    assert [shape(every("streaming-diloco", steps)) for steps in (4, 8, 32)] == [(4, 4, 1), (8, 4, 1), (32, 4, 2)]
    assert shape("textbook-diloco-every-8") == (8, 1, 0)
    assert setting_of("decoupled-diloco-every-8", SCOPE).is_radial
    assert setting_of("p2p-diloco-every-8", SCOPE).mean == "radial"
    assert setting_of("p2p-diloco-float32-every-8", SCOPE).entry == "float32"


def test_the_outer_rate_of_our_rows_falls_in_a_run_with_an_end() -> None:
    names = ("p2p-diloco", "p2p-diloco-float32", "p2p-diloco-steady", "textbook-diloco-falling", "textbook-diloco")
    shares = [setting_of(every(name, CYCLE), SCOPE).outer_final_share for name in names]
    assert shares == [FINAL_SHARE, FINAL_SHARE, 1.0, FINAL_SHARE, 1.0]
    endless = replace(SCOPE, inner_schedule="constant")
    assert {setting_of(every(name, CYCLE), endless).outer_final_share for name in names} == {1.0}


def test_the_primary_comparison_holds_all_rivals_in_the_same_cycle() -> None:
    first, *others = primary_rows()
    assert first == "p2p-diloco-every-8"
    assert others == [
        "textbook-diloco-every-8", "textbook-diloco-int4-every-8", "streaming-diloco-every-8",
        "decoupled-diloco-every-8", "decoupled-diloco-int4-every-8", "sparseloco-every-8", "noloco-every-8",
        "data-parallel",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gossip-every-8", "unknown row 'gossip-every-8'; expected one of p2p-diloco"),
        ("data-parallel-every-8", "row 'data-parallel-every-8' has no cycle; write data-parallel"),
        ("sparseloco", "row 'sparseloco' needs a cycle that 1 divides; write for example sparseloco-every-8"),
        ("sparseloco-every-0", "needs a cycle that 1 divides"),
        ("streaming-diloco-every-6", "needs a cycle that 4 divides"),
        ("p2p-diloco-every-eight", "needs a cycle"),
    ],
)
def test_rows_that_make_no_sense_are_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        row_named(name)


@pytest.mark.parametrize("circumstance", sorted(CIRCUMSTANCES.keys() - {"half-slow-at-2"}))
def test_what_happens_to_a_row_changes_one_thing_and_nothing_that_is_tuned(circumstance: str) -> None:
    (name,) = under(circumstance, "p2p-diloco-every-8")
    assert as_tuned(name) == "p2p-diloco-every-8"
    beside = f"{as_tuned(name)}/strangers" if circumstance.startswith("strangers-") else as_tuned(name)
    changed, plain = asdict(setting_of(name, SCOPE)), asdict(setting_of(beside, SCOPE))
    different = {field for field in plain if changed[field] != plain[field]} - {"name"}
    assert len(different) == 1
    assert not different & {"learning_rate", "outer_rate", "momentum"}
    assert changed["name"] == name


def test_half_slow_at_2_differs_from_half_slow_by_the_former_norm_limit() -> None:
    now, former = (asdict(setting_of(f"p2p-diloco-every-8/{name}", SCOPE)) for name in ("half-slow", "half-slow-at-2"))
    different = {field: (now[field], former[field]) for field in now if now[field] != former[field]}
    assert different.pop("name") == ("p2p-diloco-every-8/half-slow", "p2p-diloco-every-8/half-slow-at-2")
    assert different == {"norm_ratio": (4.0, 2.0)}


def test_an_unknown_circumstance_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown circumstance 'rain'; expected one of quarter-lost"):
        row_named("p2p-diloco-every-8/rain")
