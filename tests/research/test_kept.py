"""Kept outcomes: what was played is found again, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.ids import Digest, sha256
from research.evidence import evidence_named
from research.kept import KeptOutcomes
from research.scope import Scope
from research.setting import Outcome, Setting
from research.stages import seeds_of
from research.tuned import read_searches

RESULTS = Path(__file__).parents[2] / "research" / "results"
PROSE = Digest(bytes.fromhex("54d1afc452ed6c57e93c41d22c8f2e219e343c6797dc21ff7fe2423a596bd502"))
"""Fingerprint of the second text of the rules of evidence."""

TEXT = sha256(b"a text")
ROW = Setting(name="row")


def outcome(seed: int) -> Outcome:
    return Outcome(name="row", seed=seed, loss=1.5 + seed, tokens=3, bytes_sent_per_parameter=2.5, seconds=4.0)


def test_what_was_played_is_found_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    kept = KeptOutcomes(path, TEXT)
    assert kept.find(ROW, 0) is None
    kept.add(ROW, outcome(0))
    kept.add(ROW, outcome(1))
    for again in (kept, KeptOutcomes(path, TEXT)):
        assert again.find(ROW, 1) == outcome(1)
        assert again.find(replace(ROW, name="other"), 0) == replace(outcome(0), name="other")
        assert again.find(ROW, 2) is None
        assert again.find(replace(ROW, momentum=0.6), 0) is None
    assert KeptOutcomes(path, sha256(b"another text")).find(ROW, 0) is None


def test_the_trials_of_the_evidence_are_found() -> None:
    """A trial is found by the fields of its setting, so a change of a default could lose it."""
    kept, searches = KeptOutcomes(RESULTS / "trials.jsonl", PROSE), read_searches(RESULTS / "tuned.json")
    for islands in (4, 8, 16):
        primary = evidence_named("primary", Scope(islands=islands, ticks=1312), searches)
        for setting in primary.settings:
            assert all(kept.find(setting, seed) for seed in seeds_of("test", primary.seeds)), setting.name


def test_lists_are_kept(tmp_path: Path) -> None:
    judged = replace(outcome(0), blocks=(1.0, 2.0), sent_shares=(1.0, 0.9))
    KeptOutcomes(tmp_path / "kept.jsonl", TEXT).add(ROW, judged)
    assert KeptOutcomes(tmp_path / "kept.jsonl", TEXT).find(ROW, 0) == judged


def test_nothing_is_kept_where_nobody_asked() -> None:
    kept = KeptOutcomes(None, TEXT)
    kept.add(ROW, outcome(0))
    assert kept.find(ROW, 0) is None


@pytest.mark.parametrize("line", ["no json", "[1]", "{}", '{"trial": "ab", "loss": 1.0}'])
def test_what_is_no_outcome_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "kept.jsonl"
    KeptOutcomes(path, TEXT).add(ROW, outcome(0))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=r"kept\.jsonl, line 2: this is not an outcome"):
        KeptOutcomes(path, TEXT)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the outcomes"):
        KeptOutcomes(tmp_path, TEXT)
    with pytest.raises(StateError, match="cannot keep outcomes"):
        KeptOutcomes(tmp_path / "nowhere" / "kept.jsonl", TEXT).add(ROW, outcome(0))
