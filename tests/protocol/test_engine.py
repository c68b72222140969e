"""Whole swarms in virtual time: founded, joined, left, killed, slept through, split and healed."""

from __future__ import annotations

import random

import pytest
from made import entry_on, founding, fragment_head, goodbye, head_of, heartbeat, ids, member, roster_1, self_of
from swarm_driver import MINUTE, ROUND_SECONDS, RUN, Swarm, peer_id, run_rules, verify

from p2p_diloco.ids import sha256
from p2p_diloco.protocol.actions import KeepGoodbye, Report, Send
from p2p_diloco.protocol.engine import PeerEngine, Recalled
from p2p_diloco.protocol.entry import next_head
from p2p_diloco.protocol.messages import EntryRequest, Ping, Refusal, RosterReply, RosterRequest
from p2p_diloco.protocol.roster import CertifiedRoster
from p2p_diloco.protocol.round import EncodedSpan, FragmentContribution

CASES = [(1, "all"), (1, "none"), (2, "all"), (2, "one"), (2, "none"), (3, "all"), (3, "none"), (4, "one")]


def is_dialable(who: str, place: int) -> bool:
    return who == "all" or (who == "one" and place == 0)


def founded(num_peers: int, who: str = "all", *, bootstrap: bool = True, seed: int = 0) -> Swarm:
    """A swarm in which everybody is a member and holds the same bytes; peers join one by one."""
    swarm = Swarm(seed=seed)
    if bootstrap:
        swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}", dialable=is_dialable(who, place), found=not bootstrap and place == 0)
        swarm.run(3.0)
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 3 * MINUTE)
    return swarm


def goes_on(swarm: Swarm, name: str = "p0") -> None:
    height = swarm.height(name)
    swarm.run_until(lambda: swarm.height(name) >= height + 10, 2 * MINUTE)
    assert swarm.included_once()


def recovers(swarm: Swarm, within: float) -> float:
    seconds = swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), within)
    goes_on(swarm)
    return seconds


@pytest.mark.parametrize(("num_peers", "who"), [*CASES, (8, "all")])
def test_a_run_is_founded_by_a_bootstrap_and_joined_one_by_one(num_peers: int, who: str) -> None:
    goes_on(founded(num_peers, who))


@pytest.mark.parametrize(("num_peers", "who"), [(1, "none"), (2, "one"), (3, "all")])
def test_a_run_is_founded_by_a_peer_that_trains(num_peers: int, who: str) -> None:
    goes_on(founded(num_peers, who, bootstrap=False))


@pytest.mark.parametrize(("num_peers", "who"), [(2, "all"), (3, "one"), (3, "none")])
def test_after_a_good_bye_the_others_go_on_at_once(num_peers: int, who: str) -> None:
    swarm = founded(num_peers, who)
    swarm.leave("p1")
    swarm.run(5.0)
    swarm.kill("p1")
    swarm.run_until(swarm.all_members, MINUTE)
    goes_on(swarm)
    assert swarm.machines["p0"].roster.epoch == 0
    swarm.start("p1")
    recovers(swarm, 3 * MINUTE)


@pytest.mark.parametrize(("num_peers", "who"), [(3, "all"), (3, "none"), (4, "one")])
def test_a_dead_member_is_taken_off_and_comes_back(num_peers: int, who: str) -> None:
    swarm = founded(num_peers, who)
    swarm.kill("p1")
    swarm.run_until(swarm.all_members, MINUTE)
    assert swarm.machines["p0"].roster.epoch == 0
    goes_on(swarm)
    swarm.start("p1")
    recovers(swarm, 3 * MINUTE)


def test_of_two_the_survivor_goes_on_alone_after_eight_void_cycles() -> None:
    swarm = founded(2, "one")
    swarm.kill("p0")
    swarm.run_until(lambda: swarm.members("p1") == {"p1"}, 9 * MINUTE)
    assert swarm.machines["p1"].roster.is_degraded()
    goes_on(swarm, "p1")
    swarm.start("p0")
    recovers(swarm, 5 * MINUTE)


