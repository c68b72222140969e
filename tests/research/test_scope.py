"""The scale that the rows of an experiment share: the same batch for all, and the inner rates."""

from __future__ import annotations

import pytest

from p2p_diloco.config.inner_rule import OptimizerName
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.signing import SigningKey
from research.scope import RATES, Scope


@pytest.mark.parametrize("islands", [4, 8, 16])
def test_more_islands_do_not_mean_more_tokens(islands: int) -> None:
    setting = Scope(islands=islands).setting("row")
    assert setting.islands * setting.batch == Scope().windows


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_ours_is_what_a_new_manifest_says(optimizer: OptimizerName) -> None:
    organiser = SigningKey(bytes(32)).peer
    manifest = draft_manifest(organiser=organiser, now_seconds=0.0).outer
    setting = Scope(optimizer=optimizer).setting("row")
    assert (setting.outer_rate, setting.momentum) == (manifest.learning_rate, manifest.momentum)
    assert setting.mean == manifest.mean


def test_muon_has_a_rate_of_its_own_unless_one_is_given() -> None:
    setting = Scope(optimizer="muon").setting("row")
    assert setting.inner == "muon"
    assert setting.learning_rate == RATES["muon"]["micro"] != RATES["adamw"]["micro"]
    assert Scope(optimizer="muon", inner_rate=1e-3).setting("row").learning_rate == 1e-3
    assert Scope(inner_rate=1e-3).rate_of("adamw") == 1e-3
