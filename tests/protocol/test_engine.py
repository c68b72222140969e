"""One peer with all its rules, step by step; whole swarms are in test_whole_swarms.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_run import ALL_SPANS, PAYLOAD_BYTES, ROUND_SECONDS, RUN, ballot_number, peer_id, run_rules, verify
from founded_swarms import founded, goes_on
from made import (
    SPAN,
    certify,
    change,
    child_of,
    declaration,
    entry_on,
    founding,
    fragment_head,
    head_of,
    heartbeat,
    ids,
    member,
    proof_of,
    roster_1,
    self_of,
    take_entry,
)
from swarm_driver import Swarm

from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, sha256, short_peer_id
from p2p_diloco.protocol.actions import (
    Action,
    CompareContent,
    HashSpan,
    KeepActivity,
    KeepBallots,
    KeepRoster,
    Part,
    RebuildSpan,
    ReduceSpan,
    ReplaceSpan,
    Report,
    RequestContribution,
    Send,
    Stage,
)
from p2p_diloco.protocol.engine import PeerEngine, SavedState
from p2p_diloco.protocol.membership.membership import LEAVE_SECONDS
from p2p_diloco.protocol.results import SpanDamaged, SpanRebuilt, SpanReduced
from p2p_diloco.protocol.round.influence import LEFT_OUT_CYCLES
from p2p_diloco.protocol.round.round import EncodedSpan, FragmentContribution, contribution_messages
from p2p_diloco.protocol.wire.ballot import Ballots, Bond
from p2p_diloco.protocol.wire.entry import Entry, next_head, places_in
from p2p_diloco.protocol.wire.member import NO_PLACE
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Ping,
    Refusal,
    RosterReply,
    RosterRequest,
    RowMean,
    SignedContentRequest,
    SpanReply,
    SpanRequest,
)
from p2p_diloco.protocol.wire.roster import CertifiedRoster
from p2p_diloco.span_log import SpanHead


def engine_of(name: str = "ann", recalled: SavedState | None = None, incarnation: int = 1) -> PeerEngine:
    me = self_of(peer_id(name), incarnation=incarnation)
    engine = PeerEngine(me=me, rules=run_rules(), verify=verify, recalled=recalled)
    change(engine, proofs=(proof_of(me.peer),))
    return engine


def with_roster(engine: PeerEngine, certified: CertifiedRoster) -> PeerEngine:
    engine.receive(peer_id("boot"), RosterReply(rosters=(founding(), certified)), 0.0)
    return engine


def test_members_and_the_founder_are_not_strangers_and_no_peer_is_before_a_roster_is_known() -> None:
    engine, everybody = engine_of(), [peer_id("boot"), *ids(3), peer_id("mallory")]
    assert not any(map(engine.is_stranger, everybody))
    with_roster(engine, roster_1(3))
    assert [peer for peer in everybody if engine.is_stranger(peer)] == [peer_id("mallory")]


def test_a_recent_member_is_a_stranger_but_not_unknown() -> None:
    """Each side of a split drops the other, and must dial it again."""
    first = roster_1(3)
    smaller = certify(child_of(first.roster, first.roster.members[:2]), ids(3), ballot=ballot_number(4, 0))
    engine, gone = with_roster(engine_of(), first), ids(3)[2]
    engine.book.add(smaller)
    assert engine.is_stranger(gone)
    assert not engine.is_unknown(gone)
    assert engine.is_unknown(peer_id("mallory"))


def test_a_lone_peer_leaves_at_once() -> None:
    engine = with_roster(engine_of(), roster_1(1))
    engine.link_up(peer_id("boot"))
    assert engine.leave(1.0) == []
    assert engine.membership.local.leaving


def test_a_leaving_peer_declares_it_to_all_links_and_stays_briefly_to_vote() -> None:
    engine = with_roster(engine_of(), roster_1(3))
    engine.link_up(peer_id("bob"))
    said = engine.leave(1.0)
    assert [(action.to, action.message) for action in said if isinstance(action, Send)] == [
        (peer_id("bob"), declaration(peer_id("ann"), leaving=True))
    ]
    assert len(said) == 1
    assert not engine.ready
    assert not engine.may_go(1.0 + LEAVE_SECONDS - 0.1)
    assert engine.may_go(1.0 + LEAVE_SECONDS)


def test_a_leaving_peer_goes_at_once_without_links_or_once_a_roster_without_it_governs() -> None:
    ann, bob = ids(2)
    engine = with_roster(engine_of(), roster_1(2))
    engine.link_up(bob)
    engine.leave(1.0)
    assert not engine.may_go(2.0)
    engine.link_lost(bob)
    assert engine.may_go(2.0)
    engine.link_up(bob)
    child = certify(child_of(roster_1(2).roster, [member(bob)]), [ann, bob], ballot=ballot_number(0, 1))
    engine.receive(bob, RosterReply(rosters=(child,)), 2.0)
    assert not engine.may_go(2.0), "this round is still under the roster that lists it"
    assert engine.may_go(ROUND_SECONDS)


def test_a_heartbeat_carries_a_declaration_that_the_voters_lack() -> None:
    engine = with_roster(engine_of("cat"), roster_1(2))
    engine.membership.local.set_ready(True)
    engine.link_up(peer_id("bob"))
    application = declaration(peer_id("cat"))
    assert application in [action.message for action in engine.tick(1.0) if isinstance(action, Send)]
    listed = with_roster(engine_of("cat"), roster_1(3))
    listed.membership.local.set_ready(True)
    listed.link_up(peer_id("bob"))
    assert application not in [action.message for action in listed.tick(1.0) if isinstance(action, Send)]


def test_messages_not_meant_for_the_rules_are_dropped() -> None:
    assert engine_of().receive(peer_id("bob"), Ping(nonce=1), 0.0) == []


def test_a_heartbeat_from_another_peers_link_is_ignored() -> None:
    engine = engine_of()
    engine.receive(peer_id("cat"), heartbeat(peer_id("bob")), 0.0)
    assert not engine.membership.liveness.views


def test_an_unknown_roster_is_requested() -> None:
    engine = engine_of()
    beat = heartbeat(peer_id("bob"), roster=sha256(b"unknown"), roster_k=3)
    (ask,) = engine.receive(peer_id("bob"), beat, 0.0)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, RosterRequest)
    with_roster(engine, roster_1(2))
    for sequence, known in enumerate((ZERO_DIGEST, roster_1(2).roster.digest()), 2):
        beat = heartbeat(peer_id("bob"), roster=known, sequence=sequence)
        assert engine.receive(peer_id("bob"), beat, 0.0) == []


def test_rosters_are_sent_to_peers_that_lack_them() -> None:
    engine = with_roster(engine_of(), roster_1(2))
    (reply,) = engine.receive(peer_id("bob"), RosterRequest(known=()), 0.0)
    assert isinstance(reply, Send)
    assert reply.message == RosterReply(rosters=(founding(), roster_1(2)))
    known = (roster_1(2).roster.digest(),)
    assert engine.receive(peer_id("bob"), RosterRequest(known=known), 0.0) == []


def test_rosters_are_requested_until_another_peers_roster_is_known() -> None:
    bob, engine = peer_id("bob"), engine_of()
    engine.receive(bob, heartbeat(bob, roster=roster_1(2).roster.digest(), roster_k=1), 0.0)
    part = engine.receive(bob, RosterReply(rosters=(founding(),)), 0.1)
    asked = [action.message for action in part if isinstance(action, Send)]
    assert asked == [RosterRequest(known=(founding().roster.digest(),))]
    whole = engine.receive(bob, RosterReply(rosters=(roster_1(2),)), 0.2)
    assert not any(isinstance(action, Send) and isinstance(action.message, RosterRequest) for action in whole)


def test_a_peer_that_adopts_another_branch_reports_no_state_until_it_is_compared() -> None:
    """A line that was never degraded wins over one that was."""
    ann, bob = ids(2)
    parent = roster_1(2).roster
    now, ballot = 56.0, ballot_number(7, 0)
    ours = certify(child_of(parent, [member(ann)], cycle=3, degraded=True), [ann], ballot)
    theirs = certify(child_of(parent, [member(ann), member(bob)], cycle=3), [ann, bob], ballot)
    rosters = (founding(), roster_1(2), ours)
    engine = engine_of(recalled=SavedState(rosters=rosters, heads=dict.fromkeys(ALL_SPANS, head_of())))
    engine.membership.local.set_ready(True)
    assert engine.book.in_force == ours.roster
    assert len(engine.closed_heads(now)) == 2
    engine.receive(bob, RosterReply(rosters=(theirs,)), now)
    assert engine.book.in_force == theirs.roster
    assert not engine.ready
    assert engine.closed_heads(now) == ()


def test_an_entry_absorbed_this_round_is_given_up_with_its_branch() -> None:
    """When the round began, both lines had the same tip: the boundary does not show what was absorbed since."""
    ann, bob = ids(2)
    parent, start, now = roster_1(2).roster, head_of(), 65.0
    ours = certify(child_of(parent, [member(ann)], cycle=3, degraded=True), [ann], ballot_number(7, 0))
    theirs = certify(child_of(parent, [member(ann), member(bob)], cycle=3), [ann, bob], ballot_number(7, 0))
    rosters = (founding(), roster_1(2), ours)
    engine = engine_of(recalled=SavedState(rosters=rosters, heads=dict.fromkeys(ALL_SPANS, start)))
    engine.link_up(bob)
    engine.tick(now)
    at_the_border = engine.closed_heads(now)
    absorbed = entry_on(start, ours.roster, ann, round=8)
    take_entry(engine, ann, absorbed, now)
    assert engine.chains.heads[SPAN] == next_head(start, absorbed)
    engine.receive(bob, RosterReply(rosters=(theirs,)), now)
    assert engine.book.in_force == theirs.roster
    beat = heartbeat(bob, roster=theirs.roster.digest(), heads=at_the_border)
    asked = [action.message for action in engine.receive(bob, beat, now) if isinstance(action, Send)]
    assert HeadsRequest(fragment=SPAN.fragment) in asked
    heads = (start,) * engine.rules.num_spans[SPAN.fragment]
    fetched = engine.receive(bob, HeadsReply(fragment=SPAN.fragment, heads=heads), now)
    assert SpanRequest(span=SPAN, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16) in [
        action.message for action in fetched if isinstance(action, Send)
    ]


@pytest.mark.parametrize("newer", [False, True])
def test_a_refusal_is_reported_and_a_newer_roster_is_requested(newer: bool) -> None:
    refusal = Refusal(round=3, newer_roster=newer, reason=b"late \xff")
    report, *asks = engine_of().receive(peer_id("bob"), refusal, 0.0)
    assert isinstance(report, Report)
    assert report.topic == "refused"
    assert len(asks) == newer


def test_a_declared_leaving_is_reported_once_and_forwarded_to_the_other_voters() -> None:
    engine = with_roster(engine_of(), roster_1(3))
    _, bob, cat = ids(3)
    word = declaration(bob, leaving=True)
    actions = engine.receive(bob, word, 0.0)
    assert [action.topic for action in actions if isinstance(action, Report)] == ["good-bye"]
    assert [action.to for action in actions if isinstance(action, Send) and action.message == word] == [cat]
    assert engine.receive(bob, word, 0.0) == []
    assert engine.receive(cat, word, 0.0) == []


def following(engine: PeerEngine, *rosters: CertifiedRoster) -> tuple[SpanId, SpanHead]:
    """Let an engine hold an initial state and hear ann, a donor; return a span and its head."""
    span, start, ann = next(iter(engine.rules.span_elements)), head_of(), peer_id("ann")
    engine.hold_state(dict.fromkeys(engine.rules.span_elements, start))
    engine.link_up(ann)
    if rosters:
        engine.receive(ann, RosterReply(rosters=(founding(), *rosters)), 0.0)
    roster = rosters[-1].roster.digest() if rosters else ZERO_DIGEST
    engine.receive(ann, heartbeat(ann, roster=roster, heads=(fragment_head(-2),)), 0.0)
    return span, start


def asked_entries(actions: list[Action]) -> list[EntryRequest]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, EntryRequest)]


def asked_spans(actions: list[Action]) -> list[SpanRequest]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, SpanRequest)]


def test_an_entry_of_an_unknown_roster_is_requested_again_once_the_roster_is_known() -> None:
    """Any peer can send such entries, so their vectors are not kept."""
    ann, later = peer_id("ann"), certify(child_of(roster_1(1).roster, [member(peer_id("ann"))]), [peer_id("ann")])
    engine = engine_of("cat")
    span, start = following(engine, roster_1(1))
    entry = entry_on(start, later.roster, ann, span=span)
    (ask,) = take_entry(engine, ann, entry, 0.1)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, RosterRequest)
    again = engine.receive(ann, RosterReply(rosters=(later,)), 0.2)
    assert asked_entries(again) == [EntryRequest(span=span, parent=start.digest)]


def test_a_flood_of_entries_of_unknown_rosters_displaces_no_members_entry_and_keeps_no_vector() -> None:
    ann, later = peer_id("ann"), certify(child_of(roster_1(1).roster, [member(peer_id("ann"))]), [peer_id("ann")])
    engine = engine_of("cat")
    span, start = following(engine, roster_1(1))
    take_entry(engine, ann, entry_on(start, later.roster, ann, span=span), 0.1)
    for place in range(200):
        roster, round_index = roster_1(1, height=place + 1).roster, 2 ** (place % 62)
        take_entry(engine, peer_id("stranger"), entry_on(start, roster, ann, span=span, round=round_index), 0.1)
        take_entry(engine, ann, entry_on(start, roster, ann, span=span, round=2**60), 0.1)
    assert len(engine.noted) == 1
    take_entry(engine, ann, entry_on(start, later.roster, ann, span=span), 0.1)
    again = engine.receive(ann, RosterReply(rosters=(later,)), 0.2)
    assert asked_entries(again) == [EntryRequest(span=span, parent=start.digest)]


def test_strangers_are_not_asked_for_entries_that_they_claim_to_have() -> None:
    later = certify(child_of(roster_1(1).roster, [member(peer_id("ann"))]), [peer_id("ann")])
    engine = engine_of("cat")
    span, start = following(engine, roster_1(1))
    take_entry(engine, peer_id("eve"), entry_on(start, later.roster, peer_id("eve"), span=span), 0.1)
    assert asked_entries(engine.receive(peer_id("eve"), RosterReply(rosters=(later,)), 0.2)) == []
    roster = later.roster
    take_entry(engine, peer_id("ann"), entry_on(start, roster, peer_id("ann"), span=span), 0.3)
    assert not engine.noted, "overtaken"


def test_an_earlier_certificate_that_an_entry_needs_is_requested() -> None:
    ann = peer_id("ann")
    child = child_of(roster_1(1).roster, [member(ann)])
    late, early = (certify(child, [ann], ballot=ballot_number(round_index, 0)) for round_index in (4, 1))
    engine = engine_of("cat")
    span, start = following(engine, roster_1(1), late)
    engine.receive(ann, heartbeat(ann, roster=child.digest(), heads=(fragment_head(2),), sequence=2), 4 * 8.0)
    entry = entry_on(start, child, ann, span=span, round=4)
    (ask,) = take_entry(engine, ann, entry, 4 * 8.0)
    assert isinstance(ask, Send)
    assert ask.message == RosterRequest(known=(roster_1(1).roster.digest(),))
    learnt = engine.receive(ann, RosterReply(rosters=(early,)), 4 * 8.0)
    assert KeepRoster(certified=early) in learnt
    assert asked_entries(learnt) == [EntryRequest(span=span, parent=start.digest)]
    assert take_entry(engine, ann, entry, 4 * 8.0 + 1)
    assert engine.chains.heads[span].height == 1


def test_an_earlier_certificate_that_a_child_implies_is_requested() -> None:
    ann = peer_id("ann")
    parent = child_of(roster_1(1).roster, [member(ann)])
    late = certify(parent, [ann], ballot=ballot_number(9, 0))
    grandchild = certify(child_of(parent, [member(ann)]), [ann], ballot=ballot_number(7, 0))
    engine = engine_of("cat")
    following(engine, roster_1(1), late)
    *_, ask = engine.receive(ann, RosterReply(rosters=(grandchild,)), 0.0)
    assert isinstance(ask, Send)
    assert ask.message == RosterRequest(known=(roster_1(1).roster.digest(),))


def test_an_entry_of_a_far_round_waits_and_is_absorbed_when_its_round_is_near() -> None:
    ann = peer_id("ann")
    engine = engine_of("cat")
    span, start = following(engine, roster_1(1))
    ahead = entry_on(start, roster_1(1).roster, ann, span=span, round=4)
    assert take_entry(engine, ann, ahead, 0.1) == []
    assert engine.chains.heads[span] == start
    engine.tick(2 * 8.0)
    assert engine.chains.heads[span] == start
    engine.tick(3 * 8.0)
    assert engine.chains.heads[span].height == 1


def test_a_reducer_that_makes_entries_is_not_dropped_while_a_roster_lists_its_last_incarnation() -> None:
    """A restarted bootstrap made the entries but was present in none: it was dropped, and sent none to others."""
    boot, ann, bob, cat = (peer_id(name) for name in ("boot", "ann", "bob", "cat"))
    others = [member(peer, reduces=False) for peer in (ann, bob, cat)]
    parent = certify(child_of(founding().roster, [member(boot, trains=False, counts=False), *others]), [boot])
    engine = engine_of("cat")
    _, start = following(engine, parent)
    now = engine.rules.clock.begin(4)
    for span in engine.rules.span_elements:
        entry = entry_on(start, parent.roster, boot, span=span, places=(1, 2, 3), round=2 + span.fragment)
        take_entry(engine, boot, entry, now)
        assert engine.chains.heads[span].height == 1
    assert not places_in(engine.membership.presence.view(parent.roster, now).absent)


def test_a_requested_entry_that_is_refused_is_not_an_answer() -> None:
    """A peer whose log holds an invalid entry cannot give us the next one, so it is not asked again and again."""
    ann = peer_id("ann")
    later = certify(child_of(roster_1(1).roster, [member(ann)]), [ann], ballot=ballot_number(1, 0))
    engine = engine_of("cat")
    span, start = following(engine, roster_1(1), later)
    stale = entry_on(start, roster_1(1).roster, ann, span=span, round=4)
    heads = [start] * engine.rules.num_spans[span.fragment]
    heads[span.index] = next_head(start, stale)
    engine.receive(ann, heartbeat(ann, roster=later.roster.digest(), heads=(fragment_head(2),), sequence=2), 32.0)
    asked = engine.receive(ann, HeadsReply(fragment=span.fragment, heads=tuple(heads)), 32.0)
    assert asked_entries(asked) == [EntryRequest(span=span, parent=start.digest)]
    report, *instead = take_entry(engine, ann, stale, 32.1)
    assert isinstance(report, Report)
    assert "names roster 1, but roster 2 governs that round" in report.text
    assert asked_entries(instead) == []


def test_two_entries_of_one_owner_are_reported_once() -> None:
    ann = peer_id("ann")
    engine = engine_of("cat")
    span, start = following(engine, roster_1(1))
    one, other, third = (
        entry_on(start, roster_1(1).roster, ann, span=span, payload=payload) for payload in (b"1", b"2", b"3")
    )
    take_entry(engine, ann, one, 0.1)
    reports = [
        action.topic
        for entry in (other, third)
        for action in take_entry(engine, ann, entry, 0.1)
        if isinstance(action, Report)
    ]
    assert reports == ["equivocation"]


def test_a_peer_that_does_not_follow_ignores_an_entry_without_its_parent() -> None:
    engine = PeerEngine(me=self_of(peer_id("boot"), trains=False), rules=run_rules(), verify=verify)
    span, start = following(engine, roster_1(3))
    entry = entry_on(start, roster_1(3, height=3).roster, peer_id("ann"), span=span)
    assert take_entry(engine, peer_id("ann"), entry, 0.1) == []


def test_a_missing_parent_of_an_entry_is_fetched() -> None:
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
    asked = take_entry(engine, ann, entry_on(parent, certified.roster, ann, span=span), 8.0)
    assert EntryRequest(span=span, parent=start.digest) in [a.message for a in asked if isinstance(a, Send)]


@pytest.mark.parametrize(("sender", "is_sign_of_life"), [("ann", False), ("boot", True), ("mallory", False)])
def test_only_an_entry_of_the_founder_or_another_member_shows_that_a_peer_is_alive(
    sender: str, is_sign_of_life: bool
) -> None:
    engine, (entry, _) = engine_that_lost_entries()
    engine.tick(0.0)
    take_entry(engine, peer_id(sender), entry, 1.0)
    assert engine.repair.readiness.alone_since == (1.0 if is_sign_of_life else 0.0)


def test_repeated_entries_of_a_stranger_make_no_peer_wait_for_their_parents() -> None:
    """These are valid entries that this peer has lost. One is kept, and each other one is news whenever it arrives."""
    engine, entries = engine_that_lost_entries()
    for entry in (*entries, *entries):
        take_entry(engine, peer_id("mallory"), entry, 1.0)
    assert engine.catch_up.differences.left_out() == frozenset()


def engine_that_lost_entries() -> tuple[PeerEngine, list[Entry]]:
    """Return the only member of a run at its initial state, and the second and third entry that it had made."""
    certified = roster_1(1)
    engine = with_roster(engine_of(), certified)
    span = next(iter(engine.rules.span_elements))
    start = head_of()
    engine.hold_state(dict.fromkeys(engine.rules.span_elements, start))
    head = next_head(start, entry_on(start, certified.roster, engine.me.peer, span=span))
    second = entry_on(head, certified.roster, engine.me.peer, span=span, round=1)
    third = entry_on(next_head(head, second), certified.roster, engine.me.peer, span=span, round=1)
    return engine, [second, third]


def test_an_entry_of_an_abandoned_branch_is_not_an_answer_and_the_span_is_fetched() -> None:
    """Its roster is on no chain that any peer would send; we requested it again and again."""
    certified, given_up = roster_1(1), roster_1(1, height=7).roster
    (ann,) = ids(1)
    engine = with_roster(engine_of("cat"), certified)
    span, start = next(iter(engine.rules.span_elements)), head_of()
    engine.hold_state(dict.fromkeys(engine.rules.span_elements, start))
    engine.link_up(ann)
    beat = heartbeat(ann, roster=certified.roster.digest(), heads=(fragment_head(-2),))
    engine.receive(ann, beat, 0.0)
    next_one = entry_on(start, given_up, ann, span=span)
    heads = [start] * engine.rules.num_spans[span.fragment]
    heads[span.index] = next_head(start, next_one)
    asked = engine.receive(ann, HeadsReply(fragment=span.fragment, heads=tuple(heads)), 0.1)
    assert EntryRequest(span=span, parent=start.digest) in [a.message for a in asked if isinstance(a, Send)]
    instead = take_entry(engine, ann, next_one, 0.2)
    assert [a.message for a in instead if isinstance(a, Send)] == [
        SpanRequest(span=span, version=ZERO_DIGEST, offset=0, most_bytes=1 << 16)
    ]


def test_an_entry_that_its_own_owner_rejects_is_not_sent() -> None:
    swarm = founded(1, bootstrap=False)
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
    (order,) = engine.take_result(contribution, now)
    assert isinstance(order, ReduceSpan)
    actions = engine.take_result(
        SpanReduced(order=order, sound=frozenset({machine.peer}), payload=b"mean", payload_norm=1e30), now
    )
    assert [action.topic for action in actions if isinstance(action, Report)] == ["entry-refused"]
    assert not [action for action in actions if isinstance(action, Send)]


def row_means(me: PeerId) -> tuple[dict[SpanId, PeerId], dict[SpanId, PeerId]]:
    """Let one of six in a grid of two rows average alone; return the receiver of each span's mean, and its owner."""
    roster = roster_1(6)
    engine = PeerEngine(me=self_of(me), rules=run_rules(group_size=2), verify=verify)
    with_roster(engine, roster)
    engine.hold_state(dict.fromkeys(engine.rules.span_elements, head_of()))
    engine.tick(0.1)
    collection, finish = engine.exchange.collection, engine.exchange.finish
    assert collection is not None
    assert finish is not None
    spans = tuple(
        EncodedSpan(span=span, parent=head_of().digest, norm=1.0, payload=bytes(PAYLOAD_BYTES))
        for span in collection.reduced
    )
    given = FragmentContribution(round=0, fragment=0, tokens=10, steps=1, spans=spans)
    actions = engine.take_result(given, 0.2)
    empty = contribution_messages(given, (), roster.roster.digest(), 1)[0]
    for each in collection.members.values():
        if each.peer != me:
            actions += engine.receive(each.peer, empty, 0.3)
    orders = [action for action in actions if isinstance(action, ReduceSpan)]
    assert [(order.span, order.stage) for order in orders] == [(each.span, Stage.ROW) for each in spans]
    for order in orders:
        actions += engine.take_result(
            SpanReduced(order=order, sound=frozenset({me}), payload=bytes(PAYLOAD_BYTES), payload_norm=1.0), 0.4
        )
    means = [(me, mean) for mean, _ in finish.means.values()]
    means += [(a.to, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, RowMean)]
    for _, mean in means:
        assert places_in(mean.included) == (roster.roster.position(me),)
        assert mean.payload == bytes(PAYLOAD_BYTES)
    owners = {each.span: collection.grid.owner(each.span) for each in spans}
    return {mean.span: to for to, mean in means}, {span: owner for span, owner in owners.items() if owner is not None}


