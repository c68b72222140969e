"""A hostile non-member in its own process: `python hostile_peer.py ORDER.json`.

It has keys and frames, but no part in the run: each identity links to the peers named in the order, over the real
transport, and runs one attack until it is killed. Once a second it prints how many links each identity has, and what it
has sent and received, by kind. It dies with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import itertools
import json
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import uvloop

from p2p_diloco.config.invite import parse_peer_address
from p2p_diloco.errors import FrameError, PeerError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, format_peer_id, sha256, short_peer_id
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.heartbeat import SHORT_DIGEST_BYTES, FragmentHead, Heartbeat
from p2p_diloco.protocol.wire.member import MOST_PROOFS, NO_PLACE, Declaration, Member, ReachProof
from p2p_diloco.protocol.wire.messages import (
    MOST_RECORDS,
    MOST_SPANS,
    ContentReply,
    ContentRequest,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Introductions,
    ManifestRequest,
    Message,
    Opening,
    Ping,
    Pong,
    Refusal,
    RosterReply,
    RosterRequest,
    SpanOffer,
    SpanReply,
    SpanRequest,
    SpanVector,
    decode_message,
    encode_message,
    is_bulk,
)
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster
from p2p_diloco.signing import SigningKey
from p2p_diloco.span_log import SpanHead
from p2p_diloco.storage.identity import load_or_create_identity
from p2p_diloco.transport.addresses import sort_addresses
from p2p_diloco.transport.directory import PeerRole, directory_key, directory_keys, shard_of, sign_record
from p2p_diloco.transport.directory_border import hivemind_peer
from p2p_diloco.transport.libp2p import Libp2pTransport, lane_protocol
from p2p_diloco.transport.link import Lane, TransportListener
from simulator.lies import DAY_SECONDS, degraded_child, false_digest, false_short_heads, invented_answer, lone_vote

PATIENCE_SECONDS = 30.0
HEAR_SECONDS = 120.0
"""A newcomer that is attacked needs half a minute to start on a busy machine."""
REDIAL_SECONDS = 1.0
STARTED_AT_ONCE = 4
TASKS_PER_VICTIM = 4
MOST_HELD = 2000
MOST_FILES = 16_384
MOST_FRAME_BYTES = 32 << 20
RECORDS_OF_ONE_REQUEST = 100
INVENTED = 2000
"""Members of an invented roster besides the one that signs it."""
PEER_ID_PREFIX = bytes.fromhex("002408011220")


class Stranger(TransportListener):
    """One identity with links to its victims. It keeps their latest messages; an attack decides what they receive."""

    def __init__(
        self, transport: Libp2pTransport, key: SigningKey, victims: dict[PeerId, tuple[str, ...]], *, passes_by: bool
    ) -> None:
        self.key = key
        self.passes_by = passes_by
        self.victims = victims
        self.heard: dict[PeerId, Heartbeat] = {}
        self.rosters: dict[int, CertifiedRoster] = {}
        self.frames: dict[str, tuple[Lane, bytes]] = {}
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.heads: dict[tuple[PeerId, int], tuple[SpanHead, ...]] = {}
        self.answer: Callable[[PeerId, Message], Iterable[Message]] = lambda peer, message: ()
        self.transport = transport
        transport.serve(self)

    def post(self, peer: PeerId, message: Message) -> None:
        """Send a message, if there is a link and room."""
        lane = Lane.BULK if is_bulk(message) else Lane.CONTROL
        self.post_frame(peer, encode_message(message), lane, type(message).__name__)

    def post_frame(self, peer: PeerId, frame: bytes, lane: Lane, kind: str) -> bool:
        """Send bytes; return whether they were accepted for sending."""
        deadline = asyncio.get_running_loop().time() + 10.0
        is_posted = self.transport.post(peer, frame, lane=lane, deadline=deadline)
        self.sent[kind] += is_posted
        return is_posted

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        with contextlib.suppress(FrameError):
            message = decode_message(frame)
            self.received[type(message).__name__] += 1
            self.frames[type(message).__name__] = lane, bytes(frame)
            if isinstance(message, Heartbeat):
                self.heard[message.peer] = message
            elif isinstance(message, RosterReply):
                self.rosters.update({certified.roster.k: certified for certified in message.rosters})
            elif isinstance(message, HeadsReply):
                self.heads[peer, message.fragment] = message.heads
            for answer in self.answer(peer, message):
                self.post(peer, answer)

    async def keep_linked(self) -> None:
        """Dial the victims repeatedly, unless the attack needs no link."""
        while True:
            for peer, addresses in self.victims.items():
                if peer not in self.transport.linked_peers() and not self.passes_by:
                    with contextlib.suppress(PeerError):
                        await self.transport.dial(peer, addresses, asyncio.get_running_loop().time() + 10.0)
            words = {"links": len(self.transport.linked_peers()), "sent": self.sent, "received": self.received}
            print(f"{short_peer_id(self.key.peer)}: {json.dumps(words)}", flush=True)
            await asyncio.sleep(REDIAL_SECONDS)

    async def hear_all(self) -> None:
        """Wait until every victim has sent a heartbeat that names a roster with members."""
        async with asyncio.timeout(HEAR_SECONDS):
            while not all(peer in self.heard and self.heard[peer].roster_k > 0 for peer in self.victims):
                await asyncio.sleep(0.1)

    def heartbeat(self, like: Heartbeat, **changes: Any) -> Heartbeat:
        """Return a signed heartbeat of this identity that looks like a ready trainer's."""
        fields: dict[str, Any] = {
            "peer": self.key.peer,
            "incarnation": 1,
            "sequence": time.monotonic_ns(),
            "ready": True,
            "trains": True,
            "can_be_dialled": True,
            **changes,
        }
        return replace(like, **fields).signed(self.key.sign)


