"""Hostile peers: a member whose node is sound but whose messages are altered, and a stranger with only a key."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.member import Declaration
from p2p_diloco.protocol.wire.messages import (
    EntryAbsent,
    HeadsReply,
    Message,
    Opening,
    Ping,
    Pong,
    Refusal,
    SpanRequest,
    SpanVector,
    decode_message,
    encode_message,
    is_bulk,
)
from p2p_diloco.transport.link import Lane, TransportLimits, TransportListener
from simulator.clock import MachineClock
from simulator.lies import (
    DAY_SECONDS,
    Change,
    a_day_ahead,
    degraded_child,
    false_bytes,
    false_contents,
    false_heads,
    false_parents,
    lone_vote,
    no_entries,
    no_votes,
    noise,
)
from simulator.network import Mutator, SimulatedTransport
from simulator.process import OUTSIDE, Process
from simulator.run import RUN, key_named, proof_of, sign_as, signer

if TYPE_CHECKING:
    from simulator.machine import Machine
    from simulator.simulation import Simulation

DIAL_SECONDS = 5.0
BEAT_SECONDS = 2.0
SIGNED_SHARE = 0.1
"""Share of its heartbeats after which a liar sends a roster that it has signed alone."""

MutatorMaker = Callable[["Machine", random.Random], Mutator]


def telling(change: Change) -> Mutator:
    """Return a mutator that changes each message into another, or drops it."""

    def mutate(to: PeerId, message: Message) -> list[Message]:
        changed = change(message)
        return [changed] if changed is not None else []

    return mutate


def _each(change: Change) -> MutatorMaker:
    return lambda machine, rng: telling(change)


def claims_reach(*provers: PeerId, is_forged: bool = False) -> MutatorMaker:
    """Return a maker of mutators that claim to be reachable, and open rounds without contributing.

    Args:
        provers: peers that sign the proofs; if none are given, the node's own proofs are kept.
        is_forged: whether the proofs name these provers although none of them has signed.
    """

    def make(machine: Machine, rng: random.Random) -> Mutator:
        def claim(message: Message) -> Message | None:
            match message:
                case Opening():
                    return replace(message, spans=tuple(replace(offer, sends=False) for offer in message.spans))
                case SpanVector() | Entry():
                    return None
                case Declaration() if message.peer == machine.peer and provers:
                    proofs = tuple(proof_of(machine.peer, prover, message.cycle) for prover in provers)
                    if is_forged:
                        proofs = tuple(replace(proof, signature=rng.randbytes(64)) for proof in proofs)
                    word = replace(message, proofs=proofs)
                    return replace(word, signature=sign_as(machine.peer, word.statement()))
                case _:
                    return message

        return telling(claim)

    return make


def _truncated(machine: Machine, rng: random.Random) -> Mutator:
    def mutate(to: PeerId, message: Message) -> list[Message | bytes]:
        if rng.random() >= 0.02:
            return [message]
        frame = encode_message(message)
        return [frame[: rng.randrange(1, len(frame))]]

    return mutate


def _deaf_to_half(machine: Machine, rng: random.Random) -> Mutator:
    """Send messages to only half of the swarm."""
    salt = rng.randrange(256)

    def mutate(to: PeerId, message: Message) -> list[Message]:
        return [] if (to[0] ^ salt) & 1 and not isinstance(message, Ping | Pong) else [message]

    return mutate


def _signs_alone(machine: Machine, rng: random.Random) -> Mutator:
    """Certify children of one of the last rosters alone, which list only itself and claim all entries possible."""

    def mutate(to: PeerId, message: Message) -> list[Message]:
        engine, now = machine.engine, machine.swarm_now()
        if not isinstance(message, Heartbeat) or engine is None or engine.book.in_force is None:
            return [message]
        if rng.random() >= SIGNED_SHARE:
            return [message]
        parent = rng.choice(engine.book.chain()[-3:]).roster
        mine, clock = parent.member(machine.peer), engine.rules.clock
        if mine is None:
            return [message]
        cycle = max(clock.cycle(clock.round_at(now)), parent.cycle)
        height = parent.height + (cycle - parent.cycle + 2) * engine.rules.num_all_spans
        child = degraded_child(parent, mine, cycle, height=height)
        return [message, lone_vote(child, clock.ballot_at(now), machine.peer, signer(machine.peer))]

    return mutate


MUTATORS: dict[str, MutatorMaker] = {
    "withholds entries": _each(no_entries),
    "never votes": _each(no_votes),
    "contributes noise": _each(noise),
    "serves wrong bytes": _each(false_bytes),
    "names wrong digests": _each(false_contents),
    "names wrong heads": _each(false_heads),
    "is a day ahead": _each(a_day_ahead),
    "names bogus parents": _each(false_parents),
    "truncates frames": _truncated,
    "speaks to half": _deaf_to_half,
    "signs rosters alone": _signs_alone,
}


@dataclass(frozen=True, slots=True)
class Outsider:
    """A stranger as the inspector knows it, in case members put it on a roster."""

    name: str
    peer: PeerId
    is_hostile: bool = True

    def is_there(self, incarnation: int) -> bool:
        """Return False: it is never an honest member that wants to stay."""
        return False

    def linked_seconds(self, peer: PeerId) -> float:
        """Return 0: what it is linked with is not known."""
        return 0.0


class Caller(TransportListener):
    """A peer with a key but no engine: it dials, sends the messages it is given, and records those it receives.

    Enter it with `async with`. It is not on any roster unless members put it there.

    Attributes:
        heard: received messages, with their senders.
        answer: returns the immediate replies to a message from a peer.
    """

    def __init__(self, swarm: Simulation, name: str = "caller") -> None:
        self.swarm = swarm
        self.key = key_named(name)
        self.peer = self.key.peer
        self.heard: list[tuple[PeerId, Message]] = []
        self.answer: Callable[[PeerId, Message], Iterable[Message]] = lambda peer, message: ()
        swarm.inspected[self.peer] = Outsider(name, self.peer)
        clock = MachineClock(0.0)  # shows true seconds
        self.transport: SimulatedTransport = swarm.network.simulated_transport(
            self.peer, run=RUN, believes_open=False, process=Process(clock), limits=TransportLimits()
        )
        self.transport.serve(self)

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.swarm.network.kill(self.peer)

    async def dial(self, *machines: Machine) -> None:
        """Open links to these machines."""
        for machine in machines:
            deadline = self.swarm.loop.true_seconds() + DIAL_SECONDS
            await self.transport.dial(machine.peer, machine.addresses, deadline)

    def say(self, peer: PeerId, message: Message) -> None:
        """Send a message."""
        self.send(peer, encode_message(message), Lane.BULK if is_bulk(message) else Lane.CONTROL)

    def send(self, peer: PeerId, frame: bytes, lane: Lane) -> None:
        """Send a frame, valid or not."""
        self.transport.post(peer, frame, lane=lane, deadline=self.swarm.loop.true_seconds() + DIAL_SECONDS)

    async def ask(self, peer: PeerId, question: Message, kind: type[Any], within: float = 5.0) -> Any:
        """Send a message and return the next message of a kind that is received."""
        before = len(self.of(kind))
        self.say(peer, question)
        await self.swarm.until(lambda: len(self.of(kind)) > before, within, step=0.05)
        return self.of(kind)[before]

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the received messages of a kind."""
        return [message for _, message in self.heard if isinstance(message, kind)]

    def heartbeat(self, sequence: int, **changes: Any) -> Heartbeat:
        """Return a signed heartbeat that claims to be ready, under the roster that members follow."""
        known = next((m.running.book.in_force for m in self.swarm.running() if m.running.book.in_force), None)
        beat = Heartbeat(
            run=RUN,
            peer=self.peer,
            incarnation=1,
            sequence=sequence,
            roster=known.digest() if known is not None else ZERO_DIGEST,
            roster_k=known.k if known is not None else 0,
            heads=(),
            ready=True,
            takes_entries=True,
            can_be_dialled=False,
            trains=True,
            steps=1,
            tokens=100,
            tokens_per_second=10.0,
            loss=1.0,
            share=8,
            signature=b"",
        )
        return replace(beat, **changes).signed(signer(self.peer))

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        """Record a message and reply to it."""
        message = decode_message(frame)
        self.heard.append((peer, message))
        for answer in self.answer(peer, message):
            self.say(peer, answer)