def test_in_a_grid_the_mean_of_a_row_goes_to_the_owner_of_its_span() -> None:
    sent_to: set[bool] = set()
    for me in ids(6):
        receivers, owners = row_means(me)
        assert receivers == owners
        sent_to |= {to == me for to in receivers.values()}
    assert sent_to == {True, False}, "some to another row, some kept here"


def test_an_invalid_entry_is_refused_with_a_reason() -> None:
    engine = with_roster(engine_of(), roster_1(1))
    span = next(iter(engine.rules.span_elements))
    head, _ = founded(1).machines["p0"].vectors[span]
    engine.hold_state({span: head})
    (report,) = take_entry(engine, ids(1)[0], entry_on(head, roster_1(1).roster, peer_id("stranger"), span=span), 0.0)
    assert isinstance(report, Report)
    assert report.topic == "entry-refused"


def test_a_mean_that_arrives_too_late_is_skipped() -> None:
    engine = with_roster(engine_of(), roster_1(1))
    span = next(iter(engine.rules.span_elements))
    order = ReduceSpan(round=4, span=span, stage=Stage.WHOLE, parts=(), norm_limit=1.0, rounding_seed=b"")
    (report,) = engine.take_result(SpanReduced(order=order, sound=frozenset(), payload=b"", payload_norm=1.0), 40.0)
    assert isinstance(report, Report)
    assert "the round was over before its mean was ready" in report.text