Attack = Callable[[Stranger, dict[str, Any]], Coroutine[Any, Any, None]]


# -- attacks


async def other_tips(stranger: Stranger, order: dict[str, Any], *, only_names: bool = False) -> None:
    """Name a higher tip for every span without having an entry that leads there, and serve garbage.

    Args:
        only_names: whether it answers only requests for its tips.
    """
    num_spans = order["spans_per_fragment"]
    bogus = {
        fragment: tuple(
            SpanHead(
                digest=sha256(b"bogus", bytes([fragment, index])),
                height=10_000,
                round=0,
                roster=ZERO_DIGEST,
                radius=1.0,
                median_weight=1.0,
            )
            for index in range(num_spans)
        )
        for fragment in range(order["fragments"])
    }

    def answer(peer: PeerId, message: Message) -> Iterable[Message]:
        if only_names and not isinstance(message, HeadsRequest):
            return ()
        like = stranger.heard.get(peer)

        def heads(fragment: int) -> list[SpanHead]:
            roster = like.roster if like is not None else ZERO_DIGEST
            near = like.heads[fragment].round if like is not None and like.heads else 0
            return [replace(head, round=near, roster=roster) for head in bogus[fragment]]

        return invented_answer(message, heads, lambda span: order["span_bytes"][span.fragment][span.index])

    stranger.answer = answer
    await stranger.hear_all()
    while True:
        for peer in stranger.victims:
            like = stranger.heard[peer]
            stranger.post(peer, stranger.heartbeat(like, heads=false_short_heads(like)))
        await asyncio.sleep(0.1)


async def other_contents(stranger: Stranger, order: dict[str, Any]) -> None:
    """Agree on every tip and claim other bytes for it."""

    def answer(peer: PeerId, message: Message) -> Iterable[Message]:
        heads = stranger.heads.get((peer, message.fragment), ()) if isinstance(message, ContentRequest) else ()
        if heads and isinstance(message, ContentRequest):
            digests = tuple((head.digest, false_digest(head.digest)) for head in heads)
            return (ContentReply(fragment=message.fragment, digests=digests),)
        return ()

    stranger.answer = answer
    await stranger.hear_all()
    while True:
        for peer in stranger.victims:
            for fragment in range(order["fragments"]):
                stranger.post(peer, HeadsRequest(fragment=fragment))
            stranger.post(peer, stranger.heartbeat(stranger.heard[peer]))
        await asyncio.sleep(0.1)


