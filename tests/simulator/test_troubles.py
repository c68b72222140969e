"""Kinds of trouble, their names, and what a seed draws of them."""

from __future__ import annotations

import pytest

from p2p_diloco.errors import ConfigError
from simulator.scenario import draw_scenario
from simulator.troubles import KINDS, kinds_named


def test_kinds_are_named_individually_or_in_groups() -> None:
    assert kinds_named("kill, loss") == {"kill", "loss"}
    assert kinds_named("none") == frozenset()
    assert kinds_named("all") == frozenset(KINDS)


def test_unknown_kind_is_refused_with_a_list_of_known_kinds() -> None:
    with pytest.raises(ConfigError, match="--kinds names 'meteor'; expected some of all, none, loss"):
        kinds_named("kill,meteor")


def test_only_requested_kinds_are_drawn() -> None:
    for kinds in (frozenset(KINDS), frozenset(KINDS) - {"router", "liar"}):
        drawn = {t.kind for seed in range(200) for t in draw_scenario(seed, (3, 12), kinds).troubles}
        assert drawn == kinds


def test_a_further_kind_does_not_change_the_peers_and_the_run() -> None:
    one, other = (draw_scenario(5, (3, 12), kinds) for kinds in (frozenset(KINDS) - {"router"}, frozenset(KINDS)))
    assert one.peers == other.peers
    assert one.num_spans == other.num_spans