def test_a_member_whose_contributions_this_peer_leaves_out_cycle_after_cycle_is_named() -> None:
    engine, (first, second, _) = with_roster(engine_of(), roster_1(3)), ids(3)
    parts = tuple(Part(peer=peer, payload=b"", weight=1.0, norm=1.0) for peer in (first, second))
    order = ReduceSpan(round=0, span=SPAN, stage=Stage.WHOLE, parts=parts, norm_limit=9.0, rounding_seed=b"")
    for cycle in range(1, LEFT_OUT_CYCLES[0] + 1):
        assert engine.influence.named() == ()
        engine.take_result(SpanReduced(order=order, against=frozenset({second})), 0.0)
        engine.tick(engine.rules.clock.begin(cycle * engine.rules.clock.num_fragments))
    (text,) = engine.influence.named()
    assert text.startswith(f"{short_peer_id(second)} was left out of 1 of 1 mean that this peer took")


def test_a_new_link_receives_a_heartbeat_at_once() -> None:
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
    assert engine.ready
    assert len(engine.closed_heads(0.0)) == 2
    assert not any(engine.holds_needlessly(now) for now in (0.0, 100.0)), "it is the one member"
    engine.drop_state()
    assert engine.closed_heads(0.0) == ()
    assert engine.repair.sources.donors(0.0) == []


