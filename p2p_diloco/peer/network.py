"""Network access of a peer: over libp2p, or within one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeAlias

from p2p_diloco.config.settings import BOOTSTRAP_PORT, PeerSettings, bytes_per_second
from p2p_diloco.ids import Digest
from p2p_diloco.signing import SigningKey
from p2p_diloco.storage.kept_port import keep_port
from p2p_diloco.transport.directory import Directory
from p2p_diloco.transport.libp2p import Libp2pTransport
from p2p_diloco.transport.libp2p_directory import Libp2pDirectory
from p2p_diloco.transport.link import Transport, TransportLimits

OpenDirectory: TypeAlias = Callable[[Sequence[str]], AbstractAsyncContextManager[Directory]]
"""Opens the directory, given the addresses of peers to join through."""


class Network(Protocol):
    """Opens a peer's transport and directory."""

    def online(
        self, settings: PeerSettings, key: SigningKey, run: Digest, *, trains: bool, notify: Callable[[str], None]
    ) -> AbstractAsyncContextManager[tuple[Transport, OpenDirectory]]:
        """Open the transport for the block; the directory is opened later, once the manifest is known.

        Args:
            say: called with a sentence when the port of this peer changes.
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
        transport = Libp2pTransport(
            peer=key.peer,
            run=run,
            identity_path=settings.identity_file,
            host_maddrs=settings.host_maddrs,
            announce_maddrs=settings.announced_addresses(0),
            dial_out_only=settings.dial_out_only,
            map_port=not settings.no_port_mapping,
            limits=transport_limits(settings),
        )
        async with transport:
            yield transport, lambda initial: Libp2pDirectory(transport, initial_peers=initial)


def transport_limits(settings: PeerSettings) -> TransportLimits:
    """Return the bandwidth caps from the settings."""
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
