"""Signed address records: this peer's own, and those that it has learnt of other peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from p2p_diloco.errors import FrameError
from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.wire.messages import MOST_RECORDS
from p2p_diloco.transport.directory import MOST_AHEAD_SECONDS, RECORD_LIFETIME_SECONDS, PeerRecord, decode_record
from p2p_diloco.transport.link import Transport

MOST_HELD_BACK = 64
"""Maximum number of records from the future that are kept in case it is this machine's clock that is wrong."""
MOST_KNOWN = 4096
"""Maximum number of peers whose addresses are kept: records cost their makers nothing."""
MOST_ISSUED = 256
"""Number of its latest records that a peer recognises as its own."""


class OwnRecord:
    """Issues this peer's record, and recognises records of its identity that it has not issued.

    Args:
        make: returns a signed record with the current addresses.
        report: called with `(topic, text)` when another process has this identity.
    """

    def __init__(
        self, make: Callable[[], PeerRecord], *, unix_seconds: Callable[[], float], report: Callable[[str, str], None]
    ) -> None:
        self._make = make
        self._unix_seconds = unix_seconds
        self._report = report
        self._began = unix_seconds()
        self._addresses: set[str] = set()
        self._issued: deque[float] = deque(maxlen=MOST_ISSUED)
        """Issue times of this peer's records, including records that an earlier start dated in the future."""
        self._has_twin = False

    @property
    def can_be_dialled(self) -> bool:
        """Whether this peer announces that it can be dialled."""
        return self._make().can_be_dialled

    def issue(self) -> PeerRecord:
        record = self._make()
        self._addresses.update(record.addresses)
        self._issued.append(record.issued_at)
        return record

    def look_for_twin(self, record: PeerRecord) -> None:
        """Report once that another process has this identity: it signs current records that this one has not issued.

        A twin that cannot be dialled names no address in its records. An earlier start whose clock was ahead may have
        issued records dated in the future, so such a date alone is not evidence.
        """
        self.issue()
        foreign = [address for address in record.addresses if address not in self._addresses]
        since = self._issued[0] if len(self._issued) == MOST_ISSUED else self._began
        is_unknown = record.issued_at > since and record.issued_at not in self._issued
        if is_unknown and record.issued_at > self._unix_seconds():
            self._issued.append(record.issued_at)
            is_unknown = False
        if (is_unknown or (foreign and record.issued_at > self._began)) and not self._has_twin:
            self._has_twin = True
            where = f"announces {foreign[0]!r}" if foreign else "announces no address of its own"
            self._report(
                "identity",
                f"another process has this peer's identity and {where}; both take part as one peer "
                "and disturb each other: stop one of them, and give it its own state directory instead of a copy",
            )


@dataclass(frozen=True, slots=True)
class _Learnt:
    """The newest record of a peer, and the time at which it came, by this machine's clock: theirs may be wrong."""

    record: PeerRecord
    at: float