def test_the_engine_exposes_its_incarnation_and_run() -> None:
    engine = engine_of(incarnation=3)
    assert engine.me.member() == member(peer_id("ann"), incarnation=3, counts=False, place=NO_PLACE)
    assert engine.rules.run == RUN


def test_the_latest_round_of_a_peer_is_that_of_its_tips_or_promises() -> None:
    assert engine_of().latest_round() == -1
    heads = {SPAN: head_of(round_index=7), SpanId(1, 0): head_of(round_index=5)}
    certified = roster_1(3)
    rosters = (founding(), certified)
    assert engine_of(recalled=SavedState(rosters=rosters, heads=heads)).latest_round() == 7
    bond = Bond(degraded=False, promised=ballot_number(9, 2), voted=None)
    ballots = Ballots(parent=certified.roster.digest(), bonds=(bond,))
    assert engine_of(recalled=SavedState(rosters=rosters, heads=heads, ballots=ballots)).latest_round() == 9


def test_a_peer_saves_once_a_cycle_that_its_line_continues_and_restores_it_at_a_restart() -> None:
    swarm = founded(3)
    goes_on(swarm)
    machine = swarm.machines["p1"]
    kept = machine.disk.activity
    assert kept is not None
    assert kept.first < kept.last
    swarm.kill("p1")
    again = swarm.start("p1").rules_engine.membership
    again.entry_absorbed(2 * (kept.last + 1))
    assert again.rosters.keep_activity() == [KeepActivity(activity=replace(kept, last=kept.last + 1))]


