"""Fetches the signed manifest of the run that the invite names: a joiner's first request.

Any peer of the run can answer. Several peers are asked at once, so that dead addresses do not delay the answer of a
live one. Peers in the invite come first, then those kept from earlier starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from p2p_diloco.errors import ConfigError, DialFailure, FrameError, NobodyAnswered, NotInRun, NotReached, PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.wire.messages import (
    Introductions,
    ManifestReply,
    ManifestRequest,
    decode_message,
    encode_message,
)
from p2p_diloco.transport.addresses import place_in
from p2p_diloco.transport.link import Lane, Transport, TransportListener

DIAL_SECONDS = 10.0
LOOK_SECONDS = 5.0
"""Time in which an address that cannot be dialled is looked at alone, for the reason."""
ANSWER_SECONDS = 10.0
RETRY_SECONDS = 5.5
"""Pause before a retry: for this long libp2p does not redial an address that has just failed."""
REQUESTED_AT_ONCE = 64
"""More than an invite and the addresses of an earlier start name together."""
LIKELIEST = (
    (DialFailure.OTHER_PEER, "another peer has this address now; ask for a new invite"),
    (DialFailure.OTHER_PROTOCOL, "another program answers at this address; check address and port of the bootstrap"),
    (
        DialFailure.SILENT,
        "the bootstrap hangs, or another program has its port; ask its owner to start it again, or for a new invite",
    ),
    (DialFailure.NO_NAME, "the name has changed, or this machine's DNS is down; check both, or ask for a new invite"),
    (DialFailure.NO_ROUTE, "this machine is not connected to that network; check its network"),
    (
        DialFailure.TIMED_OUT,
        "the bootstrap's machine is off, or its router does not forward this port to it, or this network blocks "
        "outgoing TCP",
    ),
    (DialFailure.REFUSED, "no bootstrap is running there; start it, or ask for a new invite"),
)
"""The likeliest cause of a failed join: that of the first kind of failure in this order."""
MOST_INTRODUCED = 256
MOST_ANSWERS = 16
_MOST_NAMED = 8


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


class _ManifestListener(TransportListener):
    """Collects manifests from the peers that were asked, and introductions that arrive meanwhile."""

    def __init__(self, peers: Collection[PeerId]) -> None:
        self.received = {peer: asyncio.Queue[bytes](MOST_ANSWERS) for peer in peers}
        self.records: tuple[bytes, ...] = ()

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        if peer not in self.received:
            return  # a stranger that dialled us must not influence what we join
        try:
            message = decode_message(frame)
        except FrameError:
            return
        if isinstance(message, ManifestReply) and not self.received[peer].full():
            self.received[peer].put_nowait(message.manifest)
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
        NobodyAnswered: no peer answered in time, or every address refused; the text gives the failure at each.
        ConfigError: every peer answered that it does not take part in this run, or sent a wrong manifest.
    """
    listener = _ManifestListener(peers.keys())
    before = transport.listener
    transport.serve(listener)
    until = asyncio.get_running_loop().time() + timeout_seconds
    search = _Search(transport, listener, until, check, len(peers))
    tasks = [asyncio.ensure_future(search.fetch_from(peer, addresses)) for peer, addresses in peers.items()]
    try:
        for answered in asyncio.as_completed(tasks):
            found = await answered
            if found is not None:
                peer, manifest = found
                return FetchedManifest(peer=peer, manifest=manifest, records=listener.records)
    finally:
        transport.serve(before)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise search.failed(f" within {timeout_seconds:.0f} s")


