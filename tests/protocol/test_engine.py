"""One peer with all its rules, step by step; whole swarms are in test_whole_swarms.py."""

from __future__ import annotations

import pytest
from fake_run import RUN, peer_id, run_rules, verify
from founded_swarms import founded, goes_on
from made import (
    certify,
    child_of,
    entry_on,
    founding,
    fragment_head,
    goodbye,
    head_of,
    heartbeat,
    ids,
    member,
    roster_1,
    self_of,
)
from swarm_driver import Swarm

from p2p_diloco.ids import ZERO_DIGEST, sha256
from p2p_diloco.protocol.actions import KeepGoodbye, ReduceSpan, Report, Send, Stage
from p2p_diloco.protocol.ballot import ballot_number
from p2p_diloco.protocol.engine import PeerEngine, Recalled
from p2p_diloco.protocol.entry import next_head
from p2p_diloco.protocol.messages import (
    EntryRequest,
    HeadsReply,
    Ping,
    Refusal,
    RosterReply,
    RosterRequest,
    SpanRequest,
)
from p2p_diloco.protocol.roster import CertifiedRoster
from p2p_diloco.protocol.roster_delta import certified_delta
from p2p_diloco.protocol.round import EncodedSpan, FragmentContribution


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
    with_roster(engine, roster_1(2, included_total=5))
    beat = heartbeat(peer_id("bob"), roster=sha256(b"unknown"), roster_k=3, sequence=2)
    assert engine.receive(peer_id("bob"), beat, 0.0) == []


def test_rosters_are_given_to_those_who_lack_them() -> None:
    engine = with_roster(engine_of(), roster_1(2))
    (reply,) = engine.receive(peer_id("bob"), RosterRequest(known=()), 0.0)
    assert isinstance(reply, Send)
    assert reply.message == RosterReply(rosters=(founding(), roster_1(2)))
    known = (roster_1(2).roster.digest(),)
    assert engine.receive(peer_id("bob"), RosterRequest(known=known), 0.0) == []


def test_a_difference_to_a_known_roster_is_taken_and_to_an_unknown_one_asked_about() -> None:
    ann, bob = ids(2)
    parent = roster_1(2)
    child = certify(child_of(parent.roster, [member(ann)], cycle=1), [ann, bob], ballot=ballot_number(3, 0))
    word = certified_delta(child, parent.roster)
    assert word is not None
    engine = engine_of("cat")
    (ask,) = engine.receive(bob, word, 0.0)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, RosterRequest)
    with_roster(engine, parent)
    engine.receive(bob, word, 0.0)
    assert engine.book.in_force == child.roster


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


@pytest.mark.parametrize(("sender", "is_sign_of_life"), [("ann", False), ("bob", True)])
def test_only_an_entry_that_another_sends_shows_that_somebody_is_here(sender: str, is_sign_of_life: bool) -> None:
    certified = roster_1(1)
    engine = with_roster(engine_of(), certified)
    span = next(iter(engine.rules.span_elements))
    start = head_of()
    engine.hold_state(dict.fromkeys(engine.rules.span_elements, start))
    engine.tick(0.0)
    parent = next_head(start, entry_on(start, certified.roster, engine.me.peer, span=span))
    engine.entry_checked(peer_id(sender), entry_on(parent, certified.roster, engine.me.peer, span=span), 1.0, 1.0)
    assert engine._repair._alone_since == (1.0 if is_sign_of_life else 0.0)


def test_a_peer_with_hardly_a_link_needs_one_to_anybody() -> None:
    engine = with_roster(engine_of(), roster_1(3))
    assert engine.is_cut_off()
    for name in ("bob", "cat"):
        engine.link_up(peer_id(name))
    assert not engine.is_cut_off()


def test_an_entry_of_a_branch_given_up_is_no_answer_and_the_span_is_fetched() -> None:
    """Its roster lies on no chain that anybody would tell us of; we asked for it again and again."""
    certified, given_up = roster_1(1), roster_1(1, included_total=7).roster
    (ann,) = ids(1)
    engine = with_roster(engine_of("cat"), certified)
    span, start = next(iter(engine.rules.span_elements)), head_of()
    engine.hold_state(dict.fromkeys(engine.rules.span_elements, start))
    engine.link_up(ann)
    beat = heartbeat(ann, roster=certified.roster.digest(), heads=(fragment_head(-2),))
    engine.receive(ann, beat, 0.0)
    following = entry_on(start, given_up, ann, span=span)
    heads = [start] * engine.rules.num_spans[span.fragment]
    heads[span.index] = next_head(start, following)
    asked = engine.receive(ann, HeadsReply(fragment=span.fragment, heads=tuple(heads)), 0.1)
    assert EntryRequest(span=span, parent=start.digest) in [a.message for a in asked if isinstance(a, Send)]
    instead = engine.entry_checked(ann, following, 1.0, 0.2)
    assert [a.message for a in instead if isinstance(a, Send)] == [
        SpanRequest(span=span, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16)
    ]


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
    (order,) = engine.contribution_ready(contribution, now)
    assert isinstance(order, ReduceSpan)
    actions = engine.span_reduced(order, frozenset({machine.peer}), b"mean", 1e30, now)
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
    order = ReduceSpan(round=4, span=span, stage=Stage.WHOLE, parts=(), norm_limit=1.0, rounding_seed=b"")
    (report,) = engine.span_reduced(order, frozenset(), b"", 1.0, 40.0)
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
    assert not engine.membership.is_hub()
    assert len(engine.closed_heads(0.0)) == 2
    assert not engine.holds_needlessly(0.0)
    engine.drop_state()
    assert engine.closed_heads(0.0) == ()
    assert engine.donors(0.0) == []


def test_incarnation_and_run_are_the_engines_own() -> None:
    engine = engine_of(incarnation=3)
    assert engine.me.member() == member(peer_id("ann"), incarnation=3)
    assert engine.rules.run == RUN
