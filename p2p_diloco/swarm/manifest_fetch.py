"""A joiner's first question: the signed manifest of the run that its invite names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from p2p_diloco.errors import ConfigError, FrameError, NetworkError, NotInRun, PeerError
from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.messages import Introductions, ManifestReply, ManifestRequest, decode_message, encode_message
from p2p_diloco.transport.link import Lane, SilentListener, Transport

DIAL_SECONDS = 15.0
ANSWER_SECONDS = 10.0
RETRY_SECONDS = 1.0
MOST_INTRODUCED = 256
MOST_ANSWERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedManifest:
    """What a joiner gets from the first peer whose answer is good."""

    manifest: bytes
    records: tuple[bytes, ...]


class _WrongManifest(PeerError):
    """A peer answered, but not with the manifest of the run."""


class _ManifestListener(SilentListener):
    """Waits for a manifest from those who are asked, and keeps the introductions that come on the way."""

    def __init__(self, asked: Collection[PeerId]) -> None:
        self.came: asyncio.Queue[tuple[PeerId, bytes]] = asyncio.Queue(MOST_ANSWERS)
        self.records: tuple[bytes, ...] = ()
        self._asked = asked

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        if peer not in self._asked:
            return  # a stranger who dialled us has no say about the run
        try:
            message = decode_message(frame)
        except FrameError:
            return
        if isinstance(message, ManifestReply) and not self.came.full():
            self.came.put_nowait((peer, message.manifest))
        elif isinstance(message, Introductions):
            self.records = (*self.records, *message.records)[:MOST_INTRODUCED]


async def fetch_manifest(
    transport: Transport,
    bootstraps: Mapping[PeerId, tuple[str, ...]],
    timeout_seconds: float,
    check: Callable[[bytes], object] = len,
) -> FetchedManifest:
    """Ask the peers of an invite for the manifest until one gives a good answer.

    Args:
        check: raises `FrameError` or `ConfigError` when the bytes are not the manifest of the run; the next peer is
            asked then.
    Returns:
        The signed manifest's bytes, checked, and records of peers that came with it.
    Raises:
        NetworkError: nobody answered in time; the text says what happened at each.
        ConfigError: all answered that they do not take part in this run, or with a wrong manifest.
    """
    loop = asyncio.get_running_loop()
    listener = _ManifestListener(bootstraps.keys())
    before, transport.listener = transport.listener, listener
    trouble: dict[PeerId, PeerError] = {}
    until = loop.time() + timeout_seconds
    try:
        while loop.time() < until:
            for peer, addresses in bootstraps.items():
                answer = await _ask(transport, listener, peer, addresses, until, trouble, check)
                if answer is not None:
                    return FetchedManifest(manifest=answer, records=listener.records)
            if trouble and all(isinstance(error, NotInRun | _WrongManifest) for error in trouble.values()):
                raise ConfigError(f"{_told(trouble)}; check the invite with its sender")
            await asyncio.sleep(min(RETRY_SECONDS, max(until - loop.time(), 0.0)))
    finally:
        transport.listener = before
    raise NetworkError(
        f"none of the {len(bootstraps)} bootstrap peers answered within {timeout_seconds:.0f} s ({_told(trouble)}); is "
        "one running, is the invite complete, is your network blocking outgoing TCP?"
    )


async def _ask(
    transport: Transport,
    listener: _ManifestListener,
    peer: PeerId,
    addresses: tuple[str, ...],
    until: float,
    trouble: dict[PeerId, PeerError],
    check: Callable[[bytes], object],
) -> bytes | None:
    loop = asyncio.get_running_loop()
    try:
        await transport.dial(peer, addresses, min(loop.time() + DIAL_SECONDS, until))
        deadline = min(loop.time() + ANSWER_SECONDS, until)
        transport.post(peer, encode_message(ManifestRequest(nonce=0)), lane=Lane.CONTROL, deadline=deadline)
        async with asyncio.timeout_at(deadline):
            return await _good_answer(listener, peer, check, trouble)
    except PeerError as error:
        said = error
    except TimeoutError:
        said = PeerError("connected, but it sent no manifest")
    if peer not in trouble or loop.time() < until:  # a last attempt that was cut short says less than the one before
        trouble[peer] = said
    return None


async def _good_answer(
    listener: _ManifestListener,
    peer: PeerId,
    check: Callable[[bytes], object],
    trouble: dict[PeerId, PeerError],
) -> bytes:
    """Wait for a good answer, whoever of those asked gives it; a wrong one of `peer` ends the wait for it."""
    while True:
        sender, manifest = await listener.came.get()
        try:
            check(manifest)
        except (FrameError, ConfigError) as error:
            trouble[sender] = wrong = _WrongManifest(f"sent a wrong manifest: {error}")
            if sender == peer:
                raise wrong from None
            continue
        return manifest


def _told(trouble: Mapping[PeerId, PeerError]) -> str:
    return "; ".join(f"{short_peer_id(peer)}: {error}" for peer, error in trouble.items())
