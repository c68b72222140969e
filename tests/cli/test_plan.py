"""`p2p-diloco plan`."""

from __future__ import annotations

import json
import tomllib

import pytest

from p2p_diloco.app.cli import plan
from p2p_diloco.app.cli.app import main
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.signing import SigningKey

PAPER = ["plan", "--parameters", "12B", "--islands", "4", "--uplink", "2gbit"]


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "measure_outer_work", lambda: 10.0)


def test_it_prints_the_needs_of_the_line_and_the_manifests_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PAPER, "--cores", "64"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "12,000,000,000 parameters, 4 islands, 2 Gbit/s up",
        "0.797 bytes per parameter and cycle each way, 9.56 GB",
        "2.3 min, 138 steps",
        "fragments = 24",
        "data-parallel over the same uplink: 2.42 min a step",
    ):
        assert text in printed


def test_figures_are_available_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PAPER, "--cores", "64", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["question"]["uplink_bits"] == 2e9
    assert figures["plan"]["steps"] == 138


def test_small_runs_and_slow_lines_have_readable_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--parameters", "1M", "--islands", "2", "--uplink", "64kbit", "--step-seconds", "900"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "64 kbit/s" in printed
    assert "2 h" in printed
    assert "MB" in printed


def test_two_islands_and_their_bootstrap_peer_upload_more_than_they_download(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--parameters", "10M", "--islands", "2", "--uplink", "20mbit"]) == 0
    printed = capsys.readouterr().out
    assert "0.708 bytes per parameter and cycle up and 0.531 down, 7.08 MB; 2.83 s on an idle uplink\n" in printed
    assert "7.4 MB up and 5.55 MB down every 8 s: 7.4 Mbit/s and 5.55 Mbit/s, " in printed
    assert " 79.9 GB and 60 GB a day, 4.2 TB a month\n" in printed


@pytest.mark.parametrize(
    "words",
    [
        ["--parameters", "405B", "--islands", "16", "--uplink", "5mbit"],
        ["--parameters", "405B", "--islands", "16", "--uplink", "1.3mbit", "--cores", "64"],
        ["--parameters", "1M", "--islands", "2", "--uplink", "2gbit", "--cores", "64", "--step-seconds", "0.001"],
        ["--parameters", "12B", "--islands", "2", "--uplink", "900gbit", "--cores", "9999", "--step-seconds", "1e-4"],
        ["--parameters", "1M", "--islands", "5000", "--group-size", "5000", "--uplink", "20mbit"],
    ],
)
def test_new_accepts_the_recommended_values(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    wanted = tomllib.loads("\n".join(line[15:] for line in lines[-5:]))
    manifest = draft_manifest(organiser=SigningKey(bytes(32)).peer, now_seconds=0.0, values=wanted)
    assert manifest.rounds.fragments == wanted["rounds"]["fragments"]


def test_rounds_beyond_the_manifests_limits_are_reported_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters", "100M", "--islands", "4", "--uplink", "20bit"]) == 2
    errors = capsys.readouterr().err
    assert "days at 0.02 kbit/s; a manifest allows 7" in errors
    assert "give a faster uplink with its unit, such as 20mbit, fewer parameters" in errors


@pytest.mark.parametrize("others", [[], ["--parameters", "1M", "--islands", "2"]])
def test_an_uplink_without_a_unit_is_reported_first(others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--uplink", "20", *others]) == 2
    assert capsys.readouterr().err == (
        "p2p-diloco: error: --uplink is '20'; expected a rate with its unit, kbit, mbit or gbit per second, such as "
        "20mbit\n"
    )


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["--islands", "0"], "--islands is 0; expected at least 1"),
        (["--cores", "0"], "--cores is 0; expected at least 1"),
        (["--group-size", "0"], "--group-size is 0; expected at least 1"),
        (["--step-seconds", "0"], "--step-seconds is 0; expected more than 0, such as 0.045"),
    ],
)
def test_an_invalid_value_is_reported_with_its_flag(
    flags: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [] if "--islands" in flags else ["--islands", "2"]
    assert main(["plan", "--parameters", "1M", "--uplink", "20mbit", *others, *flags]) == 2
    assert capsys.readouterr().err == f"p2p-diloco: error: {answer}\n"
