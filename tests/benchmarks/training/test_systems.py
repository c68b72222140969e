"""Who trains is named by words; this project always does, first."""

from __future__ import annotations

import pytest

from benchmarks.training.figures import BLOCKING, OURS, OWN_LOOP, TORCHFT
from benchmarks.training.systems import systems_against
from p2p_diloco.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "systems"),
    [
        ("none", (OURS,)),
        ("blocking", (OURS, BLOCKING)),
        ("own-loop", (OURS, OWN_LOOP)),
        ("torchft, blocking", (OURS, BLOCKING, TORCHFT)),
        ("torchft,torchft", (OURS, TORCHFT)),
    ],
)
def test_words_name_systems(words: str, systems: tuple[str, ...]) -> None:
    assert systems_against(words) == systems


@pytest.mark.parametrize(("words", "whom"), [("hivemind", "'hivemind'"), ("", "nothing"), ("none,blocking", "'none'")])
def test_unknown_words_are_refused(words: str, whom: str) -> None:
    with pytest.raises(ConfigError, match=f"--against names {whom}; expected one or more of own-loop, blocking"):
        systems_against(words)
