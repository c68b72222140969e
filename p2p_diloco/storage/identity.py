"""A peer's identity: its key, its lock, its port and its name, which are the same at every start, in whatever run.

The key makes its id. The port keeps its known addresses valid. A new peer derives its port from its id: two state
directories on one machine have different ones, so neither takes the other's port while that is not running. The range
is below the ephemeral ports, so that outgoing connections of other programs do not take it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from p2p_diloco.config.invite import port_of
from p2p_diloco.config.key_file import create_key_file, read_key_file
from p2p_diloco.errors import ConfigError, NetworkError, StateError
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.wire.peer_name import MOST_NAME_BYTES, decode_name, encode_name
from p2p_diloco.signing import SigningKey
from p2p_diloco.storage.whole_file import replace_file
from p2p_diloco.transport.p2pd import check_ports_are_free, not_for_children

PORT_FILE, NAME_FILE = "port", "name"
FIRST_PORT, LAST_PORT = 20_000, 29_999
OLD_DAEMON_SECONDS = 3.0
"""Time for which the libp2p daemon of a killed peer may keep listening."""

_PROBE_SECONDS = 0.1
_CANDIDATES = 64
_LOWEST_PORT, _HIGHEST_PORT = 1, 65535


def load_or_create_identity(path: Path) -> SigningKey:
    """Return the key in `path`; create one, readable only by its owner, if there is none.

    Two processes that start at once with the same path get the same key. libp2p's daemon reads the same file.

    Raises:
        ConfigError: the file cannot be read, or is not a key; it is not changed.
        StateError: there is none, and it cannot be written.
    """
    if not _exists(path):
        try:
            return create_key_file(path)
        except ConfigError:
            if not _exists(path):
                raise
    return read_key_file(path)


@contextmanager
def lock_identity(path: Path) -> Iterator[None]:
    """Lock the identity in `path` for this process; the lock ends with the process, however it exits.

    Forked children, such as DataLoader workers, do not inherit the lock, because they may outlive a killed parent.

    Two peers with the same identity would receive each other's messages, and neither would work.

    Raises:
        ConfigError: another process on this machine holds the lock, or the file cannot be locked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot open the identity file {path}: {error.strerror}") from None
    try:
        _lock(descriptor, path)
        not_for_children.add(descriptor)
        yield
    finally:
        not_for_children.discard(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise ConfigError(
                f"another process uses the identity {path}; stop it, or give this peer its own with --state-directory"
            ) from None
        raise ConfigError(
            f"cannot lock the identity file {path}: {error.strerror}; keep it on a local disk, see --identity-path"
        ) from None


def read_name(folder: Path) -> str:
    """Return the name that this peer's owner has stored in a state directory; empty if there is none.

    Raises:
        StateError: the file holds no name, or cannot be read.
    """
    path = folder / NAME_FILE
    try:
        with path.open("rb") as file:
            content = file.read(MOST_NAME_BYTES + 2).removesuffix(b"\n")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; check the folder and the disk") from None
    name = decode_name(content)
    if not name:
        raise StateError(f"{path} holds no name; set one with `p2p-diloco id --name`, or remove the file")
    return name


def write_name(folder: Path, name: str) -> None:
    """Store a name, or remove the stored one if `name` is empty.

    Raises:
        ConfigError: it is not a name.
        StateError: it cannot be written.
    """
    path, encoded = folder / NAME_FILE, encode_name(name)
    try:
        if encoded:
            replace_file(path, encoded + b"\n")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}; check the folder and the disk") from None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise ConfigError(f"cannot look for the identity file {path}: {error.strerror}") from None


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
        notify: called with a sentence when this peer's port changes.
    """
    kept = kept_port(folder)
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


def kept_port(folder: Path) -> int | None:
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
        replace_file(path, f"{port}\n".encode("ascii"))
    except OSError as error:
        text = (
            f"cannot write {path}: {error.strerror}; after a restart this peer may listen on another port than {port}"
        )
        notify(text)
