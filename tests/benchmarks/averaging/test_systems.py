"""Who takes part, and whether all fit into memory side by side."""

from __future__ import annotations

import pytest

from benchmarks.averaging.systems import (
    GLOO,
    HIVEMIND_FLOAT16,
    HIVEMIND_FLOAT32,
    OURS,
    can_all_stay,
    systems_against,
)
from p2p_diloco.errors import ConfigError

GIB = 1024**3


@pytest.mark.parametrize(
    ("words", "systems"),
    [
        ("hivemind,gloo", (OURS, HIVEMIND_FLOAT32, HIVEMIND_FLOAT16, GLOO)),
        ("gloo, hivemind", (OURS, HIVEMIND_FLOAT32, HIVEMIND_FLOAT16, GLOO)),
        ("gloo,gloo", (OURS, GLOO)),
        ("none", (OURS,)),
    ],
)
def test_words_name_systems_and_ours_comes_first(words: str, systems: tuple[str, ...]) -> None:
    assert systems_against(words) == systems


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nccl", "--against names 'nccl'; expected one or more of hivemind, gloo, with commas, or none"),
        ("gloo,none", "--against names 'none'"),
        (",", "--against is empty"),
    ],
)
def test_other_words_are_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        systems_against(words)


@pytest.mark.parametrize(
    ("peers", "parameters", "gib", "stays"),
    [(2, 1_000_000, 16, True), (4, 10_000_000, 32, True), (8, 50_000_000, 22, False), (8, 50_000_000, 256, True)],
)
def test_processes_live_side_by_side_where_there_is_room(peers: int, parameters: int, gib: int, stays: bool) -> None:
    systems = systems_against("hivemind,gloo")
    assert can_all_stay(systems, peers, parameters, gib * GIB) is stays
