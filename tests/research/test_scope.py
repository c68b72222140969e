"""Rows that most experiments have: the same batch for all, each with its own figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.signing import SigningKey
from p2p_diloco.training.inner_loop import OptimizerName
from research.scope import (
    OUTER,
    OUTER_OFTEN,
    OUTER_SHORTEST,
    RATES,
    Scope,
    baselines,
    often,
    others_often,
)
from research.setting import OURS, SYSTEMS


@pytest.mark.parametrize("islands", [4, 8, 16])
def test_more_islands_do_not_mean_more_tokens(islands: int) -> None:
    scope = Scope(islands=islands)
    for setting in (scope.ours(), *baselines(scope)):
        assert setting.islands * setting.batch == scope.windows


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_has_its_own_outer_figures_and_all_the_same_inner_ones(optimizer: OptimizerName) -> None:
    scope = Scope(size="micro", optimizer=optimizer)
    ours = scope.ours()
    for setting in (ours, *baselines(scope)):
        assert setting.system in SYSTEMS
        assert setting.learning_rate == scope.rate_of(optimizer)
        assert (setting.outer_rate, setting.momentum) == OUTER[optimizer].get(setting.system, (1.0, 0.0))
    assert ours.name == OURS
    only_evidence = {"textbook-diloco-int4", "sparseloco", "data-parallel-int4", "one-island"}
    assert {setting.name for setting in baselines(scope)} == SYSTEMS.keys() - {OURS} - only_evidence


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ours_is_what_a_new_manifest_says(optimizer: OptimizerName) -> None:
    organiser = SigningKey(bytes(32)).peer
    setting, manifest = Scope(optimizer=optimizer).ours(), draft_manifest(organiser=organiser, now_seconds=0.0).outer
    assert (setting.outer_rate, setting.momentum) == (manifest.learning_rate, manifest.momentum)
    assert (setting.mean, setting.merge) == (manifest.mean, manifest.merge)
    assert all(row.mean == "plain" for row in baselines(Scope(optimizer=optimizer)))


def test_in_shorter_cycles_ours_has_the_rounds_that_plan_gives_and_else_the_same_figures() -> None:
    scope = Scope(size="micro")
    setting, shortest = often(scope)
    assert (setting.name, setting.sync_every) == ("p2p-diloco-every-8", 8)
    assert (setting.fragments, setting.delay) == (2, 1)
    assert (shortest.name, shortest.sync_every) == ("p2p-diloco-every-4", 4)
    assert (shortest.fragments, shortest.delay) == (1, 1)
    pair = OUTER_SHORTEST["muon"][OURS]
    assert scope.ours(name=setting.name, sync_every=8, fragments=2, delay=1) == setting
    alike = scope.ours(name=shortest.name, sync_every=4, fragments=1, delay=1)
    assert replace(alike, outer_rate=pair[0], momentum=pair[1]) == shortest
    (longer,) = often(Scope(size="micro", sync_every=128))
    assert (longer.sync_every, longer.fragments, longer.delay) == (32, 4, 2)
    assert often(Scope(sync_every=16)) == often(Scope(sync_every=40)) == ()


def test_in_shorter_cycles_others_are_what_they_were() -> None:
    scope = Scope(size="micro")
    others = {row.system: row for row in baselines(scope)}
    tuned = {8: OUTER_OFTEN["muon"], 4: {who: OUTER_SHORTEST["muon"][who] for who in ("decoupled-diloco-int4",)}}
    short = others_often(scope)
    assert [(row.system, row.sync_every) for row in short] == [(who, steps) for steps in tuned for who in tuned[steps]]
    for row in short:
        steps, pair, long = row.sync_every, tuned[row.sync_every][row.system], others[row.system]
        name, delay = f"{row.system}-every-{steps}", 1 if long.delay else 0
        assert replace(long, name=name, sync_every=steps, delay=delay, outer_rate=pair[0], momentum=pair[1]) == row
    assert {row.sync_every for row in others_often(Scope(sync_every=128))} == {32}
    assert others_often(Scope(sync_every=16)) == ()


def test_muon_has_a_rate_of_its_own() -> None:
    setting = Scope(optimizer="muon").ours(momentum=0.9)
    assert setting.inner == "muon"
    assert setting.learning_rate == RATES["muon"]["tiny"] != RATES["adamw"]["tiny"]
    assert setting.momentum == 0.9


def test_a_rate_that_is_given_is_that_of_all_rows() -> None:
    scope = Scope(optimizer="muon", inner_rate=1e-3)
    assert {setting.learning_rate for setting in (scope.ours(), *baselines(scope))} == {1e-3}
    assert scope.rate_of("adamw") == 1e-3
