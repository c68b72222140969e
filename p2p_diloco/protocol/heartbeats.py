"""Builds heartbeats: the state of this peer, and the tips of its fragments at the end of their last round."""

from __future__ import annotations

import math
from collections.abc import Sequence

from p2p_diloco.ids import ZERO_DIGEST, Digest
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.protocol.wire.entry import NO_SIGNATURE
from p2p_diloco.protocol.wire.frames import MOST_COUNTED
from p2p_diloco.protocol.wire.heartbeat import SHORT_DIGEST_BYTES, FragmentHead, Heartbeat
from p2p_diloco.span_log import as_float32


class HeartbeatBuilder:
    """Builds heartbeats. A state machine without I/O.

    The fragment of the round in progress advances at different times on different peers. So its digest is frozen when
    the round begins, and two peers can compare the fragment at its closed boundary at any time.
    """

    def __init__(self, *, rules: RunRules, membership: Membership, chains: ChainBook) -> None:
        self._rules = rules
        self._membership = membership
        self._chains = chains
        self._next = -math.inf
        self._sequence = 0
        self._frozen: tuple[int, Digest] | None = None

    @property
    def next_at(self) -> float:
        """Time at which the next heartbeat is due."""
        return self._next

    def is_due(self, now: float) -> bool:
        """Return whether a heartbeat is due, also when time was set back; if so, the caller must send it."""
        if 0.0 < self._next - now <= self._rules.heartbeat_seconds:
            return False
        self._next = now + self._rules.heartbeat_seconds
        return True

    def freeze(self, round_index: int) -> None:
        """Keep the digest of the fragment of the round that begins."""
        fragment = self._rules.clock.fragment(round_index)
        digest = self._digest(fragment)
        self._frozen = (fragment, digest) if digest is not None else None

    def thaw(self) -> None:
        """Publish all fragments as they are now. Call this when a branch is given up, as the kept digest is of it."""
        self._frozen = None

    def _digest(self, fragment: int) -> Digest | None:
        digest = self._chains.fragment_digest(fragment, self._rules.num_spans[fragment])
        return Digest(digest[:SHORT_DIGEST_BYTES]) if digest is not None else None

    def boundary_digest(self, fragment: int) -> Digest | None:
        """Return the digest of a fragment's tips at its closed boundary; None while a span is missing."""
        if self._frozen is not None and self._frozen[0] == fragment:
            return self._frozen[1]
        return self._digest(fragment)

    def closed_heads(self, now: float) -> tuple[FragmentHead, ...]:
        """Return the log positions of all fragments at their closed boundaries; empty while a span is missing."""
        closed_round = self._rules.clock.closed_round
        digests = [self.boundary_digest(fragment) for fragment in range(len(self._rules.num_spans))]
        heads = (FragmentHead(round=closed_round(n, now), digest=d) for n, d in enumerate(digests) if d is not None)
        return tuple(heads) if None not in digests else ()

    def heartbeat(self, heads: Sequence[FragmentHead], *, is_nearly_level: bool = False) -> Heartbeat:
        """Return this peer's next heartbeat, signed."""
        self._sequence += 1
        local, book = self._membership.local, self._membership.book
        me, roster, conditions = local.me, book.in_force, local.conditions
        progress, is_away = conditions.progress, local.leaving or conditions.is_paused
        unsigned = Heartbeat(
            run=self._rules.run,
            peer=me.peer,
            incarnation=me.incarnation,
            sequence=self._sequence,
            roster=book.in_force_digest or ZERO_DIGEST,
            roster_k=roster.k if roster is not None else 0,
            heads=tuple(heads),
            ready=local.ready and not is_away,
            takes_entries=(local.ready or is_nearly_level) and not is_away,
            can_be_dialled=conditions.can_be_dialled and not conditions.is_paused,
            share=conditions.share,
            trains=me.trains,
            tokens=min(progress.tokens, MOST_COUNTED),
            steps=min(progress.steps, MOST_COUNTED),
            tokens_per_second=0.0 if conditions.is_paused else _sendable(progress.tokens_per_second),
            loss=_sendable(progress.loss),
            clock_behind=_sendable(conditions.clock_behind_seconds),
            name=me.name,
            signature=NO_SIGNATURE,
        )
        return unsigned.signed(me.sign)


def _sendable(value: float) -> float:
    """Return a finite float32, the only kind that a frame holds: a diverged loss must not stop the heartbeats."""
    return as_float32(value) if math.isfinite(value) else 0.0