def test_a_peer_that_only_listens_starts_no_first_round_contributes_nothing_and_does_not_vote() -> None:
    swarm = founded(3)
    goes_on(swarm)
    machine = swarm.machines["p1"]
    engine, clock = machine.rules_engine, machine.rules_engine.rules.clock
    change(engine, is_time_uncertain=True)
    current = clock.round_at(swarm.now)
    voting = next(r for r in range(current + 1, current + 9) if clock.fragment(r) == clock.num_fragments - 1)
    actions = engine.tick(clock.begin(voting))
    assert engine.round == voting, "it goes on with the rounds that others make entries in"
    assert not any(isinstance(action, RequestContribution | KeepBallots) for action in actions)
    fresh = engine_of()
    change(fresh, is_time_uncertain=True)
    fresh.tick(clock.begin(voting))
    assert fresh.round is None


def test_after_a_clock_far_ahead_is_set_right_nothing_waits_for_a_future_time() -> None:
    """Timestamps from then are in the future: requests would not be repeated, and silence would go unnoticed."""
    bob, engine, ahead = peer_id("bob"), with_roster(engine_of(), roster_1(2)), 1e6
    engine.link_up(bob)
    roster = roster_1(2).roster.digest()
    engine.tick(ahead)
    beat = heartbeat(bob, roster=roster, heads=(fragment_head(),))
    engine.receive(bob, beat, ahead)
    assert asked_spans(engine.tick(ahead)), "it lacks the state"
    assert not asked_spans(engine.tick(ahead + 0.5))
    assert asked_spans(engine.tick(16.0))
    assert bob in engine.membership.liveness.alive(16.0)
    assert bob not in engine.membership.liveness.alive(17.0 + engine.rules.silence_seconds)