@pytest.mark.parametrize(("num_peers", "who"), [(1, "all"), (2, "one"), (2, "none"), (3, "all"), (3, "none")])
def test_a_swarm_that_slept_through_a_weekend_goes_on_in_the_same_epoch(num_peers: int, who: str) -> None:
    swarm = founded(num_peers, who)
    for name in swarm.machines:
        swarm.pause(name)
    swarm.break_links()
    swarm.run(60 * 60 * MINUTE)
    for name in swarm.random.sample(list(swarm.machines), len(swarm.machines)):
        swarm.resume(name)
        swarm.run(swarm.random.uniform(0.0, 20.0))
    recovers(swarm, 3 * MINUTE)
    assert swarm.machines["p0"].roster.epoch == 0


@pytest.mark.parametrize(
    ("num_peers", "who", "polite"),
    [(1, "none", True), (2, "all", False), (2, "none", True), (3, "all", True), (3, "one", False)],
)
def test_a_swarm_that_was_switched_off_comes_back(num_peers: int, who: str, polite: bool) -> None:
    swarm = founded(num_peers, who)
    swarm.run(30.0)
    for machine in swarm.running():
        if polite:
            swarm.leave(machine.name)
            swarm.run(1.0)
    for name in swarm.machines:
        swarm.kill(name)
    swarm.run(60 * 60 * MINUTE)
    for name in swarm.random.sample(list(swarm.machines), len(swarm.machines)):
        swarm.start(name)
        swarm.run(swarm.random.uniform(0.0, 20.0))
    recovers(swarm, 12 * MINUTE if polite else 5 * MINUTE)


@pytest.mark.parametrize(("num_peers", "who"), [(1, "none"), (2, "one"), (3, "all")])
def test_after_roster_1_the_bootstrap_is_not_needed(num_peers: int, who: str) -> None:
    swarm = Swarm(seed=3)
    swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}", dialable=is_dialable(who, place))
    swarm.run_until(lambda: swarm.machines["boot"].roster.k == 1, MINUTE, step=0.05)
    swarm.kill("boot")
    recovers(swarm, 12 * MINUTE)


@pytest.mark.parametrize("who", ["all", "none"])
def test_when_half_are_gone_at_once_the_rest_opens_a_degraded_epoch(who: str) -> None:
    swarm = founded(4, who)
    for name in ("p2", "p3"):
        swarm.kill(name)
    seconds = swarm.run_until(swarm.all_members, 6 * MINUTE)
    assert seconds > 7 * len(swarm.rules.num_spans) * ROUND_SECONDS
    assert swarm.machines["p0"].roster.epoch == 1
    goes_on(swarm)


def test_a_short_split_never_forks_and_the_majority_goes_on() -> None:
    swarm = founded(3)
    swarm.partition(["p0", "boot"], ["p1", "p2"])
    goes_on(swarm, "p1")
    assert swarm.members("p1") == {"p1", "p2"}
    height = swarm.height("p0")
    swarm.heal()
    recovers(swarm, 2 * MINUTE)
    assert swarm.height("p0") > height
    assert swarm.machines["p0"].roster.epoch == 0


def test_after_a_long_split_all_go_by_one_branch() -> None:
    swarm = founded(4)
    swarm.partition(["p0", "p1", "boot"], ["p2", "p3"])
    swarm.run(8 * MINUTE)
    assert swarm.members("p0") == {"p0", "p1"}
    assert swarm.members("p2") == {"p2", "p3"}
    assert not swarm.agreed()
    swarm.heal()
    recovers(swarm, 5 * MINUTE)
    assert any("branch" in machine.topics() for machine in swarm.running())


def test_a_lone_member_whose_branch_is_junior_adopts_the_other() -> None:
    swarm = founded(3)
    swarm.partition(["p0", "boot"], ["p1", "p2"])
    swarm.run(12 * MINUTE)
    swarm.heal()
    recovers(swarm, 5 * MINUTE)


def test_a_peer_that_lost_its_disk_joins_as_a_newcomer_and_does_not_vote_before() -> None:
    swarm = founded(3)
    swarm.kill("p1")
    machine = swarm.start("p1", keep_disk=False)
    assert not machine.rules_engine.ready
    recovers(swarm, 3 * MINUTE)


