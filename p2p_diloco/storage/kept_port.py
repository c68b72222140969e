"""The port that a peer listens on: the same at every start, so that its known addresses stay valid.

It is stored in the state directory. A new peer derives its port from its identity: two state directories on one machine
have different identities, so neither takes the other's port while that is not running. The range is below the ephemeral
ports, so that outgoing connections of other programs do not take it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from p2p_diloco.config.invite import port_of
from p2p_diloco.errors import NetworkError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.storage.whole_file import replace_file, write_all
from p2p_diloco.transport.p2pd import check_ports_are_free

PORT_FILE = "port"
FIRST_PORT, LAST_PORT = 20_000, 29_999
OLD_DAEMON_SECONDS = 3.0
"""Time for which the libp2p daemon of a killed peer may keep listening."""

_PROBE_SECONDS = 0.1
_CANDIDATES = 64
_LOWEST_PORT, _HIGHEST_PORT = 1, 65535


async def keep_port(
    host_maddrs: Sequence[str],
    *,
    folder: Path,
    peer: PeerId,
    preferred: int | None = None,
    notify: Callable[[str], None],
) -> tuple[str, ...]:
    """Return the addresses to listen on, with the stored port in place of port 0.

    Args:
        host_maddrs: addresses to listen on, without peer id. An explicit port is kept.
        folder: the state directory, in which the port is stored.
        peer: determines the port of a first start.
        preferred: port of a first start if it is free, such as the bootstrap port.
        say: called with a sentence when this peer's port changes.
    """
    kept = _read(folder)
    named = {port_of(address) for address in host_maddrs} - {0}
    if all(map(port_of, host_maddrs)):
        if len(named) == 1 and kept not in named:
            _write(folder, port_of(host_maddrs[0]), notify)
        return tuple(host_maddrs)
    if kept is not None and kept not in named and await _comes_free(_at(host_maddrs, kept)):
        return _at(host_maddrs, kept)
    for port in _candidates(peer, None if kept is not None else preferred):
        if port != kept and port not in named and _is_free(_at(host_maddrs, port)):
            before = kept if kept is not None else preferred
            if before not in (None, port):
                notify(
                    f"port {before} is used by another program; this peer now listens on {port} and keeps that port; "
                    f"open it wherever port {before} was open"
                )
            _write(folder, port, notify)
            return _at(host_maddrs, port)
    return tuple(host_maddrs)  # let the system choose


def _at(host_maddrs: Sequence[str], port: int) -> tuple[str, ...]:
    return tuple(re.sub(r"/tcp/0$", f"/tcp/{port}", address) for address in host_maddrs)


def _candidates(peer: PeerId, preferred: int | None) -> Iterator[int]:
    if preferred is not None:
        yield preferred
    for number in range(_CANDIDATES):
        draw = int.from_bytes(sha256(b"port", peer, number.to_bytes(2, "little"))[:8], "little")
        yield FIRST_PORT + draw % (LAST_PORT - FIRST_PORT + 1)


async def _comes_free(host_maddrs: Sequence[str]) -> bool:
    """Return whether the stored port is free, or becomes free soon: a peer killed a moment ago may still hold it."""
    for _ in range(round(OLD_DAEMON_SECONDS / _PROBE_SECONDS)):
        if _is_free(host_maddrs):
            return True
        await asyncio.sleep(_PROBE_SECONDS)
    return _is_free(host_maddrs)


def _is_free(host_maddrs: Sequence[str]) -> bool:
    try:
        check_ports_are_free(host_maddrs)
    except NetworkError:
        return False
    return True


def _read(folder: Path) -> int | None:
    """Return the stored port; None if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        with (folder / PORT_FILE).open("rb") as file:
            port = int(file.read(16).decode("ascii"))
        if _LOWEST_PORT <= port <= _HIGHEST_PORT:
            return port
    return None


def _write(folder: Path, port: int, notify: Callable[[str], None]) -> None:
    path = folder / PORT_FILE
    try:
        replace_file(path, lambda draft: write_all(draft, f"{port}\n".encode("ascii")))
    except OSError as error:
        text = (
            f"cannot write {path}: {error.strerror}; after a restart this peer may listen on another port than {port}"
        )
        notify(text)