class PeerRecords:
    """Knows the addresses of other peers, a bounded number of them.

    Args:
        given: addresses from the invite, the settings and earlier starts. These peers never count as strangers.
        is_unknown_to_run: returns whether a peer is not a member, was not one recently and is not the founder.
        forgotten: called with a peer whose record made room for another.

    Attributes:
        known: addresses by peer, also of peers without a record.
    """

    def __init__(
        self,
        own: OwnRecord,
        *,
        transport: Transport,
        given: dict[PeerId, tuple[str, ...]],
        unix_seconds: Callable[[], float],
        is_unknown_to_run: Callable[[PeerId], bool],
        forgotten: Callable[[PeerId], None],
    ) -> None:
        self.known = dict(given)
        self._given = dict(given)
        self._own = own
        self._transport = transport
        self._unix_seconds = unix_seconds
        self._is_unknown_to_run = is_unknown_to_run
        self._forgotten = forgotten
        self._learnt: dict[PeerId, _Learnt] = {}
        self._held_back: dict[PeerId, PeerRecord] = {}
        """Records of peers whose clocks are ahead of this machine's."""

    def get(self, peer: PeerId) -> PeerRecord | None:
        learnt = self._learnt.get(peer)
        return learnt.record if learnt is not None else None

    def current(self) -> list[PeerId]:
        """Return the peers announced recently."""
        oldest = self._unix_seconds() - RECORD_LIFETIME_SECONDS
        return [peer for peer, learnt in self._learnt.items() if learnt.at >= oldest]

    def of(self, peers: frozenset[PeerId]) -> dict[PeerId, PeerRecord]:
        return {peer: learnt.record for peer, learnt in self._learnt.items() if peer in peers}

    def is_stranger(self, peer: PeerId) -> bool:
        """Return whether a peer is neither given nor known to the run."""
        return peer not in self._given and self._is_unknown_to_run(peer)

    def learn(self, record: PeerRecord) -> None:
        """Take a record if it is newer than what is here, and if there is room."""
        known = self.get(record.peer)
        if record.run != self._transport.run:
            return
        if record.peer == self._transport.peer:
            self._own.look_for_twin(record)
            return
        if known is not None and record.issued_at <= known.issued_at:
            return
        if record.issued_at > self._unix_seconds() + MOST_AHEAD_SECONDS:
            self._hold_back(record)  # it would count as the newest until then
            return
        if known is None and len(self._learnt) >= MOST_KNOWN and not self._forget_one():
            return
        self._learnt[record.peer] = _Learnt(record, self._unix_seconds())
        if record.addresses:
            self.known[record.peer] = tuple(dict.fromkeys((*record.addresses, *self._given.get(record.peer, ()))))

    def introduced(self, records: tuple[bytes, ...]) -> bool:
        """Take records from a peer, and drop those not signed by the peer that they name; return whether one is new."""
        has_new = False
        for encoded in records:
            try:
                record = decode_record(encoded)
            except FrameError:
                continue
            is_new = record.peer not in self.known
            self.learn(record)
            has_new |= is_new and record.peer in self.known
        return has_new

    def introductions(self) -> tuple[bytes, ...]:
        """Return signed records for a new peer: our own, then those of members, of other linked peers, and of the rest.

        Within each group the newest come first. Made-up identities are not members.
        """
        linked = self._transport.linked_peers()

        def rank(record: PeerRecord) -> tuple[bool, bool, float]:
            return self.is_stranger(record.peer), record.peer not in linked, -record.issued_at

        others = sorted((learnt.record for learnt in self._learnt.values()), key=rank)[: MOST_RECORDS - 1]
        return tuple(record.encode() for record in (self._own.issue(), *others))

    def clock_corrected(self) -> None:
        """Judge the times of records anew: this machine's clock was found to be wrong."""
        now = self._unix_seconds()
        self._learnt = {peer: replace(learnt, at=now) for peer, learnt in self._learnt.items()}
        held_back, self._held_back = self._held_back, {}
        for record in held_back.values():
            self.learn(record)

    def _hold_back(self, record: PeerRecord) -> None:
        """Keep a record from the future; a stranger's makes room for one of a member."""
        if len(self._held_back) >= MOST_HELD_BACK and record.peer not in self._held_back:
            stranger = next(filter(self.is_stranger, self._held_back), None)
            if stranger is None or self.is_stranger(record.peer):
                return
            del self._held_back[stranger]
        self._held_back[record.peer] = record

    def _forget_one(self) -> bool:
        """Drop the oldest record of an unlinked stranger, or else of any unlinked peer; False if there is none."""
        unlinked = self._learnt.keys() - self._transport.linked_peers()
        strangers = set(filter(self.is_stranger, unlinked)) or unlinked
        if not strangers:
            return False
        oldest = min(strangers, key=lambda peer: (self._learnt[peer].record.issued_at, peer))
        del self._learnt[oldest]
        self.known.pop(oldest, None)
        self._forgotten(oldest)
        return True