def test_memory_that_failed_is_found_and_fetched_again() -> None:
    swarm = founded(3)
    machine = swarm.machines["p2"]
    span = next(iter(machine.vectors))
    head, state = machine.vectors[span]
    machine.contributes = False
    swarm.known_bytes.clear()
    machine.vectors[span] = (head, bytes(len(state)))
    swarm.check_bytes = False
    swarm.run_until(swarm.agreed, 9 * len(swarm.rules.num_spans) * ROUND_SECONDS)
    assert "content" in machine.topics()


def test_all_are_told_what_came_of_each_round() -> None:
    swarm = founded(2)
    swarm.run(2 * MINUTE)
    closed = swarm.machines["p0"].closed[-4]
    assert closed.num_entries == closed.num_spans
    assert (closed.num_ready, closed.num_members) == (2, 2)
    assert closed.num_included == 2 * closed.num_spans


def test_nothing_is_contributed_after_the_last_round() -> None:
    swarm = founded(1)
    engine = swarm.machines["p0"].rules_engine
    engine.last_round = engine.round
    swarm.run(2 * ROUND_SECONDS)
    height = swarm.height("p0")
    swarm.run(MINUTE)
    assert swarm.height("p0") == height


def misfortune(swarm: Swarm, names: list[str], chance: random.Random) -> None:
    name = chance.choice(names)
    machine = swarm.machines[name]
    what = chance.choice(["kill", "kill", "pause", "split", "long split", "heal", "leave"])
    if what == "heal":
        swarm.heal()
    elif "split" in what:
        side = [other for other in names if chance.random() < 0.5]
        swarm.partition(side, [other for other in names if other not in side])
        swarm.run(chance.uniform(100.0, 400.0) if what == "long split" else 0.0)
    elif machine.engine is None or machine.paused:
        return
    elif what == "kill":
        swarm.kill(name)
    elif what == "pause":
        swarm.pause(name)
    else:
        swarm.leave(name)
        swarm.run(chance.uniform(0.0, 10.0))
        swarm.kill(name)


def wake(swarm: Swarm, name: str) -> None:
    if swarm.machines[name].engine is None:
        swarm.start(name)
    elif swarm.machines[name].paused:
        swarm.resume(name)


@pytest.mark.parametrize("seed", [1, 22, 39, 114])
def test_whatever_happened_all_agree_and_go_on_once_faults_stop(seed: int) -> None:
    chance = random.Random(seed)
    num_peers = chance.choice([2, 3, 4])
    swarm = Swarm(seed=seed, loss=0.02, duplication=0.02)
    swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}", dialable=chance.random() < 0.5, offset=chance.uniform(-0.3, 0.3))
    swarm.run(MINUTE)
    names = list(swarm.machines)
    for _ in range(12):
        misfortune(swarm, names, chance)
        swarm.run(chance.uniform(0.0, 30.0))
        for name in names:
            if chance.random() < 0.5:
                wake(swarm, name)
    swarm.heal()
    swarm.loss = swarm.duplication = 0.0
    for name in names:
        wake(swarm, name)
    recovers(swarm, 12 * MINUTE)


# -- single steps


def engine_of(name: str = "ann", recalled: Recalled | None = None, incarnation: int = 1) -> PeerEngine:
    me = self_of(peer_id(name), incarnation=incarnation)
    return PeerEngine(me=me, rules=run_rules(), verify=verify, recalled=recalled)


def with_roster(engine: PeerEngine, certified: CertifiedRoster) -> PeerEngine:
    engine.receive(peer_id("boot"), RosterReply(rosters=(founding(), certified)), 0.0)
    return engine


def test_an_alone_peer_just_goes() -> None:
    engine = with_roster(engine_of(), roster_1(1))
    engine.link_up(peer_id("boot"))
    assert engine.leave(1.0) == []
    assert engine.membership.leaving


def test_a_good_bye_is_on_disk_before_it_is_said() -> None:
    engine = with_roster(engine_of(), roster_1(3))
    engine.link_up(peer_id("bob"))
    first, *rest = engine.leave(1.0)
    assert isinstance(first, KeepGoodbye)
    assert [action.message for action in rest if isinstance(action, Send)] == [first.goodbye]


