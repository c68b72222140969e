"""Experiments: their rows have names of their own, and parity holds what it must hold."""

from __future__ import annotations

import pytest

from p2p_diloco.errors import ConfigError
from research.experiments import EXPERIMENTS, experiment_named
from research.scope import Scope
from research.setting import SYSTEMS


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("sync_every", [32, 8, 40])
def test_rows_have_names_of_their_own_and_figures_that_fit(name: str, sync_every: int) -> None:
    experiment = experiment_named(name, Scope(sync_every=sync_every))
    names = [setting.name for setting in experiment.settings]
    assert len(set(names)) == len(names) > 1
    assert experiment.question.endswith("?")
    for setting in experiment.settings:
        assert setting.system in SYSTEMS
        assert setting.sync_every % setting.fragments == 0
        assert 0 <= setting.delay < setting.sync_every


def test_parity_compares_with_all_that_others_do() -> None:
    rows = [setting.name for setting in experiment_named("parity", Scope()).settings]
    assert rows == [
        "p2p-diloco", "p2p-diloco-every-8", "p2p-diloco-every-4", "data-parallel", "textbook-diloco",
        "streaming-diloco", "decoupled-diloco", "decoupled-diloco-int4", "noloco", "delta-only-groups", "opendiloco",
        "textbook-diloco-every-8", "streaming-diloco-every-8", "decoupled-diloco-int4-every-8",
        "decoupled-diloco-int4-every-4",
    ]  # fmt: skip


def test_a_question_about_adamw_is_asked_with_adamw() -> None:
    rows = experiment_named("moments", Scope(optimizer="muon")).settings
    assert {(row.inner, row.learning_rate) for row in rows} == {("adamw", Scope().rate_of("adamw"))}


def test_half_slow_means_equal_tokens() -> None:
    slow, fast, _ = experiment_named("mixed", Scope(islands=4, ticks=480)).settings
    assert slow.slow == 2
    assert (2 + 2 / 4) * slow.ticks == fast.islands * fast.ticks


def test_seeds_are_those_asked_for() -> None:
    assert experiment_named("parity", Scope()).seeds == 8
    assert experiment_named("parity", Scope(is_quick=True)).seeds == 2
    assert experiment_named("parity", Scope(seeds=3)).seeds == 3
    with pytest.raises(ConfigError, match="unknown experiment 'luck'; expected one of parity"):
        experiment_named("luck", Scope())


def test_only_some_rows_in_the_order_asked_for() -> None:
    parity = experiment_named("parity", Scope())
    rows = parity.only(["textbook-diloco", "p2p-diloco", "textbook-diloco"]).settings
    assert [setting.name for setting in rows] == ["textbook-diloco", "p2p-diloco"]
    assert set(rows) <= set(parity.settings)
    with pytest.raises(ConfigError, match="unknown row 'gossip'; expected one of p2p-diloco"):
        parity.only(["p2p-diloco", "gossip"])
    with pytest.raises(ConfigError, match="at least two rows"):
        parity.only(["p2p-diloco"])
