"""`doctor` says in one line per check what keeps this machine out of a run, and what to do."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from p2p_diloco.app.cli import doctor
from p2p_diloco.app.cli.app import main
from p2p_diloco.app.cli.doctor import (
    FOUND_FAILURE,
    Finding,
    FolderFacts,
    IdentityFacts,
    PackageFacts,
    PortFacts,
    check_clock,
    check_disk,
    check_files,
    check_identity,
    check_memory,
    check_network,
    check_packages,
    check_port,
    check_processor,
    check_python,
    check_runs,
    check_state,
    each,
    folder_facts,
    guarded,
    is_allowed,
)
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import PeerId
from p2p_diloco.storage.identity import load_or_create_identity, lock_identity

Captured = pytest.CaptureFixture[str]
HOME = Path("/home/ada")
FOLDER = FolderFacts(
    folder=HOME / "state", place=HOME, exists=False, is_file=False, can_write=True, free=int(9e9), total=int(99e9)
)
PACKAGES = PackageFacts(own="0.1.0", required=(("torch>=2.10", "2.13.0+cpu"), ("hivemind==1.1.12", "1.1.12")))
HERE = ("/ip4/0.0.0.0/tcp/28881",)
TAKEN = "port 28881 on 0.0.0.0 is used by another program; stop it, or choose another port with --port"


@pytest.mark.parametrize(
    ("finding", "line"),
    [
        (check_python((3, 11, 2), "Linux"), "ok python 3.11.2 on Linux"),
        (check_python((3, 10, 9), "Linux"), "failure python 3.10.9 on Linux; install Python 3.11 or newer"),
        (check_packages(PACKAGES), "ok packages p2p-diloco 0.1.0, torch 2.13.0+cpu, hivemind 1.1.12, all 2 required"),
        (
            check_packages(replace(PACKAGES, required=(("torch>=2.10", "2.9.1"), ("hivemind==1.1.12", None)))),
            "failure packages torch>=2.10 is required, 2.9.1 is installed; hivemind==1.1.12 is missing; install",
        ),
        (check_processor(4, 3.2, None), "ok processor 4 cores, load 3.2"),
        (check_processor(4, 4.3, None), "warning processor 4 cores, load 4.3; other programs"),
        (check_processor(4, 0.0, 8), "warning processor 4 cores, load 0.0, 8 threads to train; set --threads 4"),
        (check_memory(8e9, 16e9), "ok memory 8.0 GB of 16.0 GB free"),
        (check_memory(1.9e9, 16e9), "warning memory 1.9 GB of 16.0 GB free, enough for small models only; close"),
        (check_memory(0.4e9, 1e9), "failure memory 400.0 MB of 1.0 GB free, and a peer needs 500.0 MB"),
        (check_files(resource.RLIM_INFINITY), "ok files no limit of open files"),
        (check_files(4096), "ok files at most 4,096 open files"),
        (check_files(1024), "warning files at most 1,024 open files; a peer of a large run needs 4,096; raise"),
        (check_files(128), "failure files at most 128 open files"),
        (check_clock(2026), "ok clock the clock shows the year 2026"),
        (check_clock(1970), "failure clock the clock shows the year 1970, and this version is of 2026; set the clock"),
        (check_state(FOLDER), "ok state /home/ada/state can be created and can be written"),
        (check_state(replace(FOLDER, is_file=True)), "failure state /home/ada is a file; choose another place"),
        (
            check_state(replace(FOLDER, can_write=False)),
            "failure state cannot write to /home/ada; give this user write",
        ),
        (check_disk(FOLDER, 0.0), "ok disk 9.0 GB of 99.0 GB free at /home/ada"),
        (check_disk(FOLDER, 7.5e9), "warning disk 9.0 GB of 99.0 GB free at /home/ada, of which 7.5 GB are to stay"),
        (check_disk(replace(FOLDER, free=0), 0.0), "failure disk 0 B of 99.0 GB free at /home/ada; free some space"),
        (
            check_disk(replace(FOLDER, free_nodes=0), 0.0),
            "failure disk 9.0 GB of 99.0 GB free at /home/ada, but it can",
        ),
        (check_runs(HOME, []), "ok runs no earlier runs"),
        (check_runs(HOME, [None, None]), "ok runs 2 earlier runs in /home/ada"),
        (
            check_runs(HOME, [None, "x is of format 3; use the old version"]),
            "warning runs 1 of 2 earlier runs cannot be read: x is of format 3; use the old version",
        ),
        (check_identity(IdentityFacts()), "ok identity none yet; the first start makes one"),
        (
            check_identity(IdentityFacts(peer=PeerId(bytes(32)))),
            "ok identity 12D3..Nz9ttwiw, readable by this user only",
        ),
        (check_identity(IdentityFacts(problem="k is open; chmod")), "failure identity k is open; chmod"),
        (check_port(PortFacts(addresses=()), is_own=False), "ok port this peer only dials out, as configured"),
        (check_port(PortFacts(addresses=HERE), is_own=False), "ok port can listen on /ip4/0.0.0.0/tcp/28881"),
        (
            check_port(PortFacts(addresses=HERE, is_named=True, problem=TAKEN), is_own=False),
            f"failure port {TAKEN}",
        ),
        (
            check_port(PortFacts(addresses=HERE, problem=TAKEN), is_own=False),
            "warning port port 28881 on 0.0.0.0 is used by another program; stop that program, or the peer takes",
        ),
        (
            check_port(PortFacts(addresses=HERE, problem=TAKEN), is_own=True),
            "ok port in use by the peer that runs with this state directory",
        ),
        (check_network([]), "warning network no route to other networks; connect this machine"),
        (
            check_network([("192.168.1.7", "eth0")]),
            "ok network IPv4 address 192.168.1.7 (eth0) is private, behind a router, no IPv6",
        ),
        (check_network([("8.8.4.4", "eth0")]), "ok network IPv4 address 8.8.4.4 (eth0) is public, no IPv6"),
        (
            check_network([("100.72.0.3", "wwan0")]),
            "warning network IPv4 address 100.72.0.3 (wwan0) is shared by a provider",
        ),
        (
            check_network([("10.8.0.2", "tun0")]),
            "warning network IPv4 address 10.8.0.2 (tun0) is a VPN's, no IPv6; the",
        ),
        (
            check_network([("100.72.0.3", "wwan0"), ("2a01:4f8::1", "wwan0")]),
            "ok network IPv4 address 100.72.0.3 (wwan0) is shared by a provider (CGNAT) or a VPN, IPv6 address",
        ),
    ],
)
def test_a_finding_is_one_line_with_numbers_and_what_to_do(finding: Finding, line: str) -> None:
    printed = str(finding)
    assert "\n" not in printed
    assert " ".join(printed.split()).startswith(line)
    assert bool(finding.remedy) == (finding.result != "ok")


@pytest.mark.parametrize(
    ("version", "requirement", "is_so"),
    [
        ("2.10", "torch>=2.10", True),
        ("2.9.9", "torch>=2.10", False),
        ("2.7", "pydantic<3,>=2.7", True),
        ("3.0", "pydantic<3,>=2.7", False),
        ("1.1.12", "hivemind==1.1.12", True),
        ("1.1.12.1", "hivemind==1.1.12", False),
        ("1.0", "rich", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, requirement: str, is_so: bool) -> None:
    assert is_allowed(version, requirement) == is_so


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("a of 3; do b"), "failure name a of 3; do b"),
        (
            OSError(5, "Input/output error"),
            "failure name the check itself failed (OSError: [Errno 5] Input/output error)",
        ),
        (ValueError("x\ny"), "failure name the check itself failed (ValueError: x?y); please report this line"),
    ],
)
def test_a_check_that_raises_is_a_failure(error: Exception, line: str) -> None:
    def fail() -> Finding:
        raise error

    (finding,) = asyncio.run(guarded("name", each(fail), 5.0))
    assert " ".join(str(finding).split()).startswith(line)


def test_a_check_that_hangs_is_a_failure_and_does_not_delay_the_end() -> None:
    def hang() -> Finding:
        time.sleep(3.0)
        raise AssertionError

    began = time.monotonic()
    (finding,) = asyncio.run(guarded("disk", each(hang), 0.1))
    assert str(finding).startswith("failure  disk       no result within 0 s")
    assert time.monotonic() - began < 2.0


def test_a_folder_that_does_not_exist_is_judged_by_the_one_above_it_and_not_created(tmp_path: Path) -> None:
    facts = folder_facts(tmp_path / "a" / "b")
    assert (facts.place, facts.exists, facts.is_file, facts.can_write) == (tmp_path, False, False, True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").touch()
    assert folder_facts(tmp_path / "a" / "b").is_file


@pytest.fixture
def without_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes seconds: the libp2p daemon and PyTorch."""
    from p2p_diloco.app.cli import doctor_network

    async def check_swarm(self: object) -> list[Finding]:
        return []

    monkeypatch.setattr(doctor_network.RunChecks, "check_swarm", check_swarm)
    monkeypatch.setattr(doctor, "_device_finding", lambda *_: doctor.ok("device", "cpu"))