def test_a_restarted_peer_says_its_old_good_bye_again_while_it_is_still_listed() -> None:
    certified = roster_1(3)
    old = goodbye(peer_id("ann"), parent=certified.roster)
    recalled = Recalled(rosters=(founding(), certified), goodbye=old)
    engine = engine_of(recalled=recalled, incarnation=2)
    engine.link_up(peer_id("bob"))
    said = [action.message for action in engine.tick(1.0) if isinstance(action, Send)]
    assert old in said


def test_what_is_not_for_the_rules_is_dropped() -> None:
    assert engine_of().receive(peer_id("bob"), Ping(nonce=1), 0.0) == []


def test_a_heartbeat_from_another_mouth_is_not_heard() -> None:
    engine = engine_of()
    engine.receive(peer_id("cat"), heartbeat(peer_id("bob")), 0.0)
    assert not engine.membership.heard


def test_an_unknown_roster_is_asked_for_unless_it_is_junior() -> None:
    engine = engine_of()
    beat = heartbeat(peer_id("bob"), roster=sha256(b"unknown"), roster_k=3)
    (ask,) = engine.receive(peer_id("bob"), beat, 0.0)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, RosterRequest)
    with_roster(engine, roster_1(2, included_total=7))
    beat = heartbeat(peer_id("bob"), roster=sha256(b"unknown"), roster_k=3, sequence=2)
    assert engine.receive(peer_id("bob"), beat, 0.0) == []


def test_rosters_are_given_to_those_who_lack_them() -> None:
    engine = with_roster(engine_of(), roster_1(2))
    (reply,) = engine.receive(peer_id("bob"), RosterRequest(known=()), 0.0)
    assert isinstance(reply, Send)
    assert reply.message == RosterReply(rosters=(founding(), roster_1(2)))
    known = (roster_1(2).roster.digest(),)
    assert engine.receive(peer_id("bob"), RosterRequest(known=known), 0.0) == []


@pytest.mark.parametrize("newer", [False, True])
def test_a_refusal_is_reported_and_a_newer_roster_asked_for(newer: bool) -> None:
    refusal = Refusal(round=3, newer_roster=newer, reason=b"late \xff")
    report, *asks = engine_of().receive(peer_id("bob"), refusal, 0.0)
    assert isinstance(report, Report)
    assert report.topic == "refused"
    assert len(asks) == newer


def test_a_good_bye_of_somebody_heard_is_reported_once() -> None:
    engine = with_roster(engine_of(), roster_1(3))
    bob = peer_id("bob")
    word = goodbye(bob, parent=roster_1(3).roster)
    engine.receive(bob, heartbeat(bob, steps=5), 0.0)
    (report,) = engine.receive(bob, word, 0.0)
    assert isinstance(report, Report)
    assert report.topic == "good-bye"
    assert engine.receive(bob, word, 0.0) == []


def test_an_entry_of_an_unknown_roster_waits_for_the_roster() -> None:
    certified = roster_1(1)
    ann = ids(1)[0]
    swarm = founded(1)
    head, _ = swarm.machines["p0"].vectors[next(iter(swarm.machines["p0"].vectors))]
    engine = engine_of()
    span = next(iter(engine.rules.span_elements))
    engine.hold_state({span: head})
    entry = entry_on(head, certified.roster, ann, span=span)
    (ask,) = engine.entry_checked(ann, entry, 1.0, 0.0)
    assert isinstance(ask, Send)
    engine.receive(ann, RosterReply(rosters=(founding(), certified)), 0.0)
    assert engine.chains.heads[span].height == head.height + 1


def test_entries_of_unknown_rosters_do_not_pile_up() -> None:
    engine = engine_of()
    swarm = founded(1)
    span = next(iter(engine.rules.span_elements))
    head, _ = swarm.machines["p0"].vectors[span]
    engine.hold_state({span: head})
    for place in range(50):
        roster = roster_1(1, included_total=place).roster
        engine.entry_checked(ids(1)[0], entry_on(head, roster, ids(1)[0], span=span), 1.0, 0.0)
    assert len(engine._lacking_roster) <= 6
    for _ in range(50):
        engine.entry_checked(ids(1)[0], entry_on(head, roster, ids(1)[0], span=span), 1.0, 0.0)
    assert sum(map(len, engine._lacking_roster.values())) <= 3


