"""The shell around a shared text: fetches what is missing from linked peers, serves what is here within a budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from p2p_diloco.errors import P2PDilocoError, StateError
from p2p_diloco.ids import Digest, PeerId, short_peer_id
from p2p_diloco.node.ports import TextCopy
from p2p_diloco.node.reports import Report
from p2p_diloco.node.vector_actions import Post, Worker
from p2p_diloco.protocol.files.fetch import Fetch, Whole
from p2p_diloco.protocol.wire.file_list import MOST_LIST_BYTES, FileList
from p2p_diloco.protocol.wire.messages import MOST_BLOCK_BYTES, BlockRequest, Holdings, HoldingsRequest, TextBlock
from p2p_diloco.rate import counted
from p2p_diloco.transport.link import Lane, Transport
from p2p_diloco.transport.rate_limit import Buckets, Rate, TokenBucket, piece_bytes
from p2p_diloco.wording import format_bytes, format_seconds

TURN_SECONDS = 0.5
HOLDINGS_SECONDS = 10.0
"""Interval at which linked peers are asked what they hold, while pieces are missing here."""
ANSWER_SECONDS = 15.0
LOOK_AGAIN_SECONDS = 0.05
"""Pause before vectors that wait are looked at again."""
MOST_UNREAD_BYTES = 4 * MOST_BLOCK_BYTES
"""Requests of a peer are dropped while more than this of the text waits to be written to it."""
DISK_SECONDS = 30.0
"""Pause after a failed write."""
NOBODY_SECONDS = 30.0
REPORT_SECONDS = 10.0
BUSY_SHARE, IDLE_SHARE = 0.1, 0.5
UNKNOWN_BYTES_PER_SECOND = 128 * (1 << 20)
"""Assumed rate of a line that no cap limits and no traffic has filled."""
STRANGERS_SHARE = 0.5
"""Share of the budget for all peers together that are not members. A joiner is one until it holds the run's state."""
MOST_WAITING = 64
"""Maximum number of peers whose request waits; each has one."""
COPIES_A_DAY = 2.0
"""Texts that one peer may be sent at once, and in each day: it needs each piece once."""
DAY_SECONDS = 86_400.0
HEADER_BYTES = 128
"""At least as many as the header of a block has."""
LEAST_CHARGED_BYTES = 16 * 1024
"""Bytes that a block of a longer piece counts at least in the budgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCopy:
    """A peer's copy of the run's text, and what sharing it needs.

    Attributes:
        copy: the copy, on disk.
        worker: reads, writes and checks it.
        line: returns the usable upload rate of this peer in bytes per second; None: unknown.
        failed: called with an error that ends this peer, such as a disk that is too small.
    """

    copy: TextCopy
    worker: Worker
    line: Callable[[], float | None]
    failed: Callable[[BaseException], None]


class Wanted(NamedTuple):
    """A block that a peer waits for."""

    peer: PeerId
    digest: Digest
    offset: int


class TextExchange:
    """Fetches and serves one text. Create it in the loop; `run` continues until it is cancelled.

    Args:
        is_stranger: returns whether a peer is not a member.
        now: returns swarm seconds.
    """

    def __init__(
        self,
        shared: SharedCopy,
        *,
        transport: Transport,
        post: Post,
        report: Report,
        is_stranger: Callable[[PeerId], bool],
        now: Callable[[], float],
    ) -> None:
        self._shared = shared
        self._copy, self._worker = shared.copy, shared.worker
        self._transport = transport
        self._post = post
        self._report = report
        self._is_stranger = is_stranger
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._listed: FileList | None = None
        self._fetch: Fetch | None = None
        self._upload: TextUpload | None = None
        self._linked: frozenset[PeerId] = frozenset()
        self._requested_at: dict[PeerId, float] = {}
        self._posted: dict[PeerId, int] = {}
        self._is_reading = False
        self._gone = 0
        self._looking: asyncio.TimerHandle | None = None
        self._disk_until = float("-inf")
        self._progress = _Progress(report, self._loop.time())

    async def run(self) -> None:
        """Fetch until everything is here; serve until cancelled."""
        if self._copy.listed is None:
            self._fetch = Fetch([MOST_LIST_BYTES], missing=1, is_exact=False)
        else:
            self._list_is_here(self._copy.listed)
        while True:
            self._follow_links()
            self._notice_damage()
            self._request_blocks()
            await asyncio.sleep(TURN_SECONDS)

    def receive(self, peer: PeerId, message: HoldingsRequest | Holdings | BlockRequest | TextBlock) -> None:
        match message:
            case HoldingsRequest():
                self._post(peer, self._holdings(message), self._now() + ANSWER_SECONDS)
            case Holdings():
                self._take_holdings(peer, message)
            case BlockRequest():
                self._queue(Wanted(peer, message.digest, message.offset))
            case TextBlock():
                self._take_block(peer, message)

    # -- what is here

    def _list_is_here(self, listed: FileList) -> None:
        self._listed = listed
        self._upload = TextUpload(listed.num_bytes, listed.num_pieces, self._is_stranger)
        self._check_earlier(listed)

    def _check_earlier(self, listed: FileList) -> None:
        """Check what an earlier start has written, piece by piece, and then fetch the rest."""
        unchecked = self._copy.unchecked
        if unchecked:
            piece = (unchecked & -unchecked).bit_length() - 1
            self._work(lambda _: self._check_earlier(listed), self._copy.check, piece)
            return
        sizes = [piece.num_bytes for piece in listed.pieces()]
        missing = ((1 << len(sizes)) - 1) & ~self._copy.held
        banned = self._fetch.banned if self._fetch is not None else ()
        seed = int.from_bytes(self._transport.peer[:8], "little")
        self._fetch = Fetch(sizes, missing=missing, seed=seed, banned=banned)
        self._requested_at = {}
        self._progress.begin(listed, held_bytes(listed, self._copy.held), self._loop.time())

    def _work(self, then: Callable[..., None], function: Callable[..., object], *args: object) -> None:
        """Run `function` on the worker and pass its result to `then` in the loop; an error of ours ends this peer."""

        def done(result: object, error: BaseException | None) -> None:
            if error is None:
                then(result)
            else:
                self._fail(error)

        self._worker.submit(done, function, *args)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, P2PDilocoError):
            self._shared.failed(error)
        else:
            self._loop.call_exception_handler({"message": "work on the text failed", "exception": error})

    def _holdings(self, request: HoldingsRequest) -> Holdings:
        listed, held = self._listed, self._copy.held
        num_bytes = (listed.num_pieces + 7) // 8 if listed is not None else 0
        return Holdings(nonce=request.nonce, has_list=listed is not None, pieces=held.to_bytes(num_bytes, "little"))

    def _notice_damage(self) -> None:
        """Report pieces that were here and have changed on the disk; fetch them again if this copy is fetched."""
        if self._fetch is None or self._listed is None or self._copy.unchecked:
            return
        gone = ((1 << self._listed.num_pieces) - 1) & ~self._copy.held & ~self._fetch.missing
        if self._copy.is_fetched and not self._copy.has_room_for_all:
            self._fetch.lack(gone)  # it made room for others
            return
        if gone == self._gone:
            return
        self._gone = gone
        what = f"{counted(gone.bit_count(), 'piece')} of the run's text on this disk changed"
        if self._copy.is_fetched:
            self._fetch.lack(gone)
            self._report("text", f"{what}; fetching them again", None)
            self._gone = 0
        else:
            self._report("text", f"{what} and cannot be sent to others; restore the files and start again", None)

    # -- fetching

    def _follow_links(self) -> None:
        """Forget lost peers; ask the others what they hold, now and then."""
        linked, now = self._transport.linked_peers(), self._loop.time()
        for peer in self._linked - linked:
            self._requested_at.pop(peer, None)
            self._posted.pop(peer, None)
            if self._fetch is not None:
                self._fetch.lose(peer)
            if self._upload is not None:
                self._upload.lose(peer)
        self._linked = linked
        if self._fetch is None or not self._fetch.missing:
            return
        for peer in sorted(linked - self._fetch.banned):
            if now - self._requested_at.get(peer, float("-inf")) >= HOLDINGS_SECONDS:
                self._requested_at[peer] = now
                self._post(peer, HoldingsRequest(nonce=0), self._now() + ANSWER_SECONDS)
        self._progress.look(self._fetch, now)

    def _take_holdings(self, peer: PeerId, message: Holdings) -> None:
        if self._fetch is None or peer not in self._requested_at:
            return
        held = int.from_bytes(message.pieces, "little") if self._listed is not None else int(message.has_list)
        self._fetch.set_holdings(peer, held)
        self._request_blocks()

    def _request_blocks(self) -> None:
        now = self._loop.time()
        if self._fetch is None or not self._fetch.missing or now < self._disk_until:
            return
        is_tight = self._listed is not None and not self._copy.has_room_for_all
        self._fetch.prefer(self._copy.wanted, alone=is_tight)
        deadline = self._now() + ANSWER_SECONDS
        for wanted in self._fetch.asks(now):
            self._post(wanted.peer, BlockRequest(digest=self._digest(wanted.piece), offset=wanted.offset), deadline)

    def _digest(self, piece: int) -> Digest:
        listed = self._listed
        return self._copy.digest if listed is None else listed.piece(piece).digest

    def _take_block(self, peer: PeerId, message: TextBlock) -> None:
        fetch = self._fetch
        piece = fetch.asked_of(peer) if fetch is not None else None
        if fetch is None or piece is None or self._digest(piece) != message.digest:
            return
        came = fetch.take_block(peer, piece, message.offset, message.total_bytes, message.block, self._loop.time())
        if came is not None:
            self._keep(fetch, came)
        self._request_blocks()

    def _keep(self, fetch: Fetch, came: Whole) -> None:
        """Have a piece, or the list, checked and stored."""
        is_list = self._listed is None

        def done(result: Any, error: BaseException | None) -> None:
            if isinstance(error, StateError) and not is_list:
                self._report("text", str(error), None)
                self._disk_until = self._loop.time() + DISK_SECONDS
                fetch.postpone(came.piece)
            elif error is not None:
                self._fail(error)
            elif not result:
                fetch.refuse(came.peer, came.piece)
                self._report_wrong(came, is_list=is_list)
            elif is_list:
                assert self._copy.listed is not None, "it was stored"
                self._list_is_here(self._copy.listed)
            else:
                fetch.keep(came.peer, came.piece)
                self._progress.add(came, self._loop.time())
            self._request_blocks()

        if is_list:
            self._worker.submit(done, self._copy.adopt, came.content)
        else:
            self._worker.submit(done, self._copy.keep, came.piece, came.content)

    def _report_wrong(self, came: Whole, *, is_list: bool) -> None:
        listed, what = self._listed, "a list of files"
        if listed is not None and not is_list:
            piece = listed.piece(came.piece)
            what = f"{format_bytes(piece.num_bytes)} of {listed.files[piece.file].name}"
        text = f"{short_peer_id(came.peer)} sent {what} with other bytes than the run's; fetching the text from others"
        self._report("text", text, came.peer)

    # -- serving

    def _queue(self, wanted: Wanted) -> None:
        unread = self._unread(wanted.peer)
        if self._upload is None or unread > MOST_UNREAD_BYTES:
            return
        self._upload.queue(wanted, self._loop.time())
        self._serve()

    def _unread(self, peer: PeerId) -> int:
        """Return how much of the text waits to be written to a peer, at most."""
        waiting = self._transport.waiting_bytes(peer, Lane.BULK)
        if not waiting:
            self._posted.pop(peer, None)
        return min(waiting, self._posted.get(peer, 0))

    def _vectors_wait(self) -> bool:
        waiting = self._transport.counters.bulk.bytes_waiting
        return waiting > sum(map(self._unread, tuple(self._posted)))

    def _serve(self) -> None:
        """Read and send the next block, if the budget allows it now; look again later otherwise."""
        if self._is_reading or self._upload is None:
            return
        line, now = self._shared.line(), self._loop.time()
        rate = text_rate(line, is_busy=self._vectors_wait())
        wanted = self._upload.next(now) if rate else None
        if wanted is None:
            self._serve_later(now)
            return
        self._is_reading = True

        def read(result: Any, error: BaseException | None) -> None:
            self._is_reading = False
            if error is not None:
                self._loop.call_exception_handler({"message": "the text could not be read", "exception": error})
                return
            self._send(wanted, *result, rate=rate)
            self._serve()

        self._worker.submit(read, self._copy.read, wanted.digest, wanted.offset, block_bytes(line))

    def _serve_later(self, now: float) -> None:
        assert self._upload is not None, "checked before"
        seconds = self._upload.wait_seconds(now)
        if seconds is not None and self._looking is None:
            self._looking = self._loop.call_later(max(seconds, LOOK_AGAIN_SECONDS), self._look_again)

    def _look_again(self) -> None:
        self._looking = None
        self._serve()

    def _send(self, wanted: Wanted, total_bytes: int, block: bytes, *, rate: float) -> None:
        assert self._upload is not None, "it was requested"
        reply = TextBlock(digest=wanted.digest, total_bytes=total_bytes, offset=wanted.offset, block=block)
        # Text that waits must not be taken for a vector that waits.
        self._posted[wanted.peer] = self._unread(wanted.peer) + len(block) + HEADER_BYTES
        charged = charged_bytes(len(block), total_bytes, self._shared.line())
        self._upload.sent(wanted.peer, charged, self._loop.time(), rate)
        self._post(wanted.peer, reply, self._now() + ANSWER_SECONDS)


class TextUpload:
    """Decides when to send which block: one at a time, within a share of this peer's line.

    Averaging comes first. While vectors wait, a text gets a tenth of the line, which a run leaves to headers and short
    stalls anyway; on a line of unknown rate it waits. Otherwise it gets at most half. A state machine; times are loop
    time.

    Args:
        text_bytes: length of the text.
        num_pieces: number of its pieces.
        is_stranger: returns whether a peer is not a member.
    """

    def __init__(self, text_bytes: int, num_pieces: int, is_stranger: Callable[[PeerId], bool]) -> None:
        self._is_stranger = is_stranger
        copies = COPIES_A_DAY * (text_bytes + HEADER_BYTES * num_pieces + MOST_BLOCK_BYTES)
        self._quota_rate = Rate(copies / DAY_SECONDS, copies)
        self._quotas: Buckets[PeerId] = Buckets()
        self._shared_quota = TokenBucket(**self._quota_rate._asdict())
        self._waiting: dict[PeerId, Wanted] = {}
        self._free_at = self._free_for_strangers_at = float("-inf")

    def queue(self, wanted: Wanted, now: float) -> None:
        """Queue a request; it replaces an earlier one of the same peer. Dropped if the peer has had its share."""
        is_known = wanted.peer in self._waiting
        if (is_known or len(self._waiting) < MOST_WAITING) and self._quota(wanted.peer, now).has_one(now):
            self._waiting[wanted.peer] = wanted

    def lose(self, peer: PeerId) -> None:
        """Drop the request of a peer whose link is lost."""
        self._waiting.pop(peer, None)

    def next(self, now: float) -> Wanted | None:
        """Return the request to answer now, the longest-waiting one first; None: not yet. Then call `sent`."""
        if now < self._free_at:
            return None
        strangers_may = now >= self._free_for_strangers_at
        peer = next((peer for peer in self._waiting if strangers_may or not self._is_stranger(peer)), None)
        return self._waiting.pop(peer) if peer is not None else None

    def sent(self, peer: PeerId, num_bytes: int, now: float, rate: float) -> None:
        """Book a block that was sent, with what it counts, at `rate` bytes per second."""
        self._free_at = max(self._free_at, now) + num_bytes / rate
        if self._is_stranger(peer):
            self._free_for_strangers_at = max(self._free_for_strangers_at, now) + num_bytes / (STRANGERS_SHARE * rate)
        self._quota(peer, now).spend(num_bytes, now)

    def wait_seconds(self, now: float) -> float | None:
        """Return how long until a request may be answered; None: none waits."""
        if not self._waiting:
            return None
        at = self._free_at
        if all(map(self._is_stranger, self._waiting)):
            at = max(at, self._free_for_strangers_at)
        return max(at - now, 0.0)

    def _quota(self, peer: PeerId, now: float) -> TokenBucket:
        quota = self._quotas.get(peer, now, self._quota_rate)
        return quota if quota is not None else self._shared_quota  # more peers than links


def text_rate(line: float | None, *, is_busy: bool) -> float:
    """Return the rate for a text in bytes per second, given that of the line; None: unknown."""
    if line is None:
        return 0.0 if is_busy else IDLE_SHARE * UNKNOWN_BYTES_PER_SECOND
    return (BUSY_SHARE if is_busy else IDLE_SHARE) * line


def block_bytes(line: float | None) -> int:
    """Return the length of blocks, so that a vector waits for at most a twentieth of a second for one."""
    return MOST_BLOCK_BYTES if line is None else min(piece_bytes(line), MOST_BLOCK_BYTES)


def charged_bytes(num_bytes: int, piece: int, line: float | None) -> int:
    """Return how many bytes an answer counts in the budgets, given the lengths of its block and of its piece.

    One byte of a long piece counts more, because the whole piece is read and hashed for it, and so does an answer
    without a block. A short piece counts as it is, so that a text of many small files fits the allowance.
    """
    least = min(LEAST_CHARGED_BYTES, block_bytes(line))
    return HEADER_BYTES + (max(num_bytes, min(least, piece)) if num_bytes else least)


class _Progress:
    """Reports how far the text is here: at first, every ten seconds, and at the end."""

    def __init__(self, report: Report, now: float) -> None:
        self._report = report
        self._total = self._here = 0
        self._began = self._seen_at = self._reported_at = now
        self._has_reported_none = False
        self._senders: dict[PeerId, int] = {}

    def begin(self, listed: FileList, here: int, now: float) -> None:
        self._total, self._here = listed.num_bytes, here
        self._began = self._seen_at = self._reported_at = now
        size = f"{counted(len(listed.files), 'file')}, {format_bytes(self._total)}"
        if here < self._total:
            text = f"fetching {format_bytes(self._total - here)} of the run's text ({size}) from other peers"
        else:
            text = f"the run's text is here ({size}) and is served to other peers"
        self._report("text", text, None)

    def look(self, fetch: Fetch, now: float) -> None:
        """Report, once, that nobody holds what is missing."""
        if fetch.sources():
            self._seen_at, self._has_reported_none = now, False
        elif now - self._seen_at > NOBODY_SECONDS and not self._has_reported_none:
            self._has_reported_none = True
            what = f"the missing {format_bytes(self._total - self._here)}" if self._total else "the list"
            self._report("text", f"no linked peer holds {what} of the run's text; waiting for one", None)

    def add(self, came: Whole, now: float) -> None:
        """Count a piece that is here now."""
        self._here += len(came.content)
        self._senders[came.peer] = self._senders.get(came.peer, 0) + len(came.content)
        if now - self._reported_at < REPORT_SECONDS and self._here < self._total:
            return
        self._reported_at = now
        senders = ", ".join(short_peer_id(peer) for peer in sorted(self._senders, key=self._senders.__getitem__)[-3:])
        others = f" and {counted(len(self._senders) - 3, 'other')}" if len(self._senders) > 3 else ""
        amount = f"{format_bytes(self._here)} of {format_bytes(self._total)}"
        text = f"{amount} of the run's text are here, from {senders}{others}"
        if self._here == self._total:
            text = f"all of the run's text is here, {format_bytes(self._total)} in {format_seconds(now - self._began)}"
        self._report("text", text, None)


def held_bytes(listed: FileList, held: int) -> int:
    """Return the bytes of the pieces in a set of bits."""
    return sum(piece.num_bytes for number, piece in enumerate(listed.pieces()) if held >> number & 1)
