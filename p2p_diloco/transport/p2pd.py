"""Run hivemind's libp2p daemon with our own flags, and make sure that it ends with this process.

hivemind would leave it running if its parent is killed. Here it listens only on TCP (its QUIC has known
vulnerabilities), runs in its own session (so that Ctrl-C reaches only us, and we can shut down cleanly), and ends with
us: on Linux the kernel kills it with its parent, and on all systems a small shell, the janitor, waits for our end of a
pipe to close, kills the daemon and removes the socket directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import logging
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import IO, NoReturn, Self

import psutil

from p2p_diloco.errors import ConfigError, NetworkError

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
MOST_FILES = 8192
"""Limit of open files that this process asks for: two streams for each of hundreds of links, and the trainer's own."""
MOST_DAEMON_FILES = 4096
"""Limit of open files of p2pd: 2,048 connections, and the streams of links."""
MOST_DAEMON_BYTES, FREE_DAEMON_BYTES = 1 << 30, 512 << 20
"""Memory of p2pd at which it is ended, and from which on it collects garbage more eagerly. Connections cost it 60 to
100 kB each, and nobody but it can refuse them."""
_LOOK_SECONDS = 5.0
_STOP_SECONDS = 2.0
_READ_BYTES = 4096
_READY_MARK = "Peer ID:"

