"""One or two members, and strangers that claim to be ready and to hold other tips.

Until it is ready, the only member of a run asks strangers for entries: it may have lost its own
(docs/decisions/agreement.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest

from p2p_diloco.errors import PeerError
from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.wire.entry import Entry
from p2p_diloco.protocol.wire.heartbeat import SHORT_DIGEST_BYTES, FragmentHead
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Message,
    SpanReply,
    SpanRequest,
)
from p2p_diloco.span_log import SpanHead
from simulator.coverage import share_of_spans
from simulator.hostility import Caller
from simulator.machine import Machine
from simulator.run import run_rules, sign_as
from simulator.simulation import Simulation

pytestmark = pytest.mark.story

RULES = run_rules(num_spans=(2, 2), heartbeat_seconds=2.0)
PATIENT_ROUNDS = (RULES.stalled_cycles + 1) * RULES.clock.num_fragments
"""Duration of a stall, plus a cycle in which a roster lists the restarted member."""
ABOVE = (3, 0)
"""Heights that the two strangers claim above the member's."""
ATTACK_ROUNDS = 10
BEAT_SECONDS = 0.5
LOST = 10
"""Number of entries lost of each span."""
NOTHING, WRONG, LATER = ("nothing", "nothing"), ("refusals", "lies"), ("later entries", "later entries")
"""Answers of the two strangers to a peer that requests an entry."""


class ReadyStranger(Caller):
    """Claims to be ready and to hold another tip; has no entry that leads there, but knows all entries ever made.

    Args:
        above: how much greater its height is than the member's.
        answers: what it returns to a peer that requests an entry; "later entries": only later entries.
    """

    def __init__(self, swarm: Simulation, name: str, member: Machine, above: int, answers: str) -> None:
        super().__init__(swarm, name)
        self.answer = self._lies
        self.given: set[Digest] = set()
        self._member, self._above, self._answers = member, above, answers
        self._sequence = count(1)

    async def say_all(self) -> None:
        """Dial the member if there is no link, and send the claimed heads once."""
        if not self.is_linked():
            with suppress(PeerError):
                await self.dial(self._member)
        clock, now = self.swarm.rules.clock, self.swarm.loop.true_seconds()
        heads = tuple(
            FragmentHead(
                round=clock.closed_round(fragment, now),
                digest=Digest(sha256(self.peer, bytes([fragment]))[:SHORT_DIGEST_BYTES]),
            )
            for fragment in range(clock.num_fragments)
        )
        self.say(self._member.peer, self.heartbeat(next(self._sequence), heads=heads))
        if self._answers == "later entries":
            for entry in self._later_entries():
                self.say(self._member.peer, entry)

    def is_linked(self) -> bool:
        """Return whether it has a link to the member."""
        return self._member.peer in self.transport.linked_peers()

    def _later_entries(self) -> list[Entry]:
        """Return up to two true entries of each span that the member does not hold and cannot follow yet."""
        heads = self._member.running.chains.heads
        entries = list(self.swarm.inspector.entries.values())[-2 * len(self.swarm.spans) :]
        return [entry for entry in entries if entry.height > heads[entry.span].height + 1]

    def _head(self, span: SpanId) -> SpanHead:
        mine = self._member.running.chains.heads[span]
        height = mine.height + self._above
        digest = sha256(self.peer, bytes([span.fragment, span.index, height]))
        return replace(mine, digest=digest, height=height, round=self.swarm.round)

    def _heads(self, fragment: int) -> tuple[SpanHead, ...]:
        return tuple(self._head(span) for span in self.swarm.spans if span.fragment == fragment)

    def _lies(self, peer: PeerId, message: Message) -> Iterable[Message]:
        match message:
            case HeadsRequest():
                yield HeadsReply(fragment=message.fragment, heads=self._heads(message.fragment))
            case ContentRequest():
                digests = tuple((head.digest, sha256(head.digest)) for head in self._heads(message.fragment))
                yield ContentReply(fragment=message.fragment, digests=digests)
            case SpanRequest():
                total = 8 * self.swarm.rules.span_elements[message.span]
                head = self._head(message.span)
                yield SpanReply(span=message.span, head=head, total_bytes=total, offset=0, piece=bytes(total))
            case EntryRequest() if self._answers == "refusals":
                yield EntryAbsent(span=message.span, parent=message.parent)
            case EntryRequest() if self._answers == "lies":
                *_, like = [entry for entry in self.swarm.inspector.entries.values() if entry.span == message.span]
                height = self._member.running.chains.heads[message.span].height + 1
                lie = replace(like, parent=message.parent, height=height, round=self.swarm.round - 2)
                lie = replace(lie, signature=sign_as(self.peer, lie.statement()))
                self.given.add(lie.digest())
                yield lie