@dataclass(frozen=True, slots=True)
class _Search:
    """One search for a manifest: the deadline, and the last failure at each peer and each of its addresses."""

    transport: Transport
    listener: _ManifestListener
    until: float
    check: Callable[[bytes], object]
    num_peers: int
    trouble: dict[PeerId, PeerError] = field(default_factory=dict)
    failures: dict[PeerId, list[NotReached]] = field(default_factory=dict)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REQUESTED_AT_ONCE))

    async def fetch_from(self, peer: PeerId, addresses: tuple[str, ...]) -> tuple[PeerId, bytes] | None:
        """Ask one peer repeatedly; return None at the deadline.

        Raises:
            ConfigError: every peer has answered that it does not take part in the run, or sent a wrong manifest.
            NobodyAnswered: every address of every peer has refused the connection.
        """
        loop = asyncio.get_running_loop()
        while loop.time() < self.until:
            try:
                async with self.slots:
                    return peer, await self._fetch_once(peer, addresses)
            except PeerError as error:
                # A last attempt that the deadline cut short explains less than the one before.
                if peer not in self.trouble or loop.time() < self.until:
                    self.trouble[peer] = error
                self._raise_if_invite_is_wrong()
                await self._look_at(peer, addresses)
                self._raise_if_refused()
            await asyncio.sleep(min(RETRY_SECONDS, max(self.until - loop.time(), 0.0)))
        self.trouble.setdefault(peer, PeerError("there was no time left to ask it"))
        return None

    def _raise_if_invite_is_wrong(self) -> None:
        errors = self.trouble.values()
        if len(errors) == self.num_peers and all(isinstance(error, NotInRun | _WrongManifest) for error in errors):
            raise ConfigError(f"{format_troubles(self.trouble)}; check the invite with its sender")

    async def _look_at(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Find out why each address fails; libp2p says so only once, and then waits."""
        loop = asyncio.get_running_loop()
        until = min(loop.time() + LOOK_SECONDS, self.until)
        places = dict.fromkeys(place for address in addresses if (place := place_in(address)) is not None)
        found = await asyncio.gather(*(self.transport.why_unreachable(peer, *place, until) for place in places))
        if peer not in self.failures or loop.time() < self.until:  # as above: one that was cut short finds only that
            self.failures[peer] = [failure for failure in found if isinstance(failure, NotReached)]

    def _raise_if_refused(self) -> None:
        """End if nothing listens at any address: waiting would not change that."""
        kinds = {failure.failure for failures in self.failures.values() for failure in failures}
        if len(self.failures) == self.num_peers and all(self.failures.values()) and kinds == {DialFailure.REFUSED}:
            raise self.failed("")

    def failed(self, when: str) -> NobodyAnswered:
        """Return an error with what failed at each peer, and the likeliest cause."""
        failed: dict[PeerId, object] = dict(self.trouble)
        for peer, failures in self.failures.items():
            if failures:
                failed[peer] = ", ".join(map(str, failures))
        which = f"none of the {self.num_peers} peers asked answered"
        if self.num_peers == 1:
            which = "the one peer asked did not answer"
        tried = tuple(failure for failures in self.failures.values() for failure in failures)
        kinds = {failure.failure for failure in tried}
        cause = next(
            (text for kind, text in LIKELIEST if kind in kinds), "the peers of the invite are gone; ask for a new one"
        )
        return NobodyAnswered(f"{which}{when} ({format_troubles(failed)}); most likely {cause}", tried)

    async def _fetch_once(self, peer: PeerId, addresses: tuple[str, ...]) -> bytes:
        loop = asyncio.get_running_loop()
        await self.transport.dial(peer, addresses, min(loop.time() + DIAL_SECONDS, self.until))
        deadline = min(loop.time() + ANSWER_SECONDS, self.until)
        self.transport.post(peer, encode_message(ManifestRequest(nonce=0)), lane=Lane.CONTROL, deadline=deadline)
        try:
            async with asyncio.timeout_at(deadline):
                manifest = await self.listener.received[peer].get()
        except TimeoutError:
            raise PeerError("connected, but it sent no manifest") from None
        try:
            self.check(manifest)
        except (FrameError, ConfigError) as error:
            raise _WrongManifest(f"sent a wrong manifest: {error}") from None
        return manifest


def format_troubles(trouble: Mapping[PeerId, object]) -> str:
    """Return the failure at each peer as text, for the first few of many."""
    lines = []
    for peer, error in list(trouble.items())[:_MOST_NAMED]:
        name = short_peer_id(peer)
        lines.append(f"{name}: {str(error).removeprefix(f'{name} ')}")
    left_out = len(trouble) - len(lines)
    return "; ".join([*lines, *([f"and {left_out} more"] if left_out else [])])
