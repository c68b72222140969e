"""Peers that mean harm: a member whose node is sound and whose messages are not; a stranger with a key and frames."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, format_peer_id
from p2p_diloco.protocol.ballot import Promise, Vote
from p2p_diloco.protocol.entry import Entry
from p2p_diloco.protocol.heartbeat import Heartbeat
from p2p_diloco.protocol.messages import (
    ContentReply,
    EntryAbsent,
    HeadsReply,
    Message,
    Opening,
    Ping,
    Pong,
    Refusal,
    SpanReply,
    SpanRequest,
    SpanVector,
    decode_message,
    encode_message,
    is_bulk,
)
from p2p_diloco.testing.clock import MachineClock
from p2p_diloco.testing.network import Mutator, SimulatedTransport
from p2p_diloco.testing.process import Process, run_in
from p2p_diloco.testing.run import RUN, key_named, signer
from p2p_diloco.transport.link import Lane, TransportLimits

if TYPE_CHECKING:
    from p2p_diloco.testing.machine import Machine
    from p2p_diloco.testing.simulation import Simulation

DIAL_SECONDS = 5.0
BEAT_SECONDS = 2.0
DAY_SECONDS = 86_400.0

MutatorMaker = Callable[["Machine", random.Random], Mutator]


def _each(change: Callable[[Message, random.Random], Message | None]) -> MutatorMaker:
    """Return a maker of mutators that change one message into another, or into none."""

    def make(machine: Machine, rng: random.Random) -> Mutator:
        def mutate(to: PeerId, message: Message) -> list[bytes]:
            changed = change(message, rng)
            return [encode_message(changed)] if changed is not None else []

        return mutate

    return make


def _withhold_entries(message: Message, rng: random.Random) -> Message | None:
    return None if isinstance(message, Entry) else message


def _never_vote(message: Message, rng: random.Random) -> Message | None:
    return None if isinstance(message, Promise | Vote) else message


def _noise(message: Message, rng: random.Random) -> Message | None:
    """Contribute other numbers than were announced."""
    if isinstance(message, SpanVector):
        return replace(message, payload=rng.randbytes(len(message.payload)))
    return message


def _wrong_pieces(message: Message, rng: random.Random) -> Message | None:
    """Serve finite numbers that are not the span's."""
    if isinstance(message, SpanReply):
        numbers = np.frombuffer(message.piece, dtype="<f4") * np.float32(0.5) + np.float32(0.25)
        return replace(message, piece=numbers.astype("<f4").tobytes())
    return message


def _wrong_digests(message: Message, rng: random.Random) -> Message | None:
    """Say that one's spans hold other bytes than everybody's."""
    if isinstance(message, ContentReply):
        return replace(message, digests=tuple((head, Digest(rng.randbytes(32))) for head, _ in message.digests))
    return message


def _wrong_heads(message: Message, rng: random.Random) -> Message | None:
    """Say that one's spans stand further than everybody's."""
    if isinstance(message, HeadsReply):
        heads = tuple(replace(h, digest=Digest(rng.randbytes(32)), height=h.height + 3) for h in message.heads)
        return replace(message, heads=heads)
    return message


def _clock(message: Message, rng: random.Random) -> Message | None:
    if isinstance(message, Pong):
        return replace(message, clock_seconds=message.clock_seconds + DAY_SECONDS)
    return message


def _bogus_parents(message: Message, rng: random.Random) -> Message | None:
    """Name parents that nobody has."""
    if isinstance(message, Opening):
        return replace(
            message, spans=tuple(replace(offer, parent=Digest(rng.randbytes(32))) for offer in message.spans)
        )
    return message


def _truncated(machine: Machine, rng: random.Random) -> Mutator:
    def mutate(to: PeerId, message: Message) -> list[bytes]:
        frame = encode_message(message)
        return [frame[: rng.randrange(1, len(frame))]] if rng.random() < 0.02 else [frame]

    return mutate


def _deaf_to_half(machine: Machine, rng: random.Random) -> Mutator:
    """Speak to half of the swarm only."""
    salt = rng.randrange(256)

    def mutate(to: PeerId, message: Message) -> list[bytes]:
        return [] if (to[0] ^ salt) & 1 and not isinstance(message, Ping | Pong) else [encode_message(message)]

    return mutate


MUTATORS: dict[str, MutatorMaker] = {
    "withholds entries": _each(_withhold_entries),
    "never votes": _each(_never_vote),
    "contributes noise": _each(_noise),
    "serves wrong bytes": _each(_wrong_pieces),
    "names wrong digests": _each(_wrong_digests),
    "names wrong heads": _each(_wrong_heads),
    "is a day ahead": _each(_clock),
    "names bogus parents": _each(_bogus_parents),
    "truncates frames": _truncated,
    "speaks to half": _deaf_to_half,
}


