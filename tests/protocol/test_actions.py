"""Actions, which the rules return, are frozen values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import get_args

import pytest
from fake_run import peer_id

from p2p_diloco.protocol.actions import Action, Part, Report


def test_actions_are_immutable() -> None:
    report = Report(topic="skipped", text="nothing came")
    with pytest.raises(FrozenInstanceError):
        report.text = "all came"  # type: ignore[misc]


def test_a_part_is_not_an_action() -> None:
    assert Part not in get_args(Action)
    assert Part(peer=peer_id("ann"), payload=b"", weight=1.0, norm=1.0).weight == 1.0