def answer_pings(*clocks: Callable[[], float]) -> Attack:
    """Return an attack that answers every ping with each of these clocks, and sends unsolicited pongs."""

    async def attack(stranger: Stranger, order: dict[str, Any]) -> None:
        def answer(peer: PeerId, message: Message) -> Iterable[Message]:
            asked = isinstance(message, Ping)
            return [Pong(nonce=message.nonce, clock_seconds=clock()) for clock in clocks] if asked else ()

        stranger.answer = answer
        while True:
            for peer in stranger.victims:
                for clock in clocks:
                    stranger.post(peer, Pong(nonce=1, clock_seconds=clock()))
            if all(peer in stranger.heard for peer in stranger.victims):
                for peer in stranger.victims:
                    stranger.post(peer, stranger.heartbeat(stranger.heard[peer], heads=(), ready=False))
            await asyncio.sleep(0.2)

    return attack


async def far_entries(stranger: Stranger, order: dict[str, Any]) -> None:
    """Send entries of distant rounds, of known and of unknown rosters, with payloads."""
    await stranger.hear_all()
    number = 0
    while True:
        for peer in stranger.victims:
            like = stranger.heard[peer]
            for round_index in (1 << 60, (1 << 63) - 1, 2):
                number += 1
                roster = like.roster if number % 2 else sha256(b"unknown", number.to_bytes(8, "little"))
                stranger.post(peer, _bogus_entry(stranger, like, roster, round_index, order["payload_bytes"]))
        await asyncio.sleep(0.01)


def _bogus_entry(stranger: Stranger, like: Heartbeat, roster: Digest, round_index: int, payload_bytes: int) -> Entry:
    unsigned = Entry(
        run=like.run,
        round=round_index,
        span=SpanId(0, 0),
        parent=sha256(b"parent", round_index.to_bytes(8, "little"), roster),
        height=(1 << 40) + round_index % 1000,
        roster=roster,
        present=b"\xff",
        included=b"\x01",
        weights=(1.0,),
        tokens=1,
        median_norm=1.0,
        median_weight=1.0,
        payload=bytes(payload_bytes),
        signature=bytes(64),
    )
    return replace(unsigned, signature=stranger.key.sign(unsigned.statement()))


async def floods(stranger: Stranger, order: dict[str, Any]) -> None:
    """Send refusals full of escape sequences, introductions that name third parties, and requests, without a pause."""
    ugly = b"\x1b[2J\x1b]0;owned\x07\nfake line of the log \xe2\x80\xae"
    keys = [SigningKey(sha256(b"sybil", bytes([number]))) for number in range(64)]
    records = tuple(
        sign_record(
            key,
            run=Digest(bytes.fromhex(order["run"])),
            addresses=(f"/ip4/203.0.113.{number + 1}/tcp/22/p2p/{format_peer_id(key.peer)}",),
            can_be_dialled=True,
            role=PeerRole.TRAINER,
            issued_at=time.time(),
        ).encode()
        for number, key in enumerate(keys)
    )
    number = 0
    while True:
        for peer in stranger.victims:
            for _ in range(50):
                number += 1
                stranger.post(peer, Refusal(round=number, newer_roster=True, reason=ugly))
                stranger.post(peer, EntryRequest(span=SpanId(0, 0), parent=sha256(number.to_bytes(8, "little"))))
                stranger.post(peer, RosterRequest(known=()))
            stranger.post(peer, Introductions(records=records))
        await asyncio.sleep(0.05)