def test_an_entry_whose_parent_is_missing_has_the_parent_fetched() -> None:
    certified = roster_1(1)
    (ann,) = ids(1)
    engine = with_roster(engine_of("cat"), certified)
    span = next(iter(engine.rules.span_elements))
    start = head_of()
    engine.hold_state({span: start})
    engine.link_up(ann)
    beat = heartbeat(ann, roster=certified.roster.digest(), heads=(fragment_head(-2),))
    engine.receive(ann, beat, 0.0)
    parent = next_head(start, entry_on(start, certified.roster, ann, span=span))
    asked = engine.entry_checked(ann, entry_on(parent, certified.roster, ann, span=span), 1.0, 0.0)
    assert EntryRequest(span=span, parent=start.digest) in [a.message for a in asked if isinstance(a, Send)]


def test_a_mean_that_does_not_hold_before_its_owner_is_told_to_nobody() -> None:
    swarm = founded(1)
    goes_on(swarm)
    machine = swarm.machines["p0"]
    engine = machine.rules_engine
    swarm.run_to(swarm.rules.clock.begin(swarm.rules.clock.round_at(swarm.now) + 2) + 0.01)
    now = swarm.now
    round_index = engine.round
    assert round_index is not None
    fragment = swarm.rules.clock.fragment(round_index)
    span = next(s for s in machine.vectors if s.fragment == fragment)
    encoded = EncodedSpan(span=span, parent=machine.vectors[span][0].digest, norm=1.0, payload=bytes(6))
    contribution = FragmentContribution(round=round_index, fragment=fragment, tokens=1, steps=1, spans=(encoded,))
    engine.contribution_ready(contribution, now)
    actions = engine.span_reduced(round_index, span, frozenset({machine.peer}), b"mean", 1e30, now)
    assert [action.topic for action in actions if isinstance(action, Report)] == ["entry-refused"]
    assert not [action for action in actions if isinstance(action, Send)]


def test_a_bad_entry_is_refused_with_a_reason() -> None:
    engine = with_roster(engine_of(), roster_1(1))
    span = next(iter(engine.rules.span_elements))
    head, _ = founded(1).machines["p0"].vectors[span]
    engine.hold_state({span: head})
    (report,) = engine.entry_checked(
        ids(1)[0], entry_on(head, roster_1(1).roster, peer_id("stranger"), span=span), 1.0, 0.0
    )
    assert isinstance(report, Report)
    assert report.topic == "entry-refused"


def test_a_mean_that_comes_too_late_is_void() -> None:
    engine = with_roster(engine_of(), roster_1(1))
    span = next(iter(engine.rules.span_elements))
    (report,) = engine.span_reduced(4, span, frozenset(), b"", 1.0, 40.0)
    assert isinstance(report, Report)
    assert "the round was over before its mean was ready" in report.text


def test_a_new_link_is_greeted_at_once() -> None:
    engine = engine_of()
    engine.tick(0.0)
    assert engine.wake_at(0.1) > 0.1
    engine.link_up(peer_id("bob"))
    assert engine.wake_at(0.1) == 0.1
    sends = [action for action in engine.tick(0.1) if isinstance(action, Send)]
    assert [send.to for send in sends] == [peer_id("bob")]
    engine.link_lost(peer_id("bob"))
    assert engine.linked == set()


def test_the_founder_holds_the_state_until_it_drops_it() -> None:
    swarm = Swarm()
    machine = swarm.add("boot", trains=False, found=True)
    engine = machine.rules_engine
    assert engine.serves_state
    assert not engine.is_hub
    assert len(engine.closed_heads(0.0)) == 2
    engine.drop_state()
    assert engine.closed_heads(0.0) == ()
    assert engine.donors(0.0) == []


def test_incarnation_and_run_are_the_engines_own() -> None:
    engine = engine_of(incarnation=3)
    assert engine.me.member() == member(peer_id("ann"), incarnation=3)
    assert engine.rules.run == RUN
