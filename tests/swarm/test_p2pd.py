"""Life of the daemon: it starts, reports why it cannot, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from p2p_diloco.errors import ConfigError, NetworkError
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport import p2pd
from p2p_diloco.transport.p2pd import (
    MOST_DAEMON_FILES,
    MOST_FILES,
    Daemon,
    DaemonSettings,
    check_ports_are_free,
    find_p2pd,
    raise_file_limit,
)

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PARENT = """
import asyncio, sys
from pathlib import Path
from p2p_diloco.transport.p2pd import Daemon, DaemonSettings

async def main():
    settings = DaemonSettings(
        identity_path=Path(sys.argv[1]), host_maddrs=("/ip4/127.0.0.1/tcp/0",), dies_with_parent=sys.argv[2] == "1"
    )
    async with Daemon(settings) as daemon:
        print(daemon.pid, daemon.directory, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    load_or_create_identity(tmp_path / "peer.key")
    return tmp_path / "peer.key"


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def run_in_loop(main: Coroutine[Any, Any, None]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)

    return run_in_loop


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        yield holder.getsockname()[1]


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_daemon_starts_and_leaves_nothing(identity: Path, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def main() -> None:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        daemon = Daemon(DaemonSettings(identity_path=identity, host_maddrs=(LOOPBACK,)))
        async with daemon:
            pid, directory = daemon.pid, daemon.directory
            assert is_running(pid)
            assert daemon.control_path.exists()
            assert os.getsid(pid) != os.getsid(0)  # Ctrl-C in a terminal must not reach the daemon
        await daemon.stop()
        assert not is_running(pid)
        assert not directory.exists()
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before

    run(main())


@pytest.mark.parametrize("dies_with_parent", ["1", "0"])
def test_killing_the_parent_leaves_no_daemon_no_janitor_and_no_file(identity: Path, dies_with_parent: str) -> None:
    if dies_with_parent == "1" and sys.platform != "linux":
        pytest.skip("only Linux ties processes to their parents")
    command = [sys.executable, "-c", PARENT, str(identity), dies_with_parent]
    root = Path(p2pd.__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert int(pid) in children
        assert len(children) == 2
        parent.kill()
    assert wait_until(lambda: not any(is_running(child) for child in children))
    assert wait_until(lambda: not Path(directory).exists())


def test_the_death_of_a_daemon_is_reported(identity: Path, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def main() -> None:
        async with Daemon(DaemonSettings(identity_path=identity, host_maddrs=(LOOPBACK,))) as daemon:
            os.kill(daemon.pid, signal.SIGKILL)
            async with asyncio.timeout(5):
                end = await daemon.wait_for_end()
        assert end.startswith("exit code -9, last output: ")

    run(main())


def test_a_daemon_that_takes_too_much_memory_is_ended_with_the_figure(
    identity: Path, run: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def main() -> None:
        async with Daemon(DaemonSettings(identity_path=identity, host_maddrs=(LOOPBACK,))) as daemon:
            watch = asyncio.ensure_future(daemon.end_if_too_large())
            await asyncio.sleep(0.5)
            assert is_running(daemon.pid)
            watch.cancel()
            daemon.most_bytes = 1 << 20
            async with asyncio.timeout(5):
                watch = asyncio.ensure_future(daemon.end_if_too_large())
                end = await daemon.wait_for_end()
            watch.cancel()
        assert re.fullmatch(r"it had taken \d+ MB of memory; 1 are allowed", end)

    run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the launcher")
def test_a_daemon_has_a_limit_of_files_of_its_own(identity: Path) -> None:
    async def main() -> None:
        async with Daemon(DaemonSettings(identity_path=identity, host_maddrs=(LOOPBACK,))) as daemon:
            limits = psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert limits == (MOST_DAEMON_FILES, MOST_DAEMON_FILES)

    asyncio.run(main())


def test_the_limit_of_open_files_is_raised_as_far_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_file_limit()
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_used_by_another_program_is_named(identity: Path) -> None:
    with taken_port() as port:
        settings = DaemonSettings(identity_path=identity, host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
        with pytest.raises(
            NetworkError, match=rf"port {port} on 127\.0\.0\.1 is used .* choose another port with --port"
        ):
            asyncio.run(Daemon(settings).__aenter__())


def test_a_port_used_by_another_daemon_is_named_too(tmp_path: Path, identity: Path) -> None:
    """Daemons share ports by default, and would silently take each other's callers."""
    with taken_port() as port:
        pass
    address = f"/ip4/127.0.0.1/tcp/{port}"
    load_or_create_identity(tmp_path / "other.key")

    async def main() -> None:
        async with Daemon(DaemonSettings(identity_path=identity, host_maddrs=(address,))):
            with pytest.raises(NetworkError, match=f"port {port} on"):
                await Daemon(DaemonSettings(identity_path=tmp_path / "other.key", host_maddrs=(address,))).__aenter__()
        check_ports_are_free([address])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("maddr", "kind", "text"),
    [
        ("/ip4/192.0.2.1/tcp/31337", NetworkError, "cannot listen on 192.0.2.1 port 31337: Cannot assign"),
        ("/ip4/127.0.0.1/tcp/65536", ConfigError, "port 65536 does not exist; choose one from 1 to 65535"),
        ("/ip4/127.0.0.1/udp/1/quic", ConfigError, "cannot listen on /ip4/127.0.0.1/udp/1/quic; expected an address"),
        ("/dns4/localhost/tcp/1", ConfigError, "expected an address like /ip4/0.0.0.0/tcp/31337"),
    ],
)
def test_addresses_that_cannot_be_listened_on_are_explained(maddr: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        check_ports_are_free([maddr])


def test_a_daemon_that_cannot_start_is_reported_with_its_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as place:  # short enough for a socket, and used by nobody else
        monkeypatch.setattr(tempfile, "tempdir", place)
        settings = DaemonSettings(identity_path=tmp_path / "missing.key", host_maddrs=(LOOPBACK,))
        with pytest.raises(NetworkError, match=r"ended during its start \(exit code 1, last output: .*no such file"):
            asyncio.run(Daemon(settings).__aenter__())
        assert os.listdir(place) == []


def test_a_daemon_that_hangs_is_given_up(identity: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "p2pd"
    sleeper.write_text("#!/bin/sh\necho starting\nexec sleep 60\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(p2pd, "find_p2pd", lambda: sleeper)
    monkeypatch.setattr(p2pd, "START_SECONDS", 0.5)
    with pytest.raises(NetworkError, match=r"did not start within 0 s \(last output: starting\)"):
        asyncio.run(Daemon(DaemonSettings(identity_path=identity, host_maddrs=(LOOPBACK,))).__aenter__())
    assert [child.name() for child in psutil.Process().children()] == []


def test_without_the_daemon_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_p2pd().name == "p2pd"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"reinstall with: pip install hivemind==1\.1\.12"):
        find_p2pd()


def test_with_a_daemon_of_another_machine_the_error_names_what_to_install(
    identity: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alien = tmp_path / "p2pd"
    alien.write_bytes(b"\x7fELF alien")
    alien.chmod(0o700)
    monkeypatch.setattr(p2pd, "find_p2pd", lambda: alien)
    settings = DaemonSettings(identity_path=identity, host_maddrs=(LOOPBACK,), dies_with_parent=False)
    with pytest.raises(ConfigError, match=r"cannot run .*p2pd: Exec format error; reinstall hivemind"):
        asyncio.run(Daemon(settings).__aenter__())