def test_a_ready_peer_whose_clock_is_set_back_continues_fetching() -> None:
    engine = with_roster(engine_of(), roster_1(2))
    engine.hold_state(dict.fromkeys(engine.rules.span_elements, head_of()))
    engine.membership.local.set_ready(True)
    engine.tick(1e6)
    engine.catch_up.differences.want_span(SPAN, peer_id("bob"))
    engine.tick(16.0)
    assert engine.catch_up.differences.left_out() == frozenset({SPAN})


def test_a_clock_set_back_slightly_changes_nothing() -> None:
    engine = with_roster(engine_of(), roster_1(2))
    engine.receive(peer_id("bob"), heartbeat(peer_id("bob")), 100.0)
    engine.tick(100.0)
    engine.tick(99.0)
    assert engine.membership.liveness.views[peer_id("bob")].at == 100.0


@pytest.mark.parametrize("stranger", ["stranger", "boot"])
def test_a_strangers_messages_change_nothing_at_a_ready_member(stranger: str) -> None:
    """Nor do those of the founder, which is no longer a member: only its answer about the initial state counts."""
    engine = with_roster(engine_of(), roster_1(2))
    engine.hold_state(dict.fromkeys(engine.rules.span_elements, head_of()))
    engine.membership.local.set_ready(True)
    villain, before = peer_id(stranger), dict(engine.chains.heads)
    engine.link_up(villain)
    higher = head_of(height=1000, digest=b"elsewhere", round_index=8)
    roster = roster_1(2).roster
    said: list[object] = []
    for sequence in range(1, 40):
        now = 16.0 + sequence
        heads = (fragment_head(0), fragment_head(1))
        beat = heartbeat(villain, roster=roster.digest(), roster_k=1, heads=heads, sequence=sequence)
        for message in (
            beat,
            HeadsReply(fragment=0, heads=(higher,) * 3),
            EntryAbsent(span=SPAN, parent=head_of().digest),
            SpanReply(span=SPAN, head=higher, total_bytes=32, offset=0, piece=bytes(32)),
            ContentReply(fragment=0, digests=((higher.digest, sha256(b"x")),) * 3),
        ):
            said += [type(action) for action in engine.receive(villain, message, now)]
        said += [type(action) for action in engine.tick(now)]
    assert engine.chains.heads == before
    assert not {ReplaceSpan, HashSpan, RebuildSpan, CompareContent}.intersection(said)
    assert engine.catch_up.differences.left_out() == frozenset()


def test_a_span_that_could_not_follow_an_entry_is_rebuilt() -> None:
    engine = engine_of()
    report, rebuild = engine.take_result(SpanDamaged(span=SpanId(0, 0), reason="a reason"), 0.0)
    assert isinstance(report, Report)
    assert report.text.startswith("fragment 0 span 0 could not follow an entry: a reason; its memory is damaged")
    assert rebuild == RebuildSpan(span=SpanId(0, 0))
    assert engine.take_result(SpanRebuilt(span=SpanId(0, 0)), 0.1) != [], "what came of it is told, whatever it is"


def test_a_forwarded_request_gets_a_signed_answer() -> None:
    engine = engine_of("ann")
    question = SignedContentRequest(fragment=0, voter=engine.me.peer, requester=peer_id("bob"), nonce=7)
    said = engine.sign_content(question, ((sha256(b"chain"), sha256(b"content")),))
    assert (said.voter, said.requester, said.nonce) == (engine.me.peer, peer_id("bob"), 7)
    assert verify(said.voter, said.statement(engine.rules.run), said.signature)
