"""Fetches the signed manifest of the run that the invite names: a joiner's first request.

Any peer of the run can answer. Several peers are asked at once, so that dead addresses do not delay the answer of a
live one. Peers in the invite come first, then those kept from earlier starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from p2p_diloco.errors import ConfigError, FrameError, NetworkError, NotInRun, PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.wire.messages import (
    Introductions,
    ManifestReply,
    ManifestRequest,
    decode_message,
    encode_message,
)
from p2p_diloco.transport.link import Lane, SilentListener, Transport

DIAL_SECONDS = 10.0
ANSWER_SECONDS = 10.0
RETRY_SECONDS = 5.5
"""Pause before a retry: for this long libp2p does not redial an address that has just failed."""
ASKED_AT_ONCE = 16
MOST_INTRODUCED = 256
MOST_ANSWERS = 16
_MOST_TOLD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedManifest:
    """The first valid answer.

    Attributes:
        peer: the peer that sent it.
        manifest: the signed manifest, checked.
        records: peer records that arrived meanwhile.
    """

    peer: PeerId
    manifest: bytes
    records: tuple[bytes, ...]


class _WrongManifest(PeerError):
    """A peer answered, but not with the manifest of the run."""


class _ManifestListener(SilentListener):
    """Collects manifests from the peers that were asked, and introductions that arrive meanwhile."""

    def __init__(self, asked: Collection[PeerId]) -> None:
        self.came = {peer: asyncio.Queue[bytes](MOST_ANSWERS) for peer in asked}
        self.records: tuple[bytes, ...] = ()

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        if peer not in self.came:
            return  # a stranger that dialled us must not influence what we join
        try:
            message = decode_message(frame)
        except FrameError:
            return
        if isinstance(message, ManifestReply) and not self.came[peer].full():
            self.came[peer].put_nowait(message.manifest)
        elif isinstance(message, Introductions):
            self.records = (*self.records, *message.records)[:MOST_INTRODUCED]


async def fetch_manifest(
    transport: Transport,
    peers: Mapping[PeerId, tuple[str, ...]],
    timeout_seconds: float,
    check: Callable[[bytes], object] = len,
) -> FetchedManifest:
    """Ask peers for the manifest, several at once, until one sends a valid one.

    Args:
        peers: addresses of each peer, in the order in which to ask.
        check: raises `FrameError` or `ConfigError` if the bytes are not the manifest of the run.
    Raises:
        NetworkError: no peer answered in time; the text gives the failure at each.
        ConfigError: every peer answered that it does not take part in this run, or sent a wrong manifest.
    """
    listener = _ManifestListener(peers.keys())
    before, transport.listener = transport.listener, listener
    until = asyncio.get_running_loop().time() + timeout_seconds
    asking = _Asking(transport, listener, until, check, len(peers))
    tasks = [asyncio.ensure_future(asking.ask(peer, addresses)) for peer, addresses in peers.items()]
    try:
        for answered in asyncio.as_completed(tasks):
            found = await answered
            if found is not None:
                peer, manifest = found
                return FetchedManifest(peer=peer, manifest=manifest, records=listener.records)
    finally:
        transport.listener = before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    told = format_troubles(asking.trouble)
    asked = f"none of the {len(peers)} peers asked answered" if len(peers) > 1 else "the one peer asked did not answer"
    raise NetworkError(
        f"{asked} within {timeout_seconds:.0f} s ({told}); is one running, is the invite complete, is your network "
        "blocking outgoing TCP?"
    )


class _Asking:
    """One search for a manifest: the limit of concurrent attempts, the deadline, and the last failure at each peer."""

    def __init__(
        self,
        transport: Transport,
        listener: _ManifestListener,
        until: float,
        check: Callable[[bytes], object],
        num_peers: int,
    ) -> None:
        self.trouble: dict[PeerId, PeerError] = {}
        self._transport = transport
        self._listener = listener
        self._until = until
        self._check = check
        self._num_peers = num_peers
        self._turns = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(self, peer: PeerId, addresses: tuple[str, ...]) -> tuple[PeerId, bytes] | None:
        """Ask one peer repeatedly; return None at the deadline.

        Raises:
            ConfigError: every peer has answered that it does not take part in the run, or sent a wrong manifest.
        """
        loop = asyncio.get_running_loop()
        while loop.time() < self._until:
            try:
                async with self._turns:
                    return peer, await self._ask_once(peer, addresses)
            except PeerError as error:
                # A last attempt that the deadline cut short explains less than the one before.
                if peer not in self.trouble or loop.time() < self._until:
                    self.trouble[peer] = error
                self._raise_if_invite_is_wrong()
            await asyncio.sleep(min(RETRY_SECONDS, max(self._until - loop.time(), 0.0)))
        self.trouble.setdefault(peer, PeerError("there was no time left to ask it"))
        return None

    def _raise_if_invite_is_wrong(self) -> None:
        errors = self.trouble.values()
        if len(errors) == self._num_peers and all(isinstance(error, NotInRun | _WrongManifest) for error in errors):
            raise ConfigError(f"{format_troubles(self.trouble)}; check the invite with its sender")

    async def _ask_once(self, peer: PeerId, addresses: tuple[str, ...]) -> bytes:
        loop = asyncio.get_running_loop()
        await self._transport.dial(peer, addresses, min(loop.time() + DIAL_SECONDS, self._until))
        deadline = min(loop.time() + ANSWER_SECONDS, self._until)
        self._transport.post(peer, encode_message(ManifestRequest(nonce=0)), lane=Lane.CONTROL, deadline=deadline)
        try:
            async with asyncio.timeout_at(deadline):
                manifest = await self._listener.came[peer].get()
        except TimeoutError:
            raise PeerError("connected, but it sent no manifest") from None
        try:
            self._check(manifest)
        except (FrameError, ConfigError) as error:
            raise _WrongManifest(f"sent a wrong manifest: {error}") from None
        return manifest


def format_troubles(trouble: Mapping[PeerId, object]) -> str:
    """Return the failure at each peer as text, for the first few of many."""
    lines = []
    for peer, error in list(trouble.items())[:_MOST_TOLD]:
        name = short_peer_id(peer)
        lines.append(f"{name}: {str(error).removeprefix(f'{name} ')}")
    left_out = len(trouble) - len(lines)
    return "; ".join([*lines, *([f"and {left_out} more"] if left_out else [])])
