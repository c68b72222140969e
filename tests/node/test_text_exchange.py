"""Sharing a text over the memory network, in virtual time: real files, real frames, hostile and slow peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId, sha256, short_peer_id
from p2p_diloco.node.text_exchange import BUSY_SHARE, IDLE_SHARE, NOBODY_SECONDS, SharedCopy, TextExchange
from p2p_diloco.protocol.wire.file_list import FILE_PIECE_BYTES
from p2p_diloco.protocol.wire.messages import (
    MOST_BLOCK_BYTES,
    BlockRequest,
    Message,
    TextBlock,
    decode_message,
    encode_message,
    is_bulk,
)
from p2p_diloco.storage.text_copy import OwnText, TextStore, list_own_text
from p2p_diloco.transport.link import Lane, TransportLimits, TransportListener
from simulator.faulty_network import FaultyNetwork
from simulator.virtual_time import AtOnce, run_virtual

RUN = sha256(b"a run")
NUM_PIECES = 6


class Peer(TransportListener):
    """A peer that only shares a text; it has one link to each of the others."""

    def __init__(
        self, network: FaultyNetwork, name: str, copy: OwnText | TextStore, limits: TransportLimits | None = None
    ) -> None:
        self.name = name
        self.copy = copy
        self.peer = PeerId(sha256(name.encode()))
        self.transport = network.transport(self.peer, run=RUN, limits=limits)
        self.transport.serve(self)
        self.events: list[str] = []
        self.failures: list[BaseException] = []
        self.strangers: set[PeerId] = set()
        self.sent: dict[PeerId, int] = {}
        self.served: list[float] = []
        self.mutate: Callable[[Message], Message | None] = lambda message: message
        self.exchange: TextExchange | None = None

    def open(self) -> asyncio.Task[None]:
        limits = self.transport.limits
        self.exchange = TextExchange(
            SharedCopy(
                copy=self.copy,
                worker=AtOnce(),
                line=lambda: limits.upload_bytes_per_second,
                failed=self.failures.append,
            ),
            transport=self.transport,
            post=self.post,
            report=lambda topic, text, peer: self.events.append(text),
            is_stranger=self.strangers.__contains__,
            now=asyncio.get_running_loop().time,
        )
        return asyncio.get_running_loop().create_task(self.exchange.run())

    def post(self, to: PeerId, message: Message, deadline: float, *, on_request: bool = False) -> None:
        changed = self.mutate(message)
        if changed is None:
            return
        if isinstance(changed, TextBlock):
            self.sent[to] = self.sent.get(to, 0) + len(changed.block)
            self.served.append(asyncio.get_running_loop().time())
        lane = Lane.BULK if is_bulk(changed) else Lane.CONTROL
        self.transport.post(to, encode_message(changed), lane=lane, deadline=deadline)

    def frame_received(self, peer: PeerId, lane: Lane, frame: bytes | bytearray | memoryview) -> None:
        message = decode_message(frame)
        if self.exchange is not None:
            self.exchange.receive(peer, message)  # type: ignore[arg-type]  # nothing else is sent here

    @property
    def is_whole(self) -> bool:
        return self.copy.listed is not None and self.copy.held.bit_count() == self.copy.listed.num_pieces

    def hears(self, *words: str) -> bool:
        return any(all(word in event for word in words) for event in self.events)


class Stage:
    """A text, and peers that are linked to each other."""

    def __init__(self, folder: Path, **weather: Any) -> None:
        self.folder = folder
        self.network = FaultyNetwork(seed=1, **{"delay_seconds": (0.02, 0.02)} | weather)
        self.root = folder / "text"
        if not self.root.exists():
            self.root.mkdir()
            (self.root / "a.txt").write_bytes(bytes(index % 251 for index in range(1000)))
            (self.root / "b.txt").write_bytes(
                b"0123456789abcdef" * ((NUM_PIECES - 2) * FILE_PIECE_BYTES // 16) + b"end"
            )
        self.peers: dict[str, Peer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await self._stack.aclose()

    @property
    def digest(self) -> Digest:
        return list_own_text(str(self.root)).digest

    def store(self, name: str) -> TextStore:
        return TextStore(self.folder / name, self.digest)

    async def add(
        self,
        name: str,
        copy: OwnText | TextStore | None = None,
        *,
        to: tuple[str, ...] | None = None,
        limits: TransportLimits | None = None,
        mutate: Callable[[Message], Message | None] | None = None,
    ) -> Peer:
        """Add a peer with a copy, or one that fetches; it dials `to`, or all others."""
        peer = Peer(self.network, name, copy or self.store(name), limits)
        if mutate is not None:
            peer.mutate = mutate
        await self._stack.enter_async_context(peer.transport)
        others = [self.peers[other] for other in (to if to is not None else tuple(self.peers))]
        self.peers[name] = peer
        self._tasks[name] = peer.open()
        for other in others:
            deadline = asyncio.get_running_loop().time() + 10.0
            await peer.transport.dial(other.peer, other.transport.listen_addresses(), deadline)
        return peer

    def own(self) -> OwnText:
        return list_own_text(str(self.root))

    async def until(self, condition: Callable[[], bool], seconds: float = 300.0) -> float:
        """Wait for a condition; return how long it took."""
        began = asyncio.get_running_loop().time()
        while not condition():
            assert not any(task.done() for task in self._tasks.values())
            assert asyncio.get_running_loop().time() - began < seconds, [peer.events for peer in self.peers.values()]
            await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time() - began

    def assert_equal_files(self, *names: str) -> None:
        for name in names:
            store = self.peers[name].copy
            assert isinstance(store, TextStore)
            for file in ("a.txt", "b.txt"):
                assert (store.root / file).read_bytes() == (self.root / file).read_bytes()


def act(folder: Path, scene: Callable[[Stage], Coroutine[Any, Any, None]], **weather: Any) -> None:
    async def whole() -> None:
        async with Stage(folder, **weather) as stage:
            await scene(stage)

    run_virtual(whole())


def flip(message: Message) -> Message:
    """Flip a bit of every piece that is sent, but not of the list."""
    if isinstance(message, TextBlock) and message.offset == 0 and message.total_bytes in (1000, 3, FILE_PIECE_BYTES):
        block = bytearray(message.block)
        block[-1] ^= 1
        return TextBlock(
            digest=message.digest, total_bytes=message.total_bytes, offset=message.offset, block=bytes(block)
        )
    return message


def withhold(message: Message) -> Message | None:
    return None if isinstance(message, TextBlock) else message


def test_a_peer_with_nothing_gets_the_list_and_every_file_from_the_one_that_has_them(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.add("founder", stage.own())
        joiner = await stage.add("joiner")
        await stage.until(lambda: joiner.is_whole)
        stage.assert_equal_files("joiner")
        assert joiner.hears("fetching 4.2 MB of the run's text (2 files, 4.2 MB) from other peers")
        assert joiner.hears("all of the run's text is here, 4.2 MB in")
        assert stage.peers["founder"].hears("the run's text is here (2 files, 4.2 MB) and is served to other peers")

    act(tmp_path, scene)


def test_joiners_help_each_other(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        limits = TransportLimits(upload_bytes_per_second=250e3)
        founder = await stage.add("founder", stage.own(), limits=limits)
        names = ("ada", "ben", "cleo")
        for name in names:
            await stage.add(name)
        await stage.until(lambda: all(stage.peers[name].is_whole for name in names))
        stage.assert_equal_files(*names)
        assert sum(founder.sent.values()) < 2 * (NUM_PIECES - 2) * FILE_PIECE_BYTES, "not one copy for each"
        assert all(stage.peers[name].sent for name in names)

    act(tmp_path, scene)


def test_a_peer_that_flips_a_bit_is_named_and_asked_no_more_and_the_text_arrives(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        liar = await stage.add("liar", stage.own(), mutate=flip)
        joiner = await stage.add("joiner")
        await stage.until(lambda: joiner.hears(short_peer_id(liar.peer), "with other bytes than the run's"))
        asked = sum(liar.sent.values())
        await stage.add("founder", stage.own(), to=("joiner",))
        await stage.until(lambda: joiner.is_whole)
        stage.assert_equal_files("joiner")
        assert sum(event.startswith(short_peer_id(liar.peer)) for event in joiner.events) == 1
        assert sum(liar.sent.values()) == asked

    act(tmp_path, scene)


def test_a_peer_that_sends_another_list_is_named(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        def other_list(message: Message) -> Message:
            if isinstance(message, TextBlock):
                return TextBlock(digest=message.digest, total_bytes=4, offset=0, block=b"list")
            return message

        liar = await stage.add("liar", stage.own(), mutate=other_list)
        joiner = await stage.add("joiner")
        await stage.until(lambda: joiner.hears(short_peer_id(liar.peer), "sent a list of files with other bytes"))
        await stage.add("founder", stage.own(), to=("joiner",))
        await stage.until(lambda: joiner.is_whole)

    act(tmp_path, scene)


def test_one_peer_that_is_silent_does_not_stop_the_others(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.add("silent", stage.own(), mutate=withhold)
        await stage.add("founder", stage.own())
        joiner = await stage.add("joiner")
        assert await stage.until(lambda: joiner.is_whole) < 60.0
        stage.assert_equal_files("joiner")

    act(tmp_path, scene)


def test_a_run_goes_on_from_what_is_on_the_disk(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        founder = await stage.add("founder", stage.own())
        half = stage.store("joiner")
        own = stage.own()
        assert own.listed is not None
        assert half.adopt(own.listed.encode())
        for piece in (0, 1, 2):
            assert half.keep(piece, own.read(own.listed.piece(piece).digest, 0, FILE_PIECE_BYTES)[1])
        joiner = await stage.add("joiner", stage.store("joiner"))
        await stage.until(lambda: joiner.is_whole)
        missing = sum(own.listed.piece(piece).num_bytes for piece in range(3, own.listed.num_pieces))
        assert sum(founder.sent.values()) == missing

    act(tmp_path, scene)


def test_a_piece_that_the_disk_lost_is_noticed_and_fetched_again(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.add("founder", stage.own())
        ada = await stage.add("ada")
        await stage.until(lambda: ada.is_whole)
        assert isinstance(ada.copy, TextStore)
        (ada.copy.root / "a.txt").write_bytes(bytes(1000))
        ben = await stage.add("ben", to=("ada",))
        await stage.until(lambda: ben.is_whole)
        assert ada.hears("1 piece of the run's text on this disk changed; fetching them again")
        stage.assert_equal_files("ada", "ben")

    act(tmp_path, scene)


def test_an_own_copy_that_changed_is_reported_and_not_served(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        founder = await stage.add("founder", stage.own())
        digest = stage.digest
        (stage.root / "a.txt").write_bytes(bytes(1000))
        joiner = await stage.add("joiner", TextStore(tmp_path / "joiner", digest))
        await stage.until(lambda: founder.hears("changed and cannot be sent to others; restore the files"))
        await asyncio.sleep(60.0)
        assert not joiner.is_whole
        assert joiner.hears("no linked peer holds the missing 1.0 kB of the run's text; waiting for one")
        assert founder.events.count(founder.events[-1]) == 1

    act(tmp_path, scene)


def test_without_a_peer_that_has_it_the_list_is_waited_for(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        ada, ben = await stage.add("ada"), await stage.add("ben")
        await asyncio.sleep(2 * NOBODY_SECONDS)
        for peer in (ada, ben):
            assert peer.events == ["no linked peer holds the list of the run's text; waiting for one"]
        await stage.add("founder", stage.own())
        await stage.until(lambda: ada.is_whole and ben.is_whole)

    act(tmp_path, scene)


def test_a_disk_that_is_too_small_ends_the_peer_with_a_sentence(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.add("founder", stage.own())
        joiner = await stage.add("joiner", TextStore(tmp_path / "small", stage.digest, most_bytes=1000))
        await stage.until(lambda: bool(joiner.failures))
        assert isinstance(joiner.failures[0], StateError)
        assert "the run's text needs 4.2 MB" in str(joiner.failures[0])

    act(tmp_path, scene)


def test_a_disk_that_fills_up_is_reported_and_tried_again(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.add("founder", stage.own())
        store = stage.store("joiner")
        keep, failing = store.keep, [True]

        def keep_if_room(piece: int, content: bytes | bytearray) -> bool:
            if failing[0]:
                raise StateError("cannot write the run's text: no space left")
            return keep(piece, content)

        store.keep = keep_if_room  # type: ignore[method-assign]  # a disk that is full for a while
        joiner = await stage.add("joiner", store)
        await stage.until(lambda: joiner.hears("no space left"))
        failing[0] = False
        await stage.until(lambda: joiner.is_whole)
        assert not joiner.failures

    act(tmp_path, scene)


@pytest.mark.parametrize("busy", [False, True])
def test_serving_keeps_to_its_share_of_a_cap(tmp_path: Path, busy: bool) -> None:
    async def scene(stage: Stage) -> None:
        cap = 1e6
        founder = await stage.add("founder", stage.own(), limits=TransportLimits(upload_bytes_per_second=cap))
        joiner = await stage.add("joiner")
        if busy:
            founder.transport.counters.bulk.bytes_waiting += 1  # a vector that waits all the time
        await stage.until(lambda: len(founder.served) > 5)
        began, before = founder.served[-1], sum(founder.sent.values())
        await asyncio.sleep(4.0)
        rate = (sum(founder.sent.values()) - before) / (founder.served[-1] - began)
        share = BUSY_SHARE if busy else IDLE_SHARE
        assert 0.8 * share * cap < rate < 1.1 * share * cap
        assert not joiner.is_whole or not busy

    act(tmp_path, scene)


def test_on_a_line_of_unknown_rate_vectors_that_wait_come_first(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        founder = await stage.add("founder", stage.own())
        founder.transport.counters.bulk.bytes_waiting += 1
        joiner = await stage.add("joiner")
        await asyncio.sleep(10.0)
        assert founder.sent == {}
        founder.transport.counters.bulk.bytes_waiting -= 1
        await stage.until(lambda: joiner.is_whole)

    act(tmp_path, scene)


def test_a_peer_with_a_small_disk_fetches_the_files_that_it_wants_and_no_others(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        await stage.add("founder", stage.own())
        store = TextStore(tmp_path / "small", stage.digest, most_bytes=FILE_PIECE_BYTES, needs_all=False)
        joiner = await stage.add("joiner", store)
        await stage.until(lambda: store.listed is not None)
        await asyncio.sleep(30.0)
        assert store.held == 0
        store.wanted = 1
        await stage.until(lambda: store.held == 1)
        assert (store.root / "a.txt").read_bytes() == (stage.root / "a.txt").read_bytes()
        await asyncio.sleep(30.0)
        assert store.held == 1
        assert not joiner.failures

    act(tmp_path, scene)


def test_a_flood_of_requests_is_answered_with_little_at_a_time(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        founder = await stage.add("founder", stage.own())
        digest = list_own_text(str(stage.root)).listed.piece(1).digest  # type: ignore[union-attr]  # it was made
        flooder = await stage.add("flooder")
        stage.network.stall(flooder.peer)
        assert founder.exchange is not None
        for _ in range(5_000):
            founder.exchange.receive(flooder.peer, BlockRequest(digest=digest, offset=0))
            await asyncio.sleep(0.001)
        assert founder.transport.waiting_bytes(flooder.peer, Lane.BULK) <= 8 * MOST_BLOCK_BYTES
        assert founder.sent[flooder.peer] > MOST_BLOCK_BYTES
        joiner = await stage.add("joiner", to=("founder",))
        assert await stage.until(lambda: joiner.is_whole) < 6.0, "a peer that does not read holds up no other"

    act(tmp_path, scene)


def test_blocks_and_answers_that_nobody_asked_for_change_nothing(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        founder = await stage.add("founder", stage.own())
        joiner = await stage.add("joiner")
        assert joiner.exchange is not None
        stray = TextBlock(digest=stage.digest, total_bytes=3, offset=0, block=b"abc")
        joiner.exchange.receive(founder.peer, stray)
        joiner.exchange.receive(PeerId(bytes(32)), stray)
        await stage.until(lambda: joiner.is_whole)
        joiner.exchange.receive(founder.peer, stray)
        await asyncio.sleep(5.0)
        stage.assert_equal_files("joiner")

    act(tmp_path, scene)
