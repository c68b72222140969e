"""`p2p-diloco page`: serve a page about the peers on this machine; and the page that another command starts."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.wording import NAME, install_line

FIRST_PORT, PORTS_TRIED = 31380, 20
LINE = "page: "
MOST_CONNECTIONS = 500
_END_SECONDS = 3.0


def serve_page(folders: Sequence[Path], *, host: str | None, port: int | None, is_public: bool, samples: bool) -> int:
    """Serve a page until interrupted.

    Args:
        folders: state directories of the peers.
        host: address to listen on, for a public page; None: this machine alone.
        port: None: the first that is free.
        samples: whether to show text that the model writes.
    Raises:
        ConfigError: a folder is a file, the port is taken, a host without `is_public`, or a package is missing.
    """
    for folder in folders:
        if folder.is_file():
            raise ConfigError(f"{folder} is a file; name the folder of a peer's state")
    if port is not None and not 0 < port < 65_536:
        raise ConfigError(f"--port is {port}; expected a port from 1 to 65535, or none for the first that is free")
    if host is not None and not is_public:
        raise ConfigError(
            f"--host {host} would let others see this page; add --public, which shows no addresses and keys"
        )
    if importlib.util.find_spec("uvicorn") is None or importlib.util.find_spec("sse_starlette") is None:
        raise ConfigError(f"a page needs packages that are not installed; install them with {install_line('page')}")
    import uvicorn

    from p2p_diloco.app.page.access import Token
    from p2p_diloco.app.page.site import PagePlan, hosts_of, make_site

    with _listen(host or "127.0.0.1", port) as listening:
        bound = listening.getsockname()[1]
        token = None if is_public else secrets.token_hex(16)
        plan = PagePlan(
            folders=tuple(folders),
            is_public=is_public,
            hosts=frozenset() if is_public else hosts_of(bound),
            token=None if token is None else Token(token, bound),
            samples=samples,
        )
        address = f"http://{host or '127.0.0.1'}:{bound}/"
        print(LINE + address + ("" if token is None else f"?token={token}"), flush=True)
        server = uvicorn.Server(
            uvicorn.Config(
                make_site(plan),
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=is_public,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=1,
            )
        )
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    return 0


@contextmanager
def page_beside(folder: Path | None, show: Callable[[str], None]) -> Iterator[None]:
    """Run a page in a process of its own while inside, and show its address. A page that fails stops nothing.

    Args:
        folder: state directory; None: no page.
        show: prints a line; called by another thread.
    """
    if folder is None:
        yield
        return
    # Started as this command was, so that the page prints commands that can be pasted here.
    program = [sys.argv[0]] if Path(sys.argv[0]).name == NAME else ["-m", "p2p_diloco"]
    command = [sys.executable, *program, "page", str(folder), "--with-parent"]
    try:
        # It ends when its standard input closes, also if this process is killed.
        page = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        show(f"cannot start the page: {error.strerror}; the peer continues without it")
        yield
        return

    def pass_on() -> None:
        assert page.stdout is not None
        with page.stdout:
            for line in page.stdout:
                show(line.decode("utf-8", "replace").rstrip())

    reader = threading.Thread(target=pass_on, name="page", daemon=True)
    reader.start()
    try:
        yield
    finally:
        page.terminate()
        try:
            page.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            page.kill()
            page.wait()
        assert page.stdin is not None
        page.stdin.close()
        reader.join()


def _listen(host: str, port: int | None) -> socket.socket:
    ports = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + PORTS_TRIED), 0]
    for tried in ports:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, tried), family=family, backlog=128)
        except OSError as error:
            if port is None and tried != 0:
                continue
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StateError(
                f"cannot serve a page at {host}:{tried}: {reason}; perhaps another page runs there; name another port "
                "with --port, or leave --port out"
            ) from None
    raise AssertionError("the loop returns or raises")
