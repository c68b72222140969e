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


MIXED = ["plan", "--parameters", "125M", "--uplink", "20mbit", "--islands"]


def test_kinds_of_machines_show_what_each_adds_and_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MIXED, "1xH100, 4xlaptop"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "125,000,000 parameters, 5 islands, 20 Mbit/s up from each, a step in 15.4 s", "a laptop's"
    begin = next(place for place, line in enumerate(lines) if line.startswith("each of"))
    _, fast, slow, together, _, *assumed = (" ".join(line.split()) for line in lines[begin : begin + 8])
    assert fast == "1 x h100 8 6,144 1.5G 99.7 % 20.0 % 156 GB"
    assert slow == "4 x laptop 4 8 950.3k 0.1 % 20.0 % 156 GB"
    assert together == "all 1.5G tokens an hour; 2.5G (20 per parameter) take 102 min"
    assert assumed == [
        "assumed 4 windows of 1,024 tokens in a planned step, 6 operations per parameter and token",
        "h100 307 TFLOPS, laptop 0.2 TFLOPS: 40 % of the peak, in steps of at least 0.02 s",
        "small models reach far less; give what `status` shows, such as 4x1300tokens/s",
    ]


def test_given_speeds_are_taken_and_nothing_is_assumed_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tokens", "1B", "--windows", "6", "--context", "512", "--step-seconds", "2"]
    assert main([*MIXED, "2x1500tokens/s,40TFLOPS", *flags]) == 0
    printed = capsys.readouterr().out
    assert "3 islands, 20 Mbit/s up from each, a step in 2 s" in printed
    assert "6 windows of 512 tokens" in printed
    assert "1.0G take " in printed
    assert "of the peak" not in printed


def test_figures_of_kinds_of_machines_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MIXED, "2x100tokens/s,1000tokens/s,0.03TFLOPS,2x10tokens/s", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    plan, machines = figures["plan"], figures["machines"]
    assert figures["question"]["islands"] == 6
    assert figures["question"]["step_seconds"] == pytest.approx(4096 / 40), "0.03e12 / (6 * 125e6), the middle one's"
    for share in ("token_share", "equal_share"):
        assert sum(each["count"] * each[share] for each in machines) == pytest.approx(1.0)
    slow, fast, middle, slowest = machines
    assert fast["token_share"] == pytest.approx(10 * slow["token_share"])
    assert fast["equal_share"] == slow["equal_share"] == middle["equal_share"]
    assert slowest["equal_share"] == pytest.approx(slow["equal_share"] / 4), "10 of 40"
    assert [each["windows"] for each in machines] == [8, 8, 4, 1], "at most twice the planned windows, at least one"
    assert middle["cycle_steps"] == pytest.approx(plan["steps"])
    for each, speed in zip(machines, (100, 1000, 40, 10), strict=True):
        assert each["cycle_steps"] * each["windows"] * 1024 == pytest.approx(speed * plan["cycle_seconds"])
        assert each["hour_tokens"] == pytest.approx(3600 * speed * plan["utilisation"])


def test_a_number_of_islands_has_steps_of_a_second_and_no_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MIXED, "4", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["question"]["islands"], figures["question"]["step_seconds"]) == (4, 1.0)
    assert "machines" not in figures


@pytest.mark.parametrize(
    ("islands", "answer"),
    [
        ("2xlaptob", "--islands names 'laptob'; did you mean laptop? known are h200, h100, "),
        ("abacus", "--islands names 'abacus'; known are h200, h100, "),
        ("1.5", "--islands has '1.5'; expected a number of islands, or counts of kinds such as 1xH100,4xlaptop, "),
        ("1xh100,", "--islands has ''; expected a number of islands"),
        ("0xh100", "the count of --islands 0xh100 is 0; expected at least 1"),
        ("2x0TFLOPS", "the speed of --islands 2x0TFLOPS is 0; expected more than 0, such as 40TFLOPS"),
        ("-3", "--islands is -3; expected at least 1"),
    ],
)
def test_islands_that_cannot_be_read_are_refused_with_what_is_known(
    islands: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MIXED[:-1], f"--islands={islands}"]) == 2
    assert capsys.readouterr().err.startswith(f"p2p-diloco: error: {answer}")


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