@dataclass(frozen=True, slots=True)
class Outsider:
    """How the inspector knows a stranger, should anybody put it on a roster."""

    name: str
    peer: PeerId
    is_hostile: bool = True


class Stranger:
    """Somebody who is no member: dials whoever it knows, says that it is ready, and answers questions with lies."""

    def __init__(self, swarm: Simulation, seed: int) -> None:
        self._swarm = swarm
        self._rng = random.Random(seed)
        name = f"stranger{seed}"
        self._key = key_named(name)
        self._process = Process(MachineClock(swarm.loop.true_seconds()))
        self._sequence = 0
        self._task: asyncio.Task[None] | None = None
        self._transport: SimulatedTransport | None = None
        swarm.inspected[self._key.peer] = Outsider(name, self._key.peer)

    def begin(self) -> None:
        """Go on line."""
        run_in(self._process, self._begin)

    def _begin(self) -> None:
        self._transport = self._swarm.network.simulated_transport(
            self._key.peer, run=RUN, believes_open=False, process=self._process, limits=TransportLimits()
        )
        self._transport.listener = self
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._live(self._transport), name="stranger", context=self._process.context)

    def end(self) -> None:
        """Go away."""
        self._swarm.network.kill(self._key.peer)
        if self._task is not None:
            self._task.cancel()

    def linked_peers(self) -> frozenset[PeerId]:
        """Return whom it has reached."""
        return self._transport.linked_peers() if self._transport is not None else frozenset()

    async def _live(self, transport: SimulatedTransport) -> None:
        async with transport:
            while True:
                for machine in list(self._swarm.machines.values()):
                    if machine.runs and machine.peer not in transport.linked_peers():
                        await self._dial(transport, machine.peer)
                for peer in sorted(transport.linked_peers()):
                    self._say(peer, self._beat())
                    self._say(peer, self._lie())
                await asyncio.sleep(BEAT_SECONDS)

    async def _dial(self, transport: SimulatedTransport, peer: PeerId) -> None:
        deadline = asyncio.get_running_loop().time() + DIAL_SECONDS
        try:
            await transport.dial(peer, (f"/memory/1/p2p/{format_peer_id(peer)}",), deadline)
        except PeerError:
            return

    def _beat(self) -> Heartbeat:
        self._sequence += 1
        known = next((m.running.book.in_force for m in self._swarm.running() if m.running.book.in_force), None)
        beat = Heartbeat(
            run=RUN,
            peer=self._key.peer,
            incarnation=1,
            sequence=self._sequence,
            roster=known.digest() if known is not None else ZERO_DIGEST,
            roster_k=known.k if known is not None else 0,
            included_total=known.included_total if known is not None else 0,
            heads=(),
            ready=True,
            can_be_dialled=False,
            trains=True,
            steps=1,
            tokens=100,
            tokens_per_second=10.0,
            loss=1.0,
            share=8,
            signature=b"",
        )
        return beat.signed(signer(self._key.peer))

    def _lie(self) -> Message:
        rng = self._rng
        span = rng.choice(self._swarm.spans)
        lies: list[Message] = [
            EntryAbsent(span=span, parent=Digest(rng.randbytes(32))),
            SpanRequest(span=span, version=ZERO_DIGEST, offset=0, most_bytes=1 << 20),
            Refusal(round=rng.randrange(1000), newer_roster=True, reason=b"\x1b[31mno"),
            Pong(nonce=rng.randrange(1 << 16), clock_seconds=1e300),
            HeadsReply(fragment=span.fragment, heads=()),
            Ping(nonce=rng.randrange(1 << 16)),
        ]
        return rng.choice(lies)

    def _say(self, peer: PeerId, message: Message) -> None:
        if self._transport is not None:
            lane = Lane.BULK if is_bulk(message) else Lane.CONTROL
            self._transport.post(peer, encode_message(message), lane=lane, deadline=float("inf"))

    # -- the listener

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        """Answer a question about time with a lie."""
        message = decode_message(frame)
        if isinstance(message, Ping):
            self._say(peer, Pong(nonce=message.nonce, clock_seconds=self._swarm.loop.true_seconds() + DAY_SECONDS))
        elif isinstance(message, SpanRequest):
            self._say(peer, EntryAbsent(span=SpanId(0, 0), parent=message.version))

    def link_up(self, peer: PeerId) -> None:
        """Hear nothing."""

    def link_lost(self, peer: PeerId, reason: str) -> None:
        """Hear nothing."""

    def transport_lost(self, error: Exception) -> None:
        """Hear nothing."""