def document(capsys: Captured) -> dict[str, tuple[str, str]]:
    checks = json.loads(capsys.readouterr().out)["checks"]
    return {check["name"]: (check["result"], check["finding"]) for check in checks}


@pytest.mark.usefixtures("without_daemon")
def test_the_command_changes_nothing_and_prints_a_line_for_each_check(tmp_path: Path, capsys: Captured) -> None:
    assert main(["doctor"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    assert last.startswith(f"{len(lines)} checks: no failures")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_daemon")
@pytest.mark.parametrize(
    ("invite", "text"),
    [
        ("hello", "'hello' is not an invite"),
        ("p2pdiloco://12?b=x", "the run id has 2 characters, expected 64 digits"),
        (f"p2pdiloco://{'ab' * 32}?v=3", "the invite is for protocol version '3', but this program uses"),
    ],
)
def test_an_invite_that_cannot_be_used_is_a_failure(invite: str, text: str, capsys: Captured) -> None:
    assert main(["doctor", invite, "--json"]) == FOUND_FAILURE
    result, finding = document(capsys)["invite"]
    assert result == "failure"
    assert finding.startswith(text)


@pytest.mark.usefixtures("without_daemon")
def test_an_identity_in_use_or_open_to_others_is_a_failure(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "state" / "identity.key"
    path.parent.mkdir()
    load_or_create_identity(path)
    with lock_identity(path):
        assert main(["doctor", "--json"]) == FOUND_FAILURE
    assert document(capsys)["identity"] == ("failure", f"another process uses the identity {path}")
    path.chmod(0o640)
    assert main(["doctor", "--json"]) == FOUND_FAILURE
    assert document(capsys)["identity"] == ("failure", f"the key file {path} is open to other users (mode 0640)")


@pytest.mark.usefixtures("without_daemon")
def test_runs_of_another_version_are_a_warning(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "state" / "0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(bytes(64) + b'{"format":3}')
    assert main(["doctor", "--json"]) == 0
    result, finding = document(capsys)["runs"]
    assert result == "warning"
    assert finding.startswith(f"1 of 1 earlier run cannot be read: {folder / 'manifest.json'} is of format 3")


def test_an_invalid_setting_has_its_usual_exit_code(capsys: Captured) -> None:
    assert main(["doctor", "--port", "99999"]) == 2
    assert "port = 99999" in capsys.readouterr().err