class Stranger(Caller):
    """A non-member that dials every running machine, claims to be ready, and answers requests with lies."""

    def __init__(self, swarm: Simulation, seed: int) -> None:
        super().__init__(swarm, f"stranger{seed}")
        self.answer = self._lies
        self._rng = random.Random(seed)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Go online."""
        self._task = asyncio.get_running_loop().create_task(self._live(), name="stranger", context=OUTSIDE.copy())

    def end(self) -> None:
        """Go offline."""
        self.swarm.network.kill(self.peer)
        if self._task is not None:
            self._task.cancel()

    def linked_peers(self) -> frozenset[PeerId]:
        """Return the peers that it is linked to."""
        return self.transport.linked_peers()

    async def _live(self) -> None:
        async with self:
            for sequence in count(1):
                for machine in list(self.swarm.machines.values()):
                    if machine.runs and machine.peer not in self.linked_peers():
                        with suppress(PeerError):
                            await self.dial(machine)
                for peer in sorted(self.linked_peers()):
                    self.say(peer, self.heartbeat(sequence))
                    self.say(peer, self._lie())
                self.heard.clear()
                await asyncio.sleep(BEAT_SECONDS)

    def _lie(self) -> Message:
        rng = self._rng
        span = rng.choice(self.swarm.spans)
        lies: list[Message] = [
            EntryAbsent(span=span, parent=Digest(rng.randbytes(32))),
            SpanRequest(span=span, version=ZERO_DIGEST, offset=0, most_bytes=1 << 20),
            Refusal(round=rng.randrange(1000), newer_roster=True, reason=b"\x1b[31mno"),
            Pong(nonce=rng.randrange(1 << 16), clock_seconds=1e300),
            HeadsReply(fragment=span.fragment, heads=()),
            Ping(nonce=rng.randrange(1 << 16)),
        ]
        return rng.choice(lies)

    def _lies(self, peer: PeerId, message: Message) -> Iterable[Message]:
        match message:
            case Ping():
                yield Pong(nonce=message.nonce, clock_seconds=self.swarm.loop.true_seconds() + DAY_SECONDS)
            case SpanRequest():
                yield EntryAbsent(span=SpanId(0, 0), parent=message.version)
