"""Messages about a peer's reachability, and reasons why a peer is in no entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from small_run import peer_key, small_plan

from p2p_diloco.ids import PeerId, short_peer_id
from p2p_diloco.protocol.membership.local import Conditions, Progress
from p2p_diloco.protocol.membership.reach import Answer, Standing
from p2p_diloco.status.reporter import reach_sentence
from p2p_diloco.status.trouble import (
    IDLE_CYCLES,
    Idleness,
    explain_idleness,
    explain_solitude,
    idle_cycles,
    was_cut_off,
)

RULES = small_plan().rules
CYCLE = RULES.clock.num_fragments
ROUND_SECONDS = RULES.clock.round_seconds
LATE = 4 * CYCLE + 1
ADA, BEN, CLEO = (peer_key(name).peer for name in ("ada", "ben", "cleo"))


def answer(host: str, reason: str = "") -> Answer:
    return Answer(host=host, port=31338, reason=reason, at=0.0)


NO = answer("45.10.0.2", "45.10.0.2:31338 timed out")


@pytest.mark.parametrize(
    ("standing", "sentence"),
    [
        (
            Standing(is_reachable=True, proofs=(answer("45.10.0.2"),), num_proved=2),
            "reachable at 45.10.0.2:31338 (proved by 2 peers)",
        ),
        (
            Standing(is_reachable=True, proofs=(answer("192.168.1.7"),), num_proved=1),
            "reachable at 192.168.1.7:31338, within its own network (proved by 1 peer)",
        ),
        (
            Standing(is_reachable=True, proofs=(answer("127.0.0.1"),), failures=(NO,), num_proved=3),
            "reachable at 127.0.0.1:31338, within this machine (proved by 3 peers)",
        ),
        (Standing(is_reachable=False), "outbound only until another member has dialled this peer"),
        (
            Standing(is_reachable=False, failures=(NO,)),
            "outbound only: no member could dial it (45.10.0.2:31338 timed out); forward TCP port 31338 on the router "
            "to this machine, or do nothing: training works through other peers",
        ),
        (
            Standing(is_reachable=False, proofs=(answer("192.168.1.7"),), failures=(NO,)),
            "outbound only: reached only at 192.168.1.7:31338, within its own network, but some members are on "
            "other networks "
            "(45.10.0.2:31338 timed out); forward TCP port 31338 on the router to this machine, or do nothing: "
            "training works through other peers",
        ),
    ],
)
def test_the_sentence_describes_reachability_and_what_to_do(standing: Standing, sentence: str) -> None:
    assert reach_sentence(standing, (31338,), trains=True) == sentence


def test_a_peer_configured_to_dial_out_only_gets_no_advice_about_its_router() -> None:
    sentence = reach_sentence(Standing(is_reachable=False, failures=(NO,)), (), trains=True)
    assert sentence == "outbound only, as configured; training works through other peers"


def test_an_unreachable_bootstrap_peer_is_warned() -> None:
    near = Standing(is_reachable=False, proofs=(answer("192.168.1.7"),))
    assert reach_sentence(near, (31337,), trains=False).endswith("or other peers can join through it only from there")


def engine(
    *,
    linked: tuple[PeerId, ...] = (),
    members: tuple[PeerId, ...] = (ADA, BEN, CLEO),
    averaging: tuple[PeerId, ...] = (BEN, CLEO),
    last_included: int | None = None,
    ready: bool = True,
    trains: bool = True,
    asked_in: int = LATE - 1,
    made_in: int = LATE - 1,
    refusal: tuple[int, str] | None = None,
    waits: float = 0.0,
) -> Any:
    roster = SimpleNamespace(
        k=4,
        members=members,
        peers=lambda: frozenset(members),
        member=lambda peer: peer if peer in members else None,
    )
    grid = SimpleNamespace(reducers=lambda: frozenset(averaging))
    return SimpleNamespace(
        me=SimpleNamespace(peer=ADA, trains=trains),
        book=SimpleNamespace(in_force=roster if members else None, grid=lambda: grid if members else None),
        linked=set(linked),
        last_included=last_included,
        last_refusal=refusal,
        ready=ready,
        rules=RULES,
        exchange=SimpleNamespace(asked_in=asked_in, made_in=made_in),
        conditions=Conditions(progress=Progress(undone_why="step 9 left a.weight not finite")),
        membership=SimpleNamespace(
            local=SimpleNamespace(me=SimpleNamespace(peer=ADA, incarnation=1)),
            declarations=SimpleNamespace(returns=SimpleNamespace(wait_seconds=lambda *_: waits)),
        ),
    )


def at(round_index: int) -> float:
    return RULES.clock.begin(round_index) + 0.1


def test_idle_cycles_count_from_readiness_or_the_last_inclusion() -> None:
    late = IDLE_CYCLES * CYCLE + 1
    assert idle_cycles(engine(), 0, at(late)) == IDLE_CYCLES
    assert idle_cycles(engine(), 0, at(late - 1)) < IDLE_CYCLES
    assert idle_cycles(engine(last_included=late - 2), 0, at(late)) == 0
    assert idle_cycles(engine(), None, at(late)) == 0
    assert idle_cycles(engine(ready=False), 0, at(late)) == 0
    assert idle_cycles(engine(trains=False), 0, at(late)) == 0


@pytest.mark.parametrize(
    ("stands", "found", "text"),
    [
        ({"members": ()}, {}, "no roster received; is any member reachable?"),
        ({"members": (BEN,)}, {}, "this peer is not on roster 4 of 1 member"),
        (
            {"linked": (BEN,)},
            {},
            f"no link to 1 of 2 members that average ({short_peer_id(CLEO)}: 45.10.0.9:31338 timed out)",
        ),
        (
            {"averaging": tuple(PeerId(bytes([n]) * 32) for n in range(5))},
            {},
            f"no link to 5 of 5 members that average ("
            f"{'; '.join(f'{short_peer_id(PeerId(bytes([n]) * 32))}: not dialled yet' for n in range(3))} and 2 more)",
        ),
        (
            {"linked": (BEN, CLEO)},
            {"others_learn": True},
            "its contributions arrive too late, or the entries that they build on do: 0.0028 MB are due in the first "
            "half of a round, which takes an upload of more than 0.0056 Mbit/s; is its line slower, or does it lose "
            "packets?",
        ),
        (
            {"linked": (BEN,), "averaging": (BEN,)},
            {},
            "no span gets an entry; linked with 1 of 2 other members (45.10.0.9:31338 timed out)",
        ),
        (
            {"members": (ADA,), "averaging": ()},
            {},
            "no span gets an entry, and this peer is alone on the roster",
        ),
        ({"linked": (BEN, CLEO)}, {}, "no span gets an entry; linked with 2 of 2 other members"),
        (
            {"members": (BEN,), "waits": 39.7},
            {"others_learn": True},
            "this peer is not on roster 4 of 1 member: it was in no entry for too long, and is listed again in about "
            f"40 s; is its line or its machine too slow for rounds of {ROUND_SECONDS:g} s?",
        ),
        (
            {"linked": (BEN, CLEO), "made_in": -1},
            {"others_learn": True},
            "it makes inner steps, but none ended in the first half of a round (4 s); are steps too long for this "
            "run, or is its machine too busy?",
        ),
        (
            {"linked": (BEN, CLEO), "made_in": 1},
            {"steps": 0},
            "it has made no inner step meanwhile; does it wait for data, or is its machine too busy?",
        ),
        (
            {"linked": (BEN, CLEO), "made_in": -1},
            {"others_learn": True, "undone": 2},
            "2 steps failed, the last one because step 9 left a.weight not finite; look at the learning rate, the "
            "batch and the precision",
        ),
        (
            {"linked": (BEN, CLEO), "refusal": (LATE - 1, "late or far too early")},
            {"others_learn": True},
            "its contributions are left out: late or far too early",
        ),
        (
            {"linked": (BEN,)},
            {"silent": 26.0},
            "nothing has arrived from any other peer for 26 s; is its connection down, or are all others gone? "
            "45.10.0.9:31338 timed out",
        ),
        (
            {"linked": (BEN, CLEO), "made_in": -1},
            {"stood": 20.4, "silent": 26.0},
            "this process stood still for 20 s: its machine was asleep or far too busy, or stopped it",
        ),
    ],
)
def test_the_reason_for_being_in_no_entry_is_what_happened(
    stands: dict[str, Any], found: dict[str, Any], text: str
) -> None:
    failures = {CLEO: "45.10.0.9:31338 timed out"}
    idle = Idleness(**{"cycles": 3, "steps": 7, "failures": failures, "others_learn": False, **found})
    said = explain_idleness(engine(**stands), idle, at(LATE))
    assert said == f"in no entry for 3 cycles: {text}"


LISTED = {"alone": (ADA,), "both": (ADA, BEN), "with a bootstrap": (ADA, CLEO), "others": (BEN,)}
"""Members by name of a roster; Cleo is a bootstrap peer."""


@pytest.mark.parametrize(
    ("chain", "trains", "expected"),
    [
        ("alone", True, False),
        ("both, alone", True, False),
        ("both, degraded alone", True, True),
        ("both, degraded alone, alone", True, True),
        ("both, degraded with a bootstrap", True, True),
        ("both, degraded alone, both", True, False),
        ("both, degraded alone, both, alone", True, False),
        ("both, degraded both", True, False),
        ("both, degraded others", False, False),
    ],
)
def test_a_trainer_was_cut_off_if_it_is_alone_since_a_roster_without_a_majority(
    chain: str, trains: bool, expected: bool
) -> None:
    def roster(named: str) -> Any:
        peers = LISTED[named.removeprefix("degraded ")]
        members = tuple(SimpleNamespace(peer=peer, trains=peer != CLEO) for peer in peers)
        return SimpleNamespace(members=members, degraded=named.startswith("degraded "))

    rosters = [SimpleNamespace(roster=roster(named)) for named in chain.split(", ")]
    book = SimpleNamespace(in_force=rosters[-1].roster, chain=lambda: rosters)
    peer: Any = SimpleNamespace(me=SimpleNamespace(peer=ADA, trains=trains), book=book)
    assert was_cut_off(peer) is expected


@pytest.mark.parametrize(
    ("silent", "why"),
    [
        (99.0, "nothing has arrived from any other peer for 99 s; is its connection down, or are all others gone?"),
        (1.0, "it and the others left each other out while there was no link"),
    ],
)
def test_a_peer_that_was_cut_off_says_why_it_trains_alone(silent: float, why: str) -> None:
    said = explain_solitude(engine(), silent)
    assert said == f"trains alone, until it reaches others and they agree on a roster: {why}"