# Run by a bare interpreter that then becomes p2pd: avoids Python code between fork and exec in a multithreaded process.
_LAUNCHER = """
import ctypes, os, resource, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended before p2pd started")
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
most = int(sys.argv[2]) if most == resource.RLIM_INFINITY else min(most, int(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
os.execv(sys.argv[3], sys.argv[3:])
"""
# A line means a clean exit; the end of the pipe without a line means that the parent is gone.
_JANITOR = 'trap "" HUP INT TERM; if read -r _; then exit 0; fi; kill -9 "$1" 2>/dev/null; rm -rf -- "$2"'


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Settings of one p2pd.

    Attributes:
        identity_path: libp2p key file.
        host_maddrs: TCP multiaddrs to listen on; port 0 lets the system choose. Empty: only dial out.
        announce_maddrs: addresses to announce; empty: the detected ones.
        map_port: ask the router to open a port (UPnP, NAT-PMP).
        dies_with_parent: let the kernel kill it with its parent where supported; off only in tests of the janitor.
    """

    identity_path: Path
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...] = ()
    map_port: bool = False
    dies_with_parent: bool = True


not_for_children: set[int] = set()
"""File descriptors that a forked child closes at once, such as pipes whose closing tells a janitor that this process is
gone."""


def _close_in_child() -> None:
    while not_for_children:
        with contextlib.suppress(OSError):  # one that is closed already must not keep the others open
            os.close(not_for_children.pop())


os.register_at_fork(after_in_child=_close_in_child)


class Child:
    """A child process with a thread that waits for it.

    asyncio and uvloop wait for children with SIGCHLD. In a user's process, another handler may be installed, for
    example by PyTorch's DataLoader; then they would wait for ever.

    Args:
        on_line: called in the loop with each line of its output; None: the output is not read.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        on_line: Callable[[str], None] | None = None,
        has_input: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_line = on_line
        self._end: asyncio.Future[int] = self._loop.create_future()
        self._process: Popen[bytes] = Popen(
            arguments,
            stdin=PIPE if has_input else DEVNULL,
            stdout=PIPE if on_line is not None else DEVNULL,
            stderr=STDOUT if on_line is not None else DEVNULL,
            env=environment,
            start_new_session=True,
        )
        if self._process.stdin is not None:
            not_for_children.add(self._process.stdin.fileno())
        threading.Thread(target=self._watch, name=f"child {self._process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit code once it has ended and all of its output has been read."""
        return await asyncio.shield(self._end)

    async def end(self) -> None:
        """Terminate it; kill it if it does not end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self.wait_or_kill()

    async def wait_or_kill(self) -> None:
        """Wait briefly for its end, then kill it."""
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.wait()

    def write_last(self, text: bytes) -> None:
        """Write a few last bytes to its input and close it."""
        assert self._process.stdin is not None, "it has no input"
        not_for_children.discard(self._process.stdin.fileno())
        with contextlib.suppress(OSError):
            self._process.stdin.write(text)
            self._process.stdin.close()

    def _watch(self) -> None:
        if self._process.stdout is not None and self._on_line is not None:
            for line in _lines(self._process.stdout):
                self._soon(self._on_line, line)
            self._process.stdout.close()
        self._soon(self._ended, self._process.wait())

    def _ended(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    def _soon(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *args)


class Daemon:
    """A running p2pd. Starts on entry and stops on exit; `wait_for_end` returns when it exits by itself."""

    def __init__(self, settings: DaemonSettings) -> None:
        self._settings = settings
        self._process: Child | None = None
        self._janitor: Child | None = None
        self._directory: Path | None = None
        self._ready = asyncio.Event()
        self._last_lines: deque[str] = deque(maxlen=4)
        self._too_large = ""
        self.most_bytes = MOST_DAEMON_BYTES

    @property
    def directory(self) -> Path:
        """Private directory for sockets; removed with the daemon."""
        assert self._directory is not None, "start the daemon first"
        return self._directory

    @property
    def control_path(self) -> Path:
        return self.directory / "p2pd.sock"

    @property
    def pid(self) -> int:
        assert self._process is not None, "start the daemon first"
        return self._process.pid

    async def __aenter__(self) -> Self:
        """Start p2pd and its janitor.

        Raises:
            NetworkError: an address cannot be listened on, or p2pd did not start within `START_SECONDS`.
            ConfigError: this machine has no working p2pd.
        """
        check_ports_are_free(self._settings.host_maddrs)
        raise_file_limit()
        self._directory = _make_socket_directory()
        try:
            await self._launch()
            await self._wait_until_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def wait_for_end(self) -> str:
        """Wait until p2pd ends; return its exit code and last output as text."""
        assert self._process is not None, "start the daemon first"
        code = await self._process.wait()
        return self._too_large or f"exit code {code}, last output: {self._last_output()}"

    async def end_if_too_large(self) -> None:
        """Watch the memory of p2pd until it ends, and end it above `most_bytes`."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            while not self._too_large:
                held = process.memory_info().rss
                if held > self.most_bytes:
                    allowed = f"{self.most_bytes / 1e6:.0f} are allowed"
                    self._too_large = f"it had taken {held / 1e6:.0f} MB of memory; {allowed}"
                    process.kill()
                await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self) -> None:
        """End p2pd and remove its directory; safe to call twice, or after a failed start."""
        await asyncio.shield(self._stop())

    async def _stop(self) -> None:
        if self._process is not None:
            await self._process.end()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._janitor is not None:
            self._janitor.write_last(b"tidy\n")
            await self._janitor.wait_or_kill()
        self._process = self._janitor = None

    async def _launch(self) -> None:
        binary = find_p2pd()
        arguments = [str(binary), *_flags(self._settings, self.control_path)]
        if self._settings.dies_with_parent and sys.platform == "linux" and sys.executable:
            launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(MOST_DAEMON_FILES)]
            arguments = [*launcher, *arguments]
        environment = {
            **os.environ,
            "GOLOG_LOG_LEVEL": "error",
            "GOLOG_LOG_FMT": "nocolor",
            "GOMEMLIMIT": str(FREE_DAEMON_BYTES),
        }
        try:
            self._process = Child(arguments, on_line=self._read_line, environment=environment)
        except OSError as error:
            raise ConfigError(f"cannot run {binary}: {error.strerror}; reinstall hivemind for this machine") from None
        with contextlib.suppress(FileNotFoundError):  # without a shell there is no janitor
            pid, directory = str(self._process.pid), str(self.directory)
            self._janitor = Child(["/bin/sh", "-c", _JANITOR, "p2p-diloco-janitor", pid, directory], has_input=True)

    async def _wait_until_ready(self) -> None:
        assert self._process is not None
        ready = asyncio.create_task(self._ready.wait())
        ended = asyncio.create_task(self.wait_for_end())
        try:
            await asyncio.wait({ready, ended}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                self._raise_start_failure(ended.result())
            if not ready.done():
                raise NetworkError(
                    f"the libp2p daemon did not start within {START_SECONDS:.0f} s (last output: "
                    f"{self._last_output()}); is this machine overloaded? try again"
                )
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.wait({ready, ended})

    def _raise_start_failure(self, end: str) -> NoReturn:
        places = ", ".join(self._settings.host_maddrs)
        if "failed to listen" in end:
            raise NetworkError(
                f"cannot listen on {places} ({end}); choose an address of this machine with --host-maddrs"
            )
        raise NetworkError(f"the libp2p daemon ended during its start ({end})")

    def _read_line(self, line: str) -> None:
        self._last_lines.append(line)
        logger.debug("p2pd: %s", line)
        if line.startswith(_READY_MARK):
            self._ready.set()

    def _last_output(self) -> str:
        return " | ".join(self._last_lines) or "none"


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as it may, up to `MOST_FILES`, as p2pd does with its own."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def find_p2pd() -> Path:
    """Return the path of the daemon in hivemind's wheel, without importing hivemind.

    Raises:
        ConfigError: it is not installed.
    """
    spec = importlib.util.find_spec("hivemind")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    for place in places:
        binary = Path(place) / "hivemind_cli" / "p2pd"
        if binary.is_file():
            return binary
    raise ConfigError("hivemind's libp2p daemon p2pd is not installed; reinstall with: pip install hivemind==1.1.12")


def check_ports_are_free(host_maddrs: Sequence[str]) -> None:
    """Check whether the TCP ports are free.

    p2pd does not check: it shares ports (SO_REUSEPORT), and two daemons of one user would steal each other's
    connections.

    Raises:
        NetworkError: a port is taken, or the address does not belong to this machine.
    """
    for maddr in host_maddrs:
        match = re.fullmatch(r"/ip([46])/([^/]+)/tcp/(\d+)", maddr)
        if match is None:
            raise ConfigError(f"cannot listen on {maddr}; expected an address like /ip4/0.0.0.0/tcp/31337")
        _check_port(match[1] == "6", match[2], int(match[3]))


def _check_port(is_ipv6: bool, host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OverflowError:
            raise ConfigError(f"port {port} does not exist; choose one from 1 to 65535 with --port") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NetworkError(
                    f"port {port} on {host} is used by another program; stop it, or choose another port with --port"
                ) from None
            raise NetworkError(f"cannot listen on {host} port {port}: {error.strerror}; see --host-maddrs") from None


def _flags(settings: DaemonSettings, control_path: Path) -> list[str]:
    flags = [
        f"-listen=/unix{control_path}",
        f"-id={settings.identity_path.absolute()}",
        "-relay=0",
        "-relayService=0",
        "-autonat=0",
        "-connManager=1",
        "-connLo=1024",
        "-connHi=2048",
        f"-natPortMap={int(settings.map_port)}",
    ]
    if settings.host_maddrs:
        flags.append(f"-hostAddrs={','.join(settings.host_maddrs)}")
    else:
        flags.append("-noListenAddrs=1")
    if settings.announce_maddrs:
        flags.append(f"-announceAddrs={','.join(settings.announce_maddrs)}")
    return flags


def _make_socket_directory() -> Path:
    # Paths of Unix sockets are limited to about 100 characters; the default folder is too deep on some systems.
    place = tempfile.gettempdir() if len(tempfile.gettempdir()) < 50 else "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix="p2p-diloco-", dir=place))
    except OSError as error:
        raise ConfigError(f"cannot create a directory for sockets in {place}: {error.strerror}; set TMPDIR") from None


def _lines(stream: IO[bytes]) -> Iterator[str]:
    """Yield lines of output; an endless line is truncated."""
    rest = b""
    while chunk := os.read(stream.fileno(), _READ_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").strip()
        rest = rest[-_READ_BYTES:]
    if rest:
        yield rest.decode(errors="replace").strip()