async def two_strangers(swarm: Simulation, answers: tuple[str, str], num_members: int = 1) -> list[ReadyStranger]:
    """Let a bootstrap peer found the run and go, so that only volunteers are members; return the attackers."""
    swarm.add("boot", trains=False, founds=True)
    members = [swarm.add(f"p{number}") for number in range(num_members)]
    await swarm.until(swarm.all_members, within=120.0)
    await swarm.outlive("boot")
    await swarm.until(swarm.all_settled, within=240.0)
    return [
        ReadyStranger(swarm, f"stranger{number}", members[number % num_members], ABOVE[number], gives)
        for number, gives in enumerate(answers)
    ]


async def lose_entries(swarm: Simulation) -> None:
    """Restart all members from older disks."""
    names = [machine.name for machine in swarm.running()]
    backups = {name: swarm.snapshot(name) for name in names}
    await swarm.grows("p0", entries=LOST * len(swarm.spans))
    for name in names:
        swarm.kill(name)
    await swarm.run(1.0)
    for name in names:
        swarm.restore(name, backups[name])
        swarm.inspector.restored.add(swarm.machines[name].peer)
        swarm.start(name)


async def share_under_attack(swarm: Simulation, strangers: Sequence[ReadyStranger], begins_after: int = 1) -> float:
    """Return the share of spans that got entries, from some rounds after the attack began until it ended."""
    first = swarm.round + begins_after
    end = first + ATTACK_ROUNDS
    async with strangers[0], strangers[1]:
        while swarm.round < end:
            for stranger in strangers:
                await stranger.say_all()
            await swarm.run(BEAT_SECONDS)
        assert all(stranger.is_linked() for stranger in strangers)
    return share_of_spans(swarm, first, end - 1)


async def check_afterwards(swarm: Simulation, strangers: Sequence[ReadyStranger]) -> None:
    """Check that honest peers continue, the bootstrap agrees, and no stranger's entry was absorbed."""
    first = swarm.round + 1
    await swarm.run_to_round(first + 6)
    assert share_of_spans(swarm, first, first + 5) >= 0.9
    swarm.start("boot")
    await swarm.until(lambda: swarm.agreed(swarm.machines), within=8 * RULES.cycle_seconds)
    assert not {lie for stranger in strangers for lie in stranger.given} & swarm.inspector.entries.keys()


def named(value: object) -> str:
    return " and ".join(dict.fromkeys(value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("answers", [NOTHING, WRONG], ids=named)
async def test_strangers_that_claim_to_be_ready_stop_no_span_of_a_lone_member(answers: tuple[str, str]) -> None:
    async with Simulation(seed=1, rules=RULES, as_bytes=False) as swarm:
        strangers = await two_strangers(swarm, answers)
        assert await share_under_attack(swarm, strangers) >= 0.9
        assert swarm.machines["p0"].running.ready
        await check_afterwards(swarm, strangers)


@pytest.mark.parametrize(("num_members", "answers"), [(1, NOTHING), (1, WRONG), (1, LATER), (2, LATER)], ids=named)
async def test_members_that_lost_their_last_entries_continue_despite_strangers_that_withhold_them(
    num_members: int, answers: tuple[str, str]
) -> None:
    """A lone member asks them, for at most as long as a stall takes."""
    async with Simulation(seed=1, rules=RULES, as_bytes=False) as swarm:
        strangers = await two_strangers(swarm, answers, num_members)
        await lose_entries(swarm)
        begins_after = PATIENT_ROUNDS if num_members == 1 else 2 * RULES.clock.num_fragments
        assert await share_under_attack(swarm, strangers, begins_after) >= 0.9
        assert num_members > 1 or all(stranger.of(HeadsRequest) for stranger in strangers)
        await check_afterwards(swarm, strangers)
