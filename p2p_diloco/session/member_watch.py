"""Remembers who is and was in the run, and what the log credits them with, across restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.wire.peer_name import decode_name
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.storage.member_files import (
    CREDIT_FILE,
    MEMBERS_FILE,
    MemberRecord,
    Members,
    encode_credit,
    encode_members,
    read_credit,
    read_members,
)
from p2p_diloco.storage.whole_file import replace_file

SAVE_SECONDS = 60.0
CHANGED_SECONDS = 5.0
"""Time from a new roster to its members in the file."""


class Listings:
    """The cycles in which each peer was listed, by the chain of rosters, which is the same for all peers."""

    def __init__(self) -> None:
        self._chain: list[Digest] = []
        self._last: Roster | None = None
        self.first: dict[PeerId, int] = {}
        """The cycle that first listed each peer."""
        self._cycles: dict[PeerId, int] = {}

    def follow(self, chain: Sequence[Roster]) -> None:
        """Take the rosters from the founding one to the one in force; another branch than before begins anew."""
        digests = [roster.digest() for roster in chain]
        if digests[: len(self._chain)] != self._chain:
            self._last, self.first, self._cycles, self._chain = None, {}, {}, []
        for roster in chain[len(self._chain) :]:
            for peer, cycles in self._until(roster.cycle):
                self._cycles[peer] = cycles
            for member in roster.members:
                self.first.setdefault(member.peer, member.since)
            self._last = roster
        self._chain = digests

    def _until(self, cycle: int) -> list[tuple[PeerId, int]]:
        """Return for each peer of the last roster the number of its cycles up to this one."""
        if self._last is None:
            return []
        more = max(cycle - self._last.cycle, 0)
        return [(member.peer, self._cycles.get(member.peer, 0) + more) for member in self._last.members]

    def cycles(self, cycle: int) -> dict[PeerId, int]:
        """Return for how many cycles each peer was listed until this one."""
        return self._cycles | dict(self._until(cycle))


class MemberWatch:
    """Watches the members of one run for `p2p-diloco members`; `look` about once a second, and `save` at the end.

    Args:
        folder: the run's folder.
        soon: runs a call on the writer thread.
        report: reports an event, in the loop.
        now: returns swarm seconds.
        wall: returns Unix seconds.
    """

    def __init__(
        self,
        folder: Path,
        engine: PeerEngine,
        *,
        soon: Callable[[Callable[[], None]], asyncio.Future[None]],
        report: Callable[[str, str], None],
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._folder, self._engine = folder, engine
        self._soon, self._report, self._now, self._wall = soon, report, now, wall
        self._records: dict[PeerId, MemberRecord] = {}
        self._listings = Listings()
        self._roster: Digest | None = None
        self._due: float | None = None
        self._is_refused = False
        with self._reporting():
            self._records = {record.peer: record for record in read_members(folder).records}
        with self._reporting():
            engine.credit.recall(read_credit(folder))

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except StateError as error:
            self._report("members", str(error))

    def look(self, moment: float) -> None:
        """Note who is there, and save now and then.

        Args:
            moment: seconds of any monotonic clock.
        """
        if self._engine.book.in_force is None:
            return
        before = self._roster
        self._note()
        if self._due is not None and self._roster != before:
            self._due = min(self._due, moment + CHANGED_SECONDS)
        if self._due is None or moment >= self._due:
            self._due = moment + SAVE_SECONDS
            self._save_soon()

    async def save(self) -> None:
        """Save everything, and wait for it."""
        if self._engine.book.in_force is not None:
            self._note()
            with contextlib.suppress(OSError):  # reported
                await self._save_soon()

    # -- the members

    def _note(self) -> None:
        engine, clock = self._engine, self._engine.rules.clock
        if self._roster != engine.book.in_force_digest:
            self._roster = engine.book.in_force_digest
            self._listings.follow([certified.roster for certified in engine.book.chain()])
            for peer, cycle in self._listings.first.items():
                since = clock.begin(cycle * clock.num_fragments)
                record = self._records.get(peer, MemberRecord(peer=peer, since=since))
                self._records[peer] = replace(record, since=min(record.since, since))
            self._note_states()
        now, wall, me = self._now(), self._wall(), engine.me
        for peer, view in engine.membership.liveness.views.items():
            if peer in self._records:
                beat = view.heartbeat
                self._note_progress(peer, decode_name(beat.name), beat.incarnation, beat.tokens, wall - (now - view.at))
        if me.peer in self._records:
            self._note_progress(me.peer, decode_name(me.name), me.incarnation, engine.conditions.progress.tokens, wall)

    def _note_progress(self, peer: PeerId, name: str, incarnation: int, tokens: int, seen: float) -> None:
        record = self._records[peer]
        is_new = incarnation != record.incarnation
        self._records[peer] = replace(
            record,
            name=name,
            last_seen=seen,
            incarnation=incarnation,
            tokens=tokens,
            tokens_before=record.tokens_before + (record.tokens if is_new else 0),
        )

    def _note_states(self) -> None:
        engine, now = self._engine, self._now()
        roster, liveness = engine.book.in_force, engine.membership.liveness
        listed = roster.peers() if roster is not None else frozenset()
        alive = liveness.alive(now).keys() | ({engine.me.peer} if not engine.membership.local.leaving else set())
        has_left = engine.membership.declarations.has_left
        cycles = self._listings.cycles(engine.rules.clock.cycle_at(now))
        for peer, record in self._records.items():
            if peer in listed:
                state = "silent" if peer in liveness.views and peer not in alive else "member"
            elif peer in alive:
                state = "not listed"
            else:
                state = "left" if record.state == "left" or has_left(peer, record.incarnation) else "gone"
            hours = cycles.get(peer, 0) * engine.rules.cycle_seconds / 3600.0
            self._records[peer] = replace(record, state=state, hours=max(hours, 0.0))

    # -- the files

    def _save_soon(self) -> asyncio.Future[None]:
        self._note_states()
        members = encode_members(Members(updated=self._wall(), records=tuple(self._records.values())))
        credit = encode_credit(self._engine.credit.saved())
        saving = self._soon(lambda: self._write(members, credit))
        saving.add_done_callback(self._saved)
        return saving

    def _write(self, members: bytes, credit: bytes) -> None:
        replace_file(self._folder / MEMBERS_FILE, members)
        replace_file(self._folder / CREDIT_FILE, credit)

    def _saved(self, saving: asyncio.Future[None]) -> None:
        error = None if saving.cancelled() else saving.exception()
        if isinstance(error, OSError) and not self._is_refused:
            path = self._folder / MEMBERS_FILE
            self._report("members", f"cannot write {path}: {error.strerror}; the peer continues without it")
        self._is_refused = error is not None
