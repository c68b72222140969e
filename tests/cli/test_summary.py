"""The summary at the end of `join`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from p2p_diloco.app.cli.summary import Summary
from p2p_diloco.status.status_file import ByteCounts, PeerStatus

STEPPING = PeerStatus(
    updated=1000.0,
    inner_steps=1,
    tokens=1024,
    anchor_loss=2.512,
    claimed_token_share=0.3,
    invite="p2pdiloco://ab",
    bytes_sent=ByteCounts(vectors=1_200_000),
    bytes_received=ByteCounts(vectors=3_000_000_000),
)
FOLDER = Path("/state of mine")


def summary(*statuses: PeerStatus) -> list[str]:
    made = Summary()
    for status in statuses:
        made.status(status)
    return made.lines(FOLDER)


def test_the_summary_names_what_was_given_and_learnt_and_how_to_go_on() -> None:
    last = replace(STEPPING, updated=12_100.0, inner_steps=3400, tokens=1_234_000, anchor_loss=2.43)
    assert summary(PeerStatus(updated=10.0), STEPPING, last) == [
        "this machine gave 3 h 05 min, 3.4k steps and 1.2M tokens (30.0 % of the run's, at the end); it sent 1.2 MB "
        "and received 3.0 GB",
        "held-out loss of the shared model: 2.512 → 2.430 (lower is better)",
        "the model is in /state of mine",
        "to try it: p2p-diloco sample --state-directory '/state of mine' 'def main'",
        "to use it elsewhere: p2p-diloco export --state-directory '/state of mine' my-model",
        "to come back: p2p-diloco join \"p2pdiloco://ab\" --state-directory '/state of mine'",
    ]


def test_what_is_not_known_is_left_out() -> None:
    lines = summary(replace(STEPPING, anchor_loss=None, claimed_token_share=None))
    assert "of the run" not in lines[0]
    assert not any("loss" in line for line in lines)


def test_a_machine_that_made_no_step_gets_no_summary() -> None:
    assert summary() == summary(PeerStatus(phase="training")) == []
    assert summary(replace(STEPPING, role="archivist")) == []
