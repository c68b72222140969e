"""Network access of a peer: over libp2p, or within one process."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeAlias

import psutil

from p2p_diloco.config.settings import BOOTSTRAP_PORT, PeerSettings, bytes_per_second
from p2p_diloco.ids import Digest
from p2p_diloco.signing import SigningKey
from p2p_diloco.storage.identity import keep_port
from p2p_diloco.transport.addresses import place_in, tcp_address
from p2p_diloco.transport.directory import Directory
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.libp2p_directory import Libp2pDirectory
from p2p_diloco.transport.link import Transport, TransportLimits

EVERYWHERE = "0.0.0.0"
MOST_LOCAL = 3
"""Maximum number of local addresses beside a public name: an invite names eight in all."""

OpenDirectory: TypeAlias = Callable[[Sequence[str]], AbstractAsyncContextManager[Directory]]
"""Opens the directory, given the addresses of peers to join through."""


class Network(Protocol):
    """Opens a peer's transport and directory."""

    def online(
        self, settings: PeerSettings, key: SigningKey, run: Digest, *, trains: bool, notify: Callable[[str], None]
    ) -> AbstractAsyncContextManager[tuple[Transport, OpenDirectory]]:
        """Open the transport for the block; the directory is opened later, once the manifest is known.

        Args:
            notify: called with a sentence when the port of this peer changes.
        """


class Libp2pNetwork:
    """Network access over libp2p."""

    @asynccontextmanager
    async def online(
        self, settings: PeerSettings, key: SigningKey, run: Digest, *, trains: bool, notify: Callable[[str], None]
    ) -> AsyncIterator[tuple[Transport, OpenDirectory]]:
        """Open the transport for the block."""
        if not settings.dial_out_only:
            settings = await _with_port(settings, key, trains=trains, notify=notify)
        announced = settings.announced_addresses(0)
        if announced and not settings.announce_maddrs:
            announced = with_local_ones(announced, settings.host_maddrs)
        transport = Libp2pTransport(
            peer=key.peer,
            run=run,
            identity_path=settings.identity_file,
            host_maddrs=settings.host_maddrs,
            announce_maddrs=announced,
            dial_out_only=settings.dial_out_only,
            map_port=not settings.no_port_mapping,
            limits=transport_limits(settings),
        )
        async with transport:
            yield transport, lambda initial: Libp2pDirectory(transport, initial_peers=initial)


def with_local_ones(announced: Sequence[str], listening: Sequence[str]) -> tuple[str, ...]:
    """Return the announced addresses, and after them those of this machine's own networks.

    Many routers do not turn packets to their public address back, so machines on one LAN need the local address.
    """
    hosts = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family is socket.AF_INET and not ipaddress.ip_address(address.address).is_loopback
    ]
    places = (place for address in listening if (place := place_in(address)) is not None)
    ports = [port for host, port in places if host == EVERYWHERE]
    local = (tcp_address(host, port) for port in ports for host in hosts[:MOST_LOCAL])
    return tuple(dict.fromkeys((*announced, *local)))


def transport_limits(settings: PeerSettings) -> TransportLimits:
    return TransportLimits(
        upload_bytes_per_second=bytes_per_second(settings.max_upload),
        download_bytes_per_second=bytes_per_second(settings.max_download),
    )


async def _with_port(
    settings: PeerSettings, key: SigningKey, *, trains: bool, notify: Callable[[str], None]
) -> PeerSettings:
    """Return the settings with the addresses to listen on, at this peer's previous port unless they name one.

    A new bootstrap peer uses the well-known port, unless the settings name a port or hosts.
    """
    is_told = settings.port is not None or bool(settings.host_maddrs)
    listening = await keep_port(
        settings.listen_addresses(0),
        folder=settings.state_directory,
        peer=key.peer,
        preferred=None if trains or is_told else BOOTSTRAP_PORT,
        notify=notify,
    )
    return settings.model_copy(update={"host_maddrs": listening, "port": None})
