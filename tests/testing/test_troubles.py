"""Kinds of trouble, their names, and what a seed draws of them."""

from __future__ import annotations

import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.testing.scenario import draw_scenario
from p2p_diloco.testing.troubles import DEFAULT_KINDS, KINDS, OPEN_KINDS, kinds_named


def test_kinds_are_named_one_by_one_or_in_groups() -> None:
    assert kinds_named("kill, loss") == {"kill", "loss"}
    assert kinds_named("none") == frozenset()
    assert kinds_named("default,router") == DEFAULT_KINDS | {"router"}
    assert kinds_named("all") == DEFAULT_KINDS | OPEN_KINDS == frozenset(KINDS)


def test_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="--kinds names 'meteor'; expected some of default, open, all, none, loss"):
        kinds_named("kill,meteor")


def test_open_troubles_are_drawn_only_where_they_are_asked_for() -> None:
    drawn = {t.kind for seed in range(200) for t in draw_scenario(seed, (3, 12), DEFAULT_KINDS).troubles}
    assert drawn == DEFAULT_KINDS


def test_further_kind_changes_nothing_about_peers_and_run() -> None:
    one, other = (draw_scenario(5, (3, 12), kinds) for kinds in (DEFAULT_KINDS, frozenset(KINDS)))
    assert one.peers == other.peers
    assert one.num_spans == other.num_spans