async def records(stranger: Stranger, order: dict[str, Any]) -> None:
    """Introduce ever new identities with the address of a third party, which counts the dials that it gets."""

    def dialled(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stranger.received["dials to the third party"] += 1
        writer.close()

    server = await asyncio.start_server(dialled, order["third_party"], 0)
    address = f"/ip4/{order['third_party']}/tcp/{server.sockets[0].getsockname()[1]}"
    number = 0
    while True:
        batch = []
        for _ in range(MOST_RECORDS):
            number += 1
            key = SigningKey(sha256(b"sybil", number.to_bytes(8, "little")))
            record = sign_record(
                key,
                run=Digest(bytes.fromhex(order["run"])),
                addresses=(f"{address}/p2p/{format_peer_id(key.peer)}",),
                can_be_dialled=True,
                role=PeerRole.BOOTSTRAP,
                issued_at=time.time() + (600.0 if number % 2 else DAY_SECONDS),
            )
            batch.append(record.encode())
        for peer in stranger.victims:
            stranger.post(peer, Introductions(records=tuple(batch)))
        await asyncio.sleep(0.05)


async def unknown_rosters(stranger: Stranger, order: dict[str, Any]) -> None:
    """Send entries of ever new unknown rosters without a pause; answer no request."""
    await stranger.hear_all()
    number = 0
    while True:
        for peer in stranger.victims:
            like = stranger.heard[peer]
            near = like.heads[0].round if like.heads else 2
            for _ in range(20):
                number += 1
                roster = sha256(b"unknown", number.to_bytes(8, "little"))
                stranger.post(peer, _bogus_entry(stranger, like, roster, near, order["payload_bytes"]))
        await asyncio.sleep(0.02)


async def only_links(stranger: Stranger, order: dict[str, Any]) -> None:
    """Hold links, and send nothing."""
    await asyncio.Event().wait()


async def cut_frames(stranger: Stranger, order: dict[str, Any]) -> None:
    """Send each kind of message received so far, cut off somewhere; each time the link is closed and dialled again."""
    await stranger.hear_all()
    number = 0
    while True:
        for peer in stranger.victims:
            kinds = sorted(stranger.frames)
            kind = kinds[number % len(kinds)]
            lane, frame = stranger.frames[kind]
            end = 1 + 7919 * number % (len(frame) - 1)
            number += stranger.post_frame(peer, frame[:end], lane, f"{kind}, cut")
        await asyncio.sleep(0.1)


async def forged_rosters(stranger: Stranger, order: dict[str, Any]) -> None:
    """Certify children of recent rosters with its own vote alone, listing itself or a member."""
    await stranger.hear_all()
    clock = RoundClock(start_seconds=0.0, round_seconds=order["round_seconds"], num_fragments=order["fragments"])
    while True:
        for peer in stranger.victims:
            stranger.post(peer, RosterRequest(known=()))
            latest = max((head.round for head in stranger.heard[peer].heads), default=0)
            for certified in tuple(stranger.rosters.values())[-3:]:
                first = certified.roster.members[0]
                for listed in (first, replace(first, peer=stranger.key.peer)):
                    parent, cycle, me = certified.roster, clock.cycle(latest), stranger.key
                    child = degraded_child(parent, listed, cycle, height=parent.height + 1)
                    stranger.post(peer, lone_vote(child, clock.ballot_at(clock.begin(latest + 1)), me.peer, me.sign))
        await asyncio.sleep(0.2)


async def invented_rosters(stranger: Stranger, order: dict[str, Any]) -> None:
    """Certify children of recent rosters with its own vote, each with 2,000 other members that nobody has."""
    await stranger.hear_all()
    clock = RoundClock(start_seconds=0.0, round_seconds=order["round_seconds"], num_fragments=order["fragments"])
    incarnation, me = itertools.count(1), stranger.key
    names = (sha256(b"invented", number.to_bytes(8, "little")) for number in range(INVENTED))
    members = tuple(Member(peer=PeerId(name), incarnation=1, reduces=False) for name in names)
    while True:
        for peer in stranger.victims:
            stranger.post(peer, RosterRequest(known=()))
            latest = max((head.round for head in stranger.heard[peer].heads), default=0)
            for certified in tuple(stranger.rosters.values())[-2:]:
                parent, cycle = certified.roster, clock.cycle(latest)
                listed = Member(peer=me.peer, incarnation=next(incarnation))
                child = degraded_child(parent, listed, cycle, height=parent.height + 1)
                child = replace(child, members=(listed, *members))
                stranger.post(peer, lone_vote(child, clock.ballot_at(clock.begin(latest + 1)), me.peer, me.sign))
        await asyncio.sleep(0.2)


async def later_incarnations(stranger: Stranger, order: dict[str, Any]) -> None:
    """Declare itself with ever later incarnations, for others to forward."""
    await stranger.hear_all()
    incarnation = itertools.count(1)
    while True:
        for peer in stranger.victims:
            like = stranger.heard[peer]
            cycle = max((head.round for head in like.heads), default=0) // order["fragments"]
            word = Declaration(
                run=like.run, peer=stranger.key.peer, incarnation=next(incarnation), cycle=max(cycle, 0), proofs=(),
                trains=True, share=8, leaving=False, signature=bytes(64),
            )  # fmt: skip
            stranger.post(peer, replace(word, signature=stranger.key.sign(word.statement())))
            stranger.post(peer, stranger.heartbeat(like))
        await asyncio.sleep(0.02)


async def only_heartbeats(stranger: Stranger, order: dict[str, Any]) -> None:
    """Claim to be ready and to train, copy the others' tips, and do nothing else."""
    await stranger.hear_all()
    while True:
        for peer in stranger.victims:
            stranger.post(peer, stranger.heartbeat(stranger.heard[peer]))
        await asyncio.sleep(0.2)


async def uninvited(stranger: Stranger, order: dict[str, Any]) -> None:
    """Send unsolicited tips, entries, vectors and rosters, and request those of the others.

    For runs that list their members: they send it nothing that it could wait for or copy.
    """
    run, me, span = Digest(bytes.fromhex(order["run"])), stranger.key.peer, SpanId(0, 0)
    head = SpanHead(
        digest=sha256(b"bogus"), height=10_000, round=2, roster=ZERO_DIGEST, radius=1.0, median_weight=1.0
    )  # fmt: skip
    short = FragmentHead(round=2, digest=Digest(head.digest[:SHORT_DIGEST_BYTES]))
    like = Heartbeat(
        run=run, peer=me, incarnation=1, sequence=0, roster=ZERO_DIGEST, roster_k=0,
        heads=(short,) * order["fragments"], ready=True, takes_entries=True, can_be_dialled=True, trains=True,
        steps=1, tokens=100, tokens_per_second=10.0, loss=1.0, share=8, signature=bytes(64),
    )  # fmt: skip
    member = Member(peer=me, incarnation=1)
    roster = Roster(
        run=run, genesis=ZERO_DIGEST, parent=ZERO_DIGEST, k=1, cycle=1, degraded=True, members=(member,), height=10_000
    )  # fmt: skip
    unsigned = Declaration(
        run=run, peer=me, incarnation=1, cycle=0, proofs=(), trains=True, share=8, leaving=False, signature=bytes(64)
    )
    span_bytes = order["span_bytes"][0][0]
    heads = (head,) * order["spans_per_fragment"]
    told: tuple[Message, ...] = (
        replace(unsigned, signature=stranger.key.sign(unsigned.statement())),
        lone_vote(roster, 4, me, stranger.key.sign),
        HeadsReply(fragment=0, heads=heads),
        ContentReply(fragment=0, digests=tuple((each.digest, sha256(b"zeros")) for each in heads)),
        SpanReply(span=span, head=head, total_bytes=span_bytes, offset=0, piece=bytes(span_bytes)),
        *(_bogus_entry(stranger, like, ZERO_DIGEST, round_index, order["payload_bytes"]) for round_index in (2, 4)),
        ManifestRequest(nonce=1),
        RosterRequest(known=()),
        HeadsRequest(fragment=0),
        ContentRequest(fragment=0),
        EntryRequest(span=span, parent=ZERO_DIGEST),
        SpanRequest(span=span, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16),
        Ping(nonce=1),
    )
    while True:
        for peer in stranger.victims:
            for message in (stranger.heartbeat(like), *told):
                stranger.post(peer, message)
        await asyncio.sleep(0.2)


async def claimed_reach(stranger: Stranger, order: dict[str, Any]) -> None:
    """Apply, and claim to be reachable: without a proof, with proofs by accomplices, and with an unsigned proof."""
    await stranger.hear_all()
    accomplices = [SigningKey(sha256(b"accomplice", bytes([number]))) for number in range(MOST_PROOFS)]
    me = stranger.key.peer
    while True:
        for peer in stranger.victims:
            like = stranger.heard[peer]
            cycle = max((head.round for head in like.heads), default=0) // order["fragments"]
            unsigned = ReachProof(prover=me, place=NO_PLACE, cycle=max(cycle, 0), signature=bytes(64))
            proofs = [replace(unsigned, prover=key.peer) for key in accomplices]
            signed = [
                replace(proof, signature=key.sign(proof.statement(like.run, me)))
                for key, proof in zip(accomplices, proofs, strict=True)
            ]
            for shown in ((), tuple(signed), (replace(unsigned, prover=peer),)):
                word = Declaration(
                    run=like.run, peer=me, incarnation=1, cycle=unsigned.cycle, proofs=shown, trains=True, share=8,
                    leaving=False, signature=bytes(64),
                )  # fmt: skip
                stranger.post(peer, replace(word, signature=stranger.key.sign(word.statement())))
            stranger.post(peer, stranger.heartbeat(like))
        await asyncio.sleep(0.5)


async def silent_streams(stranger: Stranger, order: dict[str, Any]) -> None:
    """Open streams of both lanes as fast as they are accepted, and never greet."""
    protocols = [lane_protocol(Digest(bytes.fromhex(order["run"])), lane) for lane in Lane]

    async def open_streams(peer: PeerId, addresses: tuple[str, ...]) -> None:
        client, held = stranger.transport.client, []
        while True:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    held.append(await client.open_stream(peer, protocols[len(held) % len(protocols)], 5.0))
                stranger.sent["stream"] += 1
            except (PeerError, OSError, TimeoutError):
                await connect(stranger, peer, addresses)
            if len(held) > MOST_HELD:
                held.pop(0)[1].transport.abort()

    await attack_all(stranger, open_streams)


async def kad_providers(stranger: Stranger, order: dict[str, Any]) -> None:
    """Announce itself as the provider of ever new keys to the libp2p daemon's own DHT, if it has one."""
    number = itertools.count()
    provider = PEER_ID_PREFIX + stranger.key.peer
    provider = bytes([0x0A, len(provider)]) + provider

    async def add_providers(peer: PeerId, addresses: tuple[str, ...]) -> None:
        while True:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    _, writer = await stranger.transport.client.open_stream(peer, "/ipfs/kad/1.0.0", 5.0)
                    for _ in range(1000):
                        key = b"\x12\x20" + sha256(b"key", next(number).to_bytes(8, "little"))
                        body = bytes([0x08, 2, 0x12, len(key)]) + key + bytes([0x4A, len(provider)]) + provider
                        writer.write(bytes([len(body)]) + body)
                        await writer.drain()
                        stranger.sent["provider"] += 1
            except (PeerError, OSError, TimeoutError):
                stranger.sent["refused"] += 1
                await connect(stranger, peer, addresses)

    await attack_all(stranger, add_providers)


async def directory_records(stranger: Stranger, order: dict[str, Any]) -> None:
    """Store signed records of ever new identities in the directory of each victim."""
    run, number = Digest(bytes.fromhex(order["run"])), itertools.count()

    def request() -> Any:
        fields: dict[str, list[Any]] = {name: [] for name in ("keys", "subkeys", "values", "expiration_time")}
        for _ in range(RECORDS_OF_ONE_REQUEST):
            key = SigningKey(sha256(b"invented", stranger.key.peer, next(number).to_bytes(8, "little")))
            address = f"/ip4/203.0.113.7/tcp/4001/p2p/{format_peer_id(key.peer)}"
            record = sign_record(
                key, run=run, addresses=(address,) * 3, can_be_dialled=True, role=PeerRole.TRAINER,
                issued_at=time.time(),
            )  # fmt: skip
            place = importlib.import_module("hivemind.dht.routing").DHTID.generate(
                directory_key(run, shard_of(key.peer))
            )
            fields["keys"].append(place.to_bytes())
            fields["subkeys"].append(msgpack.packb(key.peer))
            fields["values"].append(msgpack.packb(record.encode()))
            fields["expiration_time"].append(time.time() + 600.0)
        messages = importlib.import_module("hivemind.proto.dht_pb2")
        return messages.StoreRequest(in_cache=[False] * RECORDS_OF_ONE_REQUEST, **fields)

    await call_directory(stranger, "rpc_store", request)


async def directory_questions(stranger: Stranger, order: dict[str, Any]) -> None:
    """Ask the directory of each victim for all keys of the run, without a pause."""
    messages = importlib.import_module("hivemind.proto.dht_pb2")
    dht_id = importlib.import_module("hivemind.dht.routing").DHTID
    keys = [dht_id.generate(key).to_bytes() for key in directory_keys(Digest(bytes.fromhex(order["run"])))]
    await call_directory(stranger, "rpc_find", lambda: messages.FindRequest(keys=keys))


async def call_directory(stranger: Stranger, name: str, request: Callable[[], Any]) -> None:
    """Send requests to the directory of each victim, as fast as they are answered or refused."""
    theirs = importlib.import_module("hivemind.p2p").P2P
    daemon = stranger.transport.daemon
    ours: Any = type("P2P", (theirs,), {"_UNIX_SOCKET_PREFIX": f"/unix{daemon.directory}/"})
    maddr_class = importlib.import_module("hivemind.utils.multiaddr").Multiaddr
    p2p = await ours.replicate(maddr_class(f"/unix{daemon.control_path}"))
    servicer = importlib.import_module("hivemind.p2p").ServicerBase
    protocol = importlib.import_module("hivemind.dht.protocol").DHTProtocol

    async def call(peer: PeerId, addresses: tuple[str, ...]) -> None:
        stub = servicer.get_stub.__func__(protocol, p2p, hivemind_peer(peer))
        while True:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    stranger.sent[name] += 1
                    await getattr(stub, name)(request(), timeout=5)
                    stranger.received[name] += 1
            except Exception:  # hivemind raises many classes of errors
                await connect(stranger, peer, addresses)

    await attack_all(stranger, call)


async def connect(stranger: Stranger, peer: PeerId, addresses: tuple[str, ...]) -> None:
    """Connect the daemons; try again each time that a victim hangs up."""
    with contextlib.suppress(PeerError, TimeoutError):
        async with asyncio.timeout(5.0):
            await stranger.transport.client.connect(peer, sort_addresses(peer, addresses), 5.0)
            stranger.sent["connection"] += 1
    await asyncio.sleep(0.05)


async def attack_all(
    stranger: Stranger, attack: Callable[[PeerId, tuple[str, ...]], Coroutine[Any, Any, None]]
) -> None:
    """Run an attack that needs no link against every victim, with several tasks for each."""
    async with asyncio.TaskGroup() as tasks:
        for peer, addresses in stranger.victims.items():
            await connect(stranger, peer, addresses)
            for _ in range(TASKS_PER_VICTIM):
                tasks.create_task(attack(peer, addresses))


async def unfinished_frames(stranger: Stranger, order: dict[str, Any]) -> None:
    """Send bulk frames of the greatest length that any run allows, without their last byte, on every link."""
    head = encode_message(SpanVector(round=1, span=SpanId(0, 0), payload=b""))[:2]
    body = head + bytes(MOST_FRAME_BYTES - 3)
    begun: set[int] = set()
    while True:
        for peer in stranger.victims:
            link = stranger.transport._links.get(peer)
            streams = link.streams[Lane.BULK] if link is not None and link.is_up else []
            for stream in streams:
                if id(stream) not in begun:
                    begun.add(id(stream))
                    with contextlib.suppress(OSError):
                        stream.writer.write(MOST_FRAME_BYTES.to_bytes(4, "big") + body)
                        stranger.sent["frame"] += 1
        stranger.sent["look"] += 1
        await asyncio.sleep(0.1)


async def long_openings(stranger: Stranger, order: dict[str, Any]) -> None:
    """Open contributions with as many spans as any run may have."""
    offer = SpanOffer(index=0, parent=ZERO_DIGEST, sends=True, norm=1.0)
    opening = Opening(round=1, roster=ZERO_DIGEST, incarnation=1, tokens=1, steps=1, spans=(offer,) * MOST_SPANS)
    frame = encode_message(opening)
    while True:
        for peer in stranger.victims:
            stranger.post_frame(peer, frame, Lane.BULK, "Opening")
        stranger.sent["look"] += 1
        await asyncio.sleep(0.05)


async def cheap_frames(stranger: Stranger, order: dict[str, Any]) -> None:
    """Send valid control frames of several kinds as fast as they are taken."""
    await stranger.hear_all()
    while True:
        for peer in stranger.victims:
            beat = encode_message(stranger.heartbeat(stranger.heard[peer]))
            for _ in range(200):
                stranger.post_frame(peer, beat, Lane.CONTROL, "Heartbeat")
                stranger.post_frame(peer, encode_message(Ping(nonce=1)), Lane.CONTROL, "Ping")
        await asyncio.sleep(0.02)


PASSING_BY: dict[str, Attack] = {
    "silent-streams": silent_streams,
    "kad-providers": kad_providers,
    "directory-records": directory_records,
    "directory-questions": directory_questions,
}
"""Attacks that need an address and no link."""
ATTACKS: dict[str, Attack] = {
    **PASSING_BY,
    "other-tips": other_tips,
    "silent-tips": partial(other_tips, only_names=True),
    "other-contents": other_contents,
    "a-day-ahead": answer_pings(lambda: time.time() + DAY_SECONDS),
    "mad-clock": answer_pings(lambda: 1e300, lambda: float("nan"), lambda: float("inf"), lambda: -1e300),
    "far-entries": far_entries,
    "floods": floods,
    "records": records,
    "unknown-rosters": unknown_rosters,
    "only-links": only_links,
    "cut-frames": cut_frames,
    "forged-rosters": forged_rosters,
    "invented-rosters": invented_rosters,
    "later-incarnations": later_incarnations,
    "only-heartbeats": only_heartbeats,
    "claimed-reach": claimed_reach,
    "uninvited": uninvited,
    "unfinished-frames": unfinished_frames,
    "long-openings": long_openings,
    "cheap-frames": cheap_frames,
}


async def play(order: dict[str, Any], number: int, folder: Path, starting: asyncio.Semaphore) -> None:
    key = load_or_create_identity(folder / f"{number}.key")
    victims: dict[PeerId, tuple[str, ...]] = {}
    for address in order["victims"]:
        peer = parse_peer_address(address)[1]
        victims[peer] = (*victims.get(peer, ()), address)
    transport = Libp2pTransport(
        peer=key.peer,
        run=Digest(bytes.fromhex(order["run"])),
        identity_path=folder / f"{number}.key",
        dial_out_only=True,
    )
    stranger = Stranger(transport, key, victims, passes_by=order["attack"] in PASSING_BY)
    async with contextlib.AsyncExitStack() as exits:
        async with starting:
            await exits.enter_async_context(transport)
        tasks = await exits.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(stranger.keep_linked())
        tasks.create_task(ATTACKS[order["attack"]](stranger, order))


async def main(order: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        starting = asyncio.Semaphore(STARTED_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for number in list(range(order["identities"])) * order["daemons"]:
                tasks.create_task(play(order, number, Path(folder), starting))


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MOST_FILES, hard), hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(json.loads(Path(sys.argv[1]).read_text())))
