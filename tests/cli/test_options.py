"""Options hold what was typed: `config/settings.py` checks settings, and no argument of a command line is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.app.cli.app import app, main
from p2p_diloco.app.cli.command_line import split_arguments
from p2p_diloco.app.cli.options import CommandContext
from p2p_diloco.config.settings import LIMITS, PeerSettings
from p2p_diloco.errors import ConfigError

Captured = pytest.CaptureFixture[str]
PLAN = ["plan", "--parameters", "100M", "--islands", "4", "--uplink", "20mbit"]


@pytest.mark.parametrize(("command", "settings"), [("join", [*PeerSettings.model_fields]), ("limits", [*LIMITS])])
def test_every_setting_has_a_flag_with_its_meaning(command: str, settings: list[str]) -> None:
    declared = app[command].assemble_argument_collection(parse_docstring=True)
    flags = {each.name: each.parameter.help for each in declared if each.parameter.group[0].name == "This machine"}
    assert flags == {f"--{key.replace('_', '-')}": PeerSettings.model_fields[key].description for key in settings}


def test_flags_override_the_environment_which_overrides_files(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text('port = 1\nthreads = 2\ndevice = "cpu"\n')
    around = CommandContext(files=(file,), environment={"P2P_DILOCO_PORT": "3", "P2P_DILOCO_THREADS": "4"})
    settings = around.settings({"port": "5"})
    assert (settings.port, settings.threads, settings.device) == (5, 4, "cpu")


def test_an_override_that_belongs_to_the_run_is_refused_unless_this_peer_founds_it() -> None:
    around = CommandContext(overrides={"outer.momentum": 0.7})
    with pytest.raises(ConfigError, match=r"outer\.momentum in the command line belongs to the run"):
        around.settings()
    assert around.settings(founds=True) == CommandContext().settings()


def test_lists_may_be_given_with_commas_or_one_by_one() -> None:
    settings = CommandContext().settings({"host_maddrs": ("/ip4/127.0.0.1/tcp/1,/ip4/127.0.0.1/tcp/2",)})
    assert settings.host_maddrs == ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*PLAN, "--outer.momentum", "0.9"], "plan does not take --outer.momentum"),
        ([*PLAN, "@nosuch.toml"], "plan does not take @nosuch.toml"),
    ],
)
def test_a_command_without_a_manifest_takes_no_manifest_values(words: list[str], text: str, capsys: Captured) -> None:
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert text in errors
    known = (
        "new, bootstrap, join, archive, doctor, status, report, page, pause, resume, limits, leave, id, members, "
        "sample and export"
    )
    assert f"only {known} take files and" in errors


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*PLAN, "--cores", "1.5"], "--cores is 1.5; expected a whole number"),
        (["new", "x.toml", "--islands", "2.5"], "--islands is 2.5; expected a whole number"),
        (["join", "--found", "run.toml", "--until-round", "7.5"], "--until-round is 7.5; expected a whole number"),
        ([*PLAN, "--cores", "many"], 'unable to convert "many" into int'),
    ],
)
def test_a_count_that_is_not_whole_is_refused(words: list[str], text: str, capsys: Captured) -> None:
    assert main(words) == 2
    assert text in capsys.readouterr().err


def test_a_whole_number_may_be_written_in_other_ways(capsys: Captured) -> None:
    for number in ("2.0", "0x2"):
        assert main([*PLAN, "--cores", number]) == 0
        assert "with 2 cores" in capsys.readouterr().out


def test_files_and_overrides_are_extracted_from_a_command_line() -> None:
    words = [
        "join",
        "invite",
        "@peer.toml",
        "--initial_peers=a_b",
        "--outer.momentum",
        "0.7",
        "--rounds.round-seconds=2",
        "-v",
        "@",
        "--",
        "@x",
        "--a.b",
    ]
    rest, files, overrides = split_arguments(words)
    assert rest == ["join", "invite", "--initial-peers=a_b", "-v", "@", "--", "@x", "--a.b"]
    assert files == (Path("peer.toml"),)
    assert overrides == {"outer.momentum": 0.7, "rounds.round_seconds": 2}


def test_a_file_name_with_a_dot_is_not_an_override() -> None:
    assert split_arguments(["bootstrap", "run.toml"]) == (["bootstrap", "run.toml"], (), {})


def test_some_names_are_overrides_without_a_dot() -> None:
    rest, _, overrides = split_arguments(["new", "--outer-lr=0.7", "--name", "x"], {"outer_lr"})
    assert (rest, overrides) == (["new", "--name", "x"], {"outer_lr": 0.7})


def test_an_override_without_a_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--outer\.momentum needs a value$"):
        split_arguments(["new", "--outer.momentum"])
