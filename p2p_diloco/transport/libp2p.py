"""Links over libp2p: encrypted, authenticated TCP streams, carried by hivemind's daemon p2pd.

Each lane is a libp2p stream whose protocol name contains the run, so that peers of other runs never get a link.
libp2p's handshake authenticates the other end. Whatever a peer does or fails to do, only its own stream readers and
lane writers wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from p2p_diloco.errors import DaemonEnded, FrameError, NetworkError, NotInRun, PeerError
from p2p_diloco.ids import Digest, PeerId, format_peer_id, short_peer_id
from p2p_diloco.transport.addresses import explain_refusal, have_crossed, host_of, is_loopback, sort_addresses
from p2p_diloco.transport.byte_stream import ByteStream
from p2p_diloco.transport.daemon_client import DaemonClient, DaemonRefusal
from p2p_diloco.transport.framing import LaneStream, greet
from p2p_diloco.transport.hivemind_border import load_hivemind
from p2p_diloco.transport.link import FRAME_PREFIX_BYTES, Frame, Lane, Transport, TransportLimits
from p2p_diloco.transport.p2pd import Daemon, DaemonSettings
from p2p_diloco.transport.reach_probe import probe_identity
from p2p_diloco.transport.strangers import Callers
from p2p_diloco.transport.stream_link import CROSSING_SECONDS, LaneReader, LaneWriter, StreamLink

logger = logging.getLogger(__name__)

ADVICE = "; start this peer again"
_GREETING_SECONDS = 10.0
_STREAMS = "opens stream after stream; closing its connection"
_ADDRESS_REFRESH_SECONDS = 30.0
_RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
"""p2pd relays for strangers regardless of its flags; we replace its handler with one that closes the stream."""
_FIRST_REFRESHES, _FIRST_REFRESH_SECONDS = 6, 5.0
"""A router needs a few seconds to open a port."""
_BACKOFF_SECONDS = 5.2
"""After a failed dial, libp2p refuses another attempt for five seconds."""


def lane_protocol(run: Digest, lane: Lane) -> str:
    """Return the libp2p name of the streams of one lane of a run."""
    return f"/p2p-diloco/2/{run.hex()[:16]}/{lane.value}"


class Libp2pTransport(Transport):
    """A `Transport` over libp2p. Starts its own p2pd on entry and stops it on exit.

    Args:
        peer: id of this peer; must match the key in `identity_path`.
        run: digest of the run's manifest.
        identity_path: libp2p key file, see `identity.load_or_create_identity`; lock it first.
        host_maddrs: TCP multiaddrs to listen on; port 0 lets the system choose.
        announce_maddrs: addresses to announce instead of the detected ones.
        dial_out_only: do not listen; `host_maddrs` is ignored.
        map_port: ask the router to open a port, unless only loopback is listened on; the opened address is added to
            `listen_addresses` some seconds later.
    """

    def __init__(
        self,
        *,
        peer: PeerId,
        run: Digest,
        identity_path: Path,
        host_maddrs: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce_maddrs: Sequence[str] = (),
        dial_out_only: bool = False,
        map_port: bool = False,
        limits: TransportLimits | None = None,
    ) -> None:
        super().__init__(peer=peer, run=run, limits=limits)
        self._settings = DaemonSettings(
            identity_path=identity_path,
            host_maddrs=() if dial_out_only else tuple(host_maddrs),
            announce_maddrs=() if dial_out_only else tuple(announce_maddrs),
            map_port=map_port and not dial_out_only and not all(map(is_loopback, host_maddrs)),
        )
        self._protocols = {lane: lane_protocol(run, lane) for lane in Lane}
        self._lanes = {protocol: lane for lane, protocol in self._protocols.items()}
        self._links: dict[PeerId, StreamLink] = {}
        self._callers: Callers[ByteStream] = Callers()
        self._hanging_up: set[PeerId] = set()
        self._dialling: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()
        self._addresses: tuple[str, ...] = ()
        self.daemon = Daemon(self._settings)
        self._client: DaemonClient | None = None
        self._services = contextlib.AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._went_idle = asyncio.Event()

    @property
    def client(self) -> DaemonClient:
        """Client of this transport's daemon, for the directory, which shares it."""
        assert self._client is not None, "enter the transport first"
        return self._client

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(load_hivemind)  # seconds of imports, not in the loop
        async with contextlib.AsyncExitStack() as services:
            await services.enter_async_context(self.daemon)
            self._client = DaemonClient(self.daemon.control_path)
            await services.enter_async_context(self._client.hold_daemon())
            await self._identify()
            await services.enter_async_context(self._tasks)
            streams_path = self.daemon.directory / "streams.sock"
            protocols = (*self._lanes, _RELAY_PROTOCOL)
            await services.enter_async_context(self._client.accept_streams(protocols, streams_path, self._accept))
            self._services = services.pop_all()
        self._spawn("watch p2pd", self._watch_daemon)
        self._spawn("watch its memory", self.daemon.end_if_too_large)
        self._spawn("refresh addresses", self._refresh_addresses)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.lost is None:
                await self._close_gently()
        finally:
            self._is_closing = True
            for link in tuple(self._links.values()):
                for stream in self._take_down(link):
                    stream.connection.abort()
            for task in tuple(self._running):
                task.cancel()
            await self._services.aclose()

    def listen_addresses(self) -> tuple[str, ...]:
        return self._addresses

    def linked_peers(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, link in self._links.items() if link.is_up)

    async def dial(self, peer: PeerId, addresses: Sequence[str], deadline: float) -> None:
        """Open a link, both lanes, to `peer`; see `Transport.dial`.

        Raises:
            PeerError: the peer could not be reached at any address.
            NetworkError: the daemon has ended, so the transport is unusable.
        """
        if self._is_linked(peer):
            return
        name = short_peer_id(peer)
        if peer == self.peer:
            raise PeerError(f"{name} is this peer itself; dial others")
        usable = sort_addresses(peer, addresses)
        lock = self._dialling.setdefault(peer, asyncio.Lock())
        try:
            async with asyncio.timeout_at(deadline), lock:
                if not self._is_linked(peer):
                    await self._connect(peer, usable, deadline)
                    await self._open_lanes(peer, deadline)
        except TimeoutError:
            raise PeerError(f"{name} cannot be dialled: no answer by the deadline at {', '.join(usable)}") from None

    async def remote_hosts(self) -> dict[PeerId, tuple[str, ...]]:
        hosts: dict[PeerId, tuple[str, ...]] = {}
        for peer, address in await self.client.connections():
            host = host_of(address)
            if host is not None and host not in hosts.get(peer, ()):
                hosts[peer] = (*hosts.get(peer, ()), host)
        return hosts

    async def probe(self, peer: PeerId, host: str, port: int, deadline: float) -> None:
        await probe_identity(peer, host, port, deadline)

    def post(self, peer: PeerId, frame: Frame, *, lane: Lane, deadline: float) -> bool:
        self._check_frame(frame, lane)
        link = self._links.get(peer)
        if link is None or not link.is_up or not link.outboxes[lane].offer(frame, deadline):
            return False
        link.wakes[lane].set()
        return True

    def waiting_bytes(self, peer: PeerId, lane: Lane) -> int:
        link = self._links.get(peer)
        return link.outboxes[lane].waiting_bytes if link is not None else 0

    def hang_up(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        was_up = link.is_up
        for stream in self._take_down(link):
            self._spawn("hang up", stream.close_gently, self.limits.linger_seconds)
        if was_up:
            self._notify(self.listener.link_lost, peer, "this peer hung up")

    def _is_linked(self, peer: PeerId) -> bool:
        link = self._links.get(peer)
        return link is not None and link.is_up

    async def _connect(self, peer: PeerId, usable: Sequence[str], deadline: float, *, is_second: bool = False) -> None:
        if self.lost is not None:
            raise self.lost
        seconds = deadline - asyncio.get_running_loop().time()
        try:
            await self.client.connect(peer, usable, seconds)
        except DaemonRefusal as error:
            if not is_second and have_crossed(str(error)):
                # One of the two retries earlier, so that the dials do not cross again.
                await asyncio.sleep(_BACKOFF_SECONDS + (1.0 if self.peer > peer else 0.0))
                return await self._connect(peer, usable, deadline, is_second=True)
            raise PeerError(f"{short_peer_id(peer)} cannot be dialled: {explain_refusal(str(error))}") from None

    async def _open_lanes(self, peer: PeerId, deadline: float) -> None:
        """Open one stream per lane; they become a link once both are greeted."""
        opened: dict[Lane, ByteStream] = {}
        try:
            for lane, protocol in self._protocols.items():
                seconds = deadline - asyncio.get_running_loop().time()
                opened[lane] = await self.client.open_stream(peer, protocol, seconds)
            for connection in opened.values():
                await greet(connection)
        except BaseException as error:
            for connection in opened.values():
                connection.abort()
            if isinstance(error, PeerError):
                raise self._explain_silence(peer, error) from None
            raise
        for lane, connection in opened.items():
            self._adopt(peer, lane, connection, is_ours=True)

    def _explain_silence(self, peer: PeerId, error: PeerError) -> PeerError:
        name = short_peer_id(peer)
        if "protocols not supported" in str(error):
            run = self.run.hex()[:16]
            return NotInRun(f"{name} is not in run {run}, or has another version; update the older one")
        return PeerError(f"{name} answers, but refuses a link: {error}")

    def _accept(self, peer: PeerId, protocol: str, connection: ByteStream) -> None:
        lane, is_needed, now = self._lanes.get(protocol), self.is_needed(peer), asyncio.get_running_loop().time()
        has_room = peer in self._links or len(self._links) < self.limits.links or is_needed
        self.disturbed_by(peer, _STREAMS)  # a dial opens two streams, and nobody dials again and again
        is_refused = self._is_closing or not has_room or not self.is_welcome(peer) or peer == self.peer
        if lane is None or is_refused or peer in self._hanging_up:
            connection.abort()
            return
        answer = self._callers.called(peer, connection, now, is_member=is_needed)
        if answer.is_greeted:
            self._spawn(f"accept {lane.value}", self._greet_caller, peer, lane, connection)
        else:
            connection.abort()
        if answer.dropped is not None:
            answer.dropped.abort()

    def disturbed_by(self, peer: PeerId, text: str) -> None:
        """Count a stream, or something useless, of a stranger; if there are many, report `text` and disconnect it."""
        is_over = not self.is_needed(peer) and not self._callers.has_patience_with(
            peer, asyncio.get_running_loop().time()
        )
        if is_over and not self._is_closing and peer not in self._hanging_up:
            self._hanging_up.add(peer)
            self._notify(self.listener.disturbed, peer, text)
            self._spawn("disconnect", self._disconnect, peer)

    async def _greet_caller(self, peer: PeerId, lane: Lane, connection: ByteStream) -> None:
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                await greet(connection)
        except (PeerError, TimeoutError):
            connection.abort()
            return
        finally:
            self._callers.ended(peer, connection)
        self._adopt(peer, lane, connection, is_ours=False)

    async def _disconnect(self, peer: PeerId) -> None:
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                await self.client.disconnect(peer)
        except (PeerError, TimeoutError) as error:
            logger.debug("%s could not be disconnected: %s", short_peer_id(peer), error)
        finally:
            self._hanging_up.discard(peer)

    def _adopt(self, peer: PeerId, lane: Lane, connection: ByteStream, *, is_ours: bool) -> None:
        """Add a greeted stream to the link to `peer`; the link is up once both lanes have a stream.

        Who dials has no link, or loses it: what is left here of an earlier one is dead, though this end may not be told
        for half a minute, as after its router's restart.
        """
        link, now = self._links.get(peer), asyncio.get_running_loop().time()
        if link is not None and link.is_running_out():
            self._lose(link, link.farewell)
            link = None
        elif link is not None and not is_ours and link.is_outdated(lane, now):
            self._lose(link, f"{short_peer_id(peer)} opened a new link")
            link = None
        if self._is_closing or self.lost is not None:
            connection.abort()
            return
        if link is None:
            link = self._links[peer] = self._new_link(peer)
        stream = LaneStream(lane, connection, crosses_until=now + CROSSING_SECONDS if is_ours else -math.inf)
        link.add(stream)
        if link.is_up:
            self._start_reading(link, stream)
        elif all(link.streams.values()):
            link.start([self._start_writing(link, lane) for lane in Lane])
            self._notify(self.listener.link_up, peer)
            for waiting in link.all_streams():  # not earlier, or the listener could receive a frame before `link_up`
                self._start_reading(link, waiting)

    def _start_reading(self, link: StreamLink, stream: LaneStream) -> None:
        stream.read_in(self._spawn(f"read {stream.lane.value}", self._read_stream, link, stream))

    def _new_link(self, peer: PeerId) -> StreamLink:
        link = StreamLink(peer, self.limits, self.counters)
        asyncio.get_running_loop().call_later(_GREETING_SECONDS, self._drop_if_incomplete, link)
        return link

    def _drop_if_incomplete(self, link: StreamLink) -> None:
        if not link.is_up:
            self._lose(link, "only one lane was opened")

    async def _read_stream(self, link: StreamLink, stream: LaneStream) -> None:
        reader = LaneReader(
            link.peer,
            stream,
            limits=self.limits,
            pace=self.download,
            was_read=link.take_read_count,
            may_read=lambda *frame: self.may_read(*frame),
        )
        try:
            while (frame := await reader.next_frame()) is not None:
                objection = None
                if frame:
                    objection = self._hand_over(link.peer, stream.lane, frame)
                else:
                    self.counters.lane(stream.lane).count_received(reader.skipped_bytes)
                if link.is_lost:
                    return  # the listener hung up meanwhile
                if stream.lane is Lane.BULK:
                    link.acknowledge((len(frame) or reader.skipped_bytes) + FRAME_PREFIX_BYTES)
                if objection is not None:
                    self._lose(link, objection)
                    return
        except FrameError as error:
            self._lose(link, str(error))
        except PeerError as error:
            self._end_stream(link, stream, str(error))
        else:
            self._run_out(link, stream)

    def _run_out(self, link: StreamLink, stream: LaneStream) -> None:
        """Handle the end of one stream; frames on the other streams may still be in flight."""
        stream.run_out()
        if len(link.streams[stream.lane]) > 1:
            self._end_stream(link, stream, "another stream carries this lane")
        elif link.has_run_out():
            self._lose(link, link.farewell)
        else:
            self._wait_for_rest(link, -math.inf)

    def _wait_for_rest(self, link: StreamLink, received_before: float) -> None:
        """Lose a closing link once data arrives more slowly than on the slowest supported connection.

        Vectors posted before the farewell may arrive after it; on a slow connection this takes longer than
        `linger_seconds`.
        """
        now, seconds = link.bytes_received(), self.limits.linger_seconds
        if link.is_lost or now - received_before < seconds * self.limits.slowest_bytes_per_second:
            self._lose(link, link.farewell)
        else:
            asyncio.get_running_loop().call_later(seconds, self._wait_for_rest, link, now)

    def _start_writing(self, link: StreamLink, lane: Lane) -> asyncio.Task[None]:
        went_idle, end_stream = self._went_idle, self._end_stream
        writer = LaneWriter(
            link, lane, limits=self.limits, pace=self.upload, went_idle=went_idle, end_stream=end_stream
        )
        return self._spawn(f"write {lane.value}", writer.run)

    def _end_stream(self, link: StreamLink, stream: LaneStream, reason: str) -> None:
        """Close one stream; the link is lost if its lane has no other."""
        stream.connection.abort()
        if stream in link.streams[stream.lane]:
            link.remove(stream)
            if not link.streams[stream.lane]:
                self._lose(link, reason)

    def _lose(self, link: StreamLink, reason: str) -> None:
        was_up = link.is_up
        for stream in self._take_down(link):
            stream.connection.abort()
        if was_up:
            self._notify(self.listener.link_lost, link.peer, reason)

    def _take_down(self, link: StreamLink) -> list[LaneStream]:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        return link.take_down()

    async def _close_gently(self) -> None:
        """Send what was posted, then close every stream and wait for the other ends to close theirs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.linger_seconds):
                while not all(link.is_idle() for link in self._links.values()):
                    self._went_idle.clear()
                    await self._went_idle.wait()
        self._is_closing = True
        streams = [stream for link in tuple(self._links.values()) for stream in self._take_down(link)]
        await asyncio.gather(*(stream.close_gently(self.limits.linger_seconds) for stream in streams))

    async def _identify(self) -> None:
        peer, addresses = await self.client.identify()
        if peer != self.peer:
            raise NetworkError(
                f"the key in the identity file belongs to {short_peer_id(peer)}, not {short_peer_id(self.peer)}"
            )
        listening = addresses if self._settings.host_maddrs else ()
        suffix = f"/p2p/{format_peer_id(peer)}"
        self._addresses = tuple(address + suffix for address in listening if "/tcp/" in address)

    async def _refresh_addresses(self) -> None:
        for looks in itertools.count():
            is_mapping = self._settings.map_port and looks < _FIRST_REFRESHES
            await asyncio.sleep(_FIRST_REFRESH_SECONDS if is_mapping else _ADDRESS_REFRESH_SECONDS)
            try:
                async with asyncio.timeout(_ADDRESS_REFRESH_SECONDS):
                    await self._identify()
            except (PeerError, TimeoutError) as error:
                logger.debug("the libp2p daemon did not return its addresses: %s", error)

    async def _watch_daemon(self) -> None:
        end = await self.daemon.wait_for_end()
        if self._is_closing:
            return
        self.lost = DaemonEnded(f"the libp2p daemon of this peer ended ({end}){ADVICE}")
        for link in tuple(self._links.values()):
            self._lose(link, "the libp2p daemon of this peer ended")
        self._notify(self.listener.transport_lost, self.lost)

    def _spawn(self, name: str, work: Callable[..., Awaitable[None]], *arguments: object) -> asyncio.Task[None]:
        task = self._tasks.create_task(self._contain(work, *arguments), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _contain(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        """Report exceptions to the loop, so that a bug triggered by one peer's bytes does not stop everything."""
        try:
            await work(*arguments)
        except Exception as error:
            context = {"message": "a task of the libp2p transport failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
