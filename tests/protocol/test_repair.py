"""Repair: finding out what is missing, becoming ready, and answering others."""

from __future__ import annotations

import pytest
from fake_run import ALL_SPANS, peer_id, run_rules, verify
from made import (
    SPAN,
    book_with,
    certify,
    child_of,
    entry_on,
    founding,
    fragment_head,
    head_of,
    heartbeat,
    ids,
    member,
    membership_of,
    roster_1,
    self_of,
)

from p2p_diloco.ids import Digest, PeerId, SpanId, sha256
from p2p_diloco.protocol.actions import (
    Action,
    CompareContent,
    HashSpan,
    RebuildSpan,
    ReplaceSpan,
    Report,
    Send,
    ServeContent,
    ServeEntry,
    ServeSpan,
)
from p2p_diloco.protocol.heartbeats import HeartbeatBuilder
from p2p_diloco.protocol.membership.local import Conditions
from p2p_diloco.protocol.membership.membership import Membership
from p2p_diloco.protocol.repair.quorum import Quorum
from p2p_diloco.protocol.repair.repair import BYTES_PER_ELEMENT_OF_STATE, Repair
from p2p_diloco.protocol.results import ContentCompared, SpanDamaged, SpanHashed, SpanRebuilt
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.ballot import NO_BALLOTS
from p2p_diloco.protocol.wire.heartbeat import Heartbeat
from p2p_diloco.protocol.wire.messages import (
    ContentReply,
    ContentRequest,
    EntryAbsent,
    EntryRequest,
    HeadsReply,
    HeadsRequest,
    Message,
    Ping,
    SignedContentRequest,
    SpanReply,
    SpanRequest,
)
from p2p_diloco.protocol.wire.roster import CertifiedRoster

A, B, C, D = ids(4)
ROSTER = roster_1(2).roster


def repair(
    *,
    holds: bool = True,
    num_members: int = 2,
    listed: CertifiedRoster | None = None,
    membership: Membership | None = None,
) -> Repair:
    """Return the `Repair` of A, linked with B; or that of another peer, which has received no heartbeat."""
    rules, is_new = run_rules(), membership is None
    if membership is None:
        membership = membership_of(A, founding(), listed if listed is not None else roster_1(num_members))
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    for span in ALL_SPANS if holds else ():
        chains.set_head(span, head_of())
    heartbeats = HeartbeatBuilder(rules=rules, membership=membership, chains=chains)
    page = Repair(rules=rules, membership=membership, chains=chains, heartbeats=heartbeats, linked={B}, verify=verify)
    if holds:
        page.serving.hold_state()
    if is_new:
        membership.liveness.take(heartbeat(B, roster=ROSTER.digest(), heads=(fragment_head(),)), 0.0)
    return page


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        (HeadsRequest(fragment=0), HeadsReply),
        (EntryRequest(span=SPAN, parent=head_of().digest), EntryAbsent),
        (EntryRequest(span=SpanId(9, 9), parent=sha256(b"x")), EntryAbsent),
    ],
)
def test_requests_are_answered(question: Message, kind: type) -> None:
    (send,) = repair().take(B, question, 0.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, kind)


def test_the_shell_serves_held_spans() -> None:
    (span,) = repair().take(B, SpanRequest(span=SPAN, version=sha256(b""), offset=0, most_bytes=1 << 16), 0.0)
    assert isinstance(span, ServeSpan)
    (entry,) = repair().take(B, EntryRequest(span=SPAN, parent=sha256(b"older")), 0.0)
    assert entry == ServeEntry(to=B, span=SPAN, parent=sha256(b"older"))
    (content,) = repair().take(B, ContentRequest(fragment=0), 0.0)
    assert isinstance(content, ServeContent)


@pytest.mark.parametrize(
    "message",
    [
        HeadsRequest(fragment=99),
        SpanRequest(span=SpanId(9, 9), version=sha256(b""), offset=0, most_bytes=1 << 16),
        ContentRequest(fragment=99),
        ContentReply(fragment=99, digests=()),
        ContentReply(fragment=0, digests=()),
        HeadsReply(fragment=99, heads=()),
        SpanReply(span=SpanId(9, 9), head=head_of(), total_bytes=1, offset=0, piece=b"x"),
        Ping(nonce=1),
    ],
)
def test_messages_that_do_not_fit_the_run_are_dropped(message: Message) -> None:
    assert repair().take(B, message, 0.0) == []


def test_a_peer_that_holds_nothing_answers_nothing() -> None:
    page = repair(holds=False)
    assert page.take(B, HeadsRequest(fragment=0), 0.0) == []
    assert page.take(B, ContentRequest(fragment=0), 0.0) == []
    assert page.closed_heads(0.0) == ()


def test_no_state_is_reported_while_a_branch_is_adopted() -> None:
    page = repair()
    assert len(page.closed_heads(0.0)) == 2
    page.adopt_branch()
    assert page.closed_heads(0.0) == ()
    assert page.take(B, HeadsRequest(fragment=0), 0.0) == []


def test_a_joiner_without_served_state_adopts_a_branch_at_a_members_tip() -> None:
    """Linked with one peer that has no vote, it followed all entries and never became ready."""
    page = repair()
    heads = page.closed_heads(0.0)
    page.serving.drop_state()
    page.adopt_branch()
    beat = heartbeat(B, roster=ROSTER.digest(), heads=(heads[0], fragment_head(-1)), sequence=2)
    page.compare(B, beat, 0.0)
    assert not page.catch_up.is_complete(), "of the other fragment it stands elsewhere"
    page.compare(B, heartbeat(B, roster=ROSTER.digest(), heads=heads, sequence=3), 0.0)
    assert page.catch_up.is_complete()


def test_only_peers_of_this_branch_are_donors_and_compared_with() -> None:
    page = repair()
    assert page.sources.donors(0.0) == [B]
    stranger = heartbeat(B, roster=sha256(b"other branch"), heads=(fragment_head(-2),), sequence=2)
    assert page.compare(B, stranger, 0.0) == []
    page.membership.liveness.take(stranger, 0.0)
    assert page.sources.donors(0.0) == []


def test_a_ready_peer_asks_unready_peers_for_entries_that_ready_peers_lack() -> None:
    """Two of three voters, restarted, were an entry above all ready peers, which waited for these two."""
    page = repair(num_members=3)
    page.membership.local.set_ready(True)
    page.linked.add(C)
    roster = roster_1(3).roster.digest()
    level = heartbeat(B, roster=roster, heads=(fragment_head(),), sequence=2)
    ahead = heartbeat(C, roster=roster, heads=(fragment_head(-2),), ready=False)
    for beat in (level, ahead):
        page.membership.liveness.take(beat, 0.0)
    assert page.sources.donors(0.0) == [B]
    (send,) = page.compare(C, ahead, 0.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, HeadsRequest)
    higher = HeadsReply(fragment=0, heads=(head_of(height=5, digest=b"x"), head_of(), head_of()))
    (question,) = page.take(C, higher, 0.1)
    assert isinstance(question, Send)
    assert (question.to, question.message) == (C, EntryRequest(span=SPAN, parent=head_of().digest))
    assert page.catch_up.differences.left_out() == frozenset(), "its word alone keeps nobody from contributing"
    (report,) = page.take(C, EntryAbsent(span=SPAN, parent=head_of().digest), 0.2)
    assert isinstance(report, Report)
    assert "no peer that was asked has the entries between" in report.text
    assert page.catch_up.is_complete(), "nor does who has no entry to show"


def test_an_unready_founder_is_asked_for_entries_if_no_member_is_linked() -> None:
    """Only the founder links members behind routers; an entry proves itself, whoever sends it."""
    page, boot = repair(), peer_id("boot")
    page.linked.clear()
    page.linked.add(boot)
    ahead = heartbeat(boot, roster=ROSTER.digest(), heads=(fragment_head(-2),), ready=False)
    page.membership.liveness.take(ahead, 0.0)
    page.compare(boot, ahead, 0.0)
    higher = HeadsReply(fragment=0, heads=(head_of(height=5, digest=b"x"), head_of(), head_of()))
    asked = [action for action in page.take(boot, higher, 0.1) if isinstance(action, Send)]
    assert [(send.to, send.message) for send in asked] == [(boot, EntryRequest(span=SPAN, parent=head_of().digest))]


HIGHER = HeadsReply(fragment=0, heads=(head_of(height=5, digest=b"x"), head_of(), head_of()))


def lone_member(*, is_ready: bool = False, since: float = 0.0) -> tuple[Repair, Heartbeat]:
    """Return the `Repair` of the only member, linked with the founder and with B, whose height is greater."""
    page, boot, roster = repair(num_members=1), peer_id("boot"), roster_1(1).roster.digest()
    page.membership.local.set_ready(is_ready)
    page.linked.add(boot)
    page.membership.liveness.take(heartbeat(boot, roster=roster, heads=(fragment_head(),)), since)
    page.sources.look(page.catch_up, since)
    return page, heartbeat(B, roster=roster, heads=(fragment_head(-2),), sequence=2)


def test_the_only_member_asks_ready_peers_for_entries_that_it_lost() -> None:
    page, ahead = lone_member()
    page.membership.liveness.take(ahead, 0.0)
    assert [action.message for action in page.compare(B, ahead, 0.0) if isinstance(action, Send)] == [
        HeadsRequest(fragment=0)
    ]
    asked = [(action.to, action.message) for action in page.take(B, HIGHER, 0.1) if isinstance(action, Send)]
    assert (B, EntryRequest(span=SPAN, parent=head_of().digest)) in asked
    assert not any(isinstance(message, SpanRequest) for _, message in asked)


@pytest.mark.parametrize(
    ("heard_for", "is_ready", "asks"), [(47.0, False, True), (48.0, False, False), (0.0, True, False)]
)
def test_the_only_member_asks_strangers_until_it_is_ready_and_no_longer_than_a_stall_takes(
    heard_for: float, is_ready: bool, asks: bool
) -> None:
    page, ahead = lone_member(is_ready=is_ready, since=-heard_for)
    assert run_rules().stalled_cycles * run_rules().cycle_seconds == 48.0
    for beat in (heartbeat(peer_id("boot"), roster=ahead.roster, heads=(fragment_head(),), sequence=2), ahead):
        assert page.membership.liveness.take(beat, 0.0)
    assert bool(page.compare(B, ahead, 0.0)) is asks


def test_two_strangers_do_not_keep_the_only_member_from_contributing_once_it_is_ready() -> None:
    page, ahead = lone_member(is_ready=True)
    page.linked.add(C)
    for peer, now in ((B, 0.0), (C, 1.0)):
        beat = heartbeat(peer, roster=ahead.roster, heads=ahead.heads, sequence=2)
        assert page.membership.liveness.take(beat, now)
        page.compare(peer, beat, now)
        page.take(peer, HIGHER, now)
    assert page.catch_up.differences.left_out() == frozenset()


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_ready_peer_left_out_of_the_roster_starts_afresh_if_no_entries_follow(is_listed: bool) -> None:
    """After a power cut it was ready alone; then it was linked with one of many, and followed no peer, forever."""
    members = ids(4)[not is_listed :]
    listed = certify(child_of(founding().roster, [member(peer) for peer in members]), [peer_id("boot")])
    page = repair(listed=listed)
    page.membership.local.set_ready(True)
    roster, ahead = listed.roster.digest(), tuple(head_of(height=9, digest=b"%d" % index) for index in range(3))
    said = []
    for second in range(90):
        now = float(second)
        beat = heartbeat(B, roster=roster, heads=(fragment_head(),), sequence=second + 2)
        page.membership.liveness.take(beat, now)
        page.catch_up.differences.ask_tips(0, B, now)
        actions = page.take(B, HeadsReply(fragment=0, heads=ahead), now)
        actions += page.take(B, EntryAbsent(span=SPAN, parent=head_of().digest), now)
        actions += page.pump(now)
        said += [action.text for action in actions if isinstance(action, Report) and action.topic == "ready"]
    assert page.membership.local.ready is is_listed
    begun_anew = "roster 1 continues without this peer, and no peer has the entries since; catching up as a newcomer"
    assert said == ([] if is_listed else [begun_anew])


def test_strangers_are_asked_nothing_if_there_are_other_members() -> None:
    page = repair(num_members=2)
    page.linked.add(C)
    ahead = heartbeat(C, roster=ROSTER.digest(), heads=(fragment_head(-2),))
    page.membership.liveness.take(ahead, 0.0)
    assert page.compare(C, ahead, 0.0) == []


def test_the_only_member_becomes_ready_when_the_founder_holds_the_same() -> None:
    page, _ = lone_member()
    boot = peer_id("boot")
    page.pump(0.0)
    said: list[Action] = []
    for fragment, num_spans in enumerate(run_rules().num_spans):
        page.catch_up.verifier.ask_content(fragment, boot, 0.0)
        page.take(boot, ContentReply(fragment=fragment, digests=((HEAD.digest, sha256(b"x")),) * num_spans), 0.1)
        said += page.take_result(ContentCompared(peer=boot, fragment=fragment, num_equal=num_spans, differing=()), 0.1)
    assert "ready: state compared with 1 peer" in sentences(said + page.pump(0.2))


@pytest.mark.parametrize("voters", [(A,), (A, B, C)], ids=["one voter", "three voters"])
def test_the_only_voter_does_not_wait_forever_for_donors_that_differ(voters: tuple[PeerId, ...]) -> None:
    """It came back with the state on its disk, and ready members without a vote hold another one."""
    listed = [member(peer, counts=peer in voters) for peer in (A, B, C)]
    roster = certify(child_of(founding().roster, listed), [peer_id("boot")])
    page = repair(listed=roster)
    said = []
    for second in range(90):
        beat = heartbeat(B, roster=roster.roster.digest(), heads=(fragment_head(-2),), sequence=second + 2)
        page.membership.liveness.take(beat, float(second))
        actions = page.pump(float(second))
        said += [action.text for action in actions if isinstance(action, Report) and action.topic == "ready"]
    alone = "ready: others hold different bytes, but only this peer votes"
    assert said == ([alone] if voters == (A,) else [])


def test_time_asleep_does_not_count_as_time_alone() -> None:
    page = repair()
    page.catch_up.fetcher.want_entry(SPAN, B)
    silence = run_rules().silence_seconds
    page.pump(0.0)
    late = 10 * silence
    assert page.pump(late) == [], "what was said meanwhile is still to come"
    assert not page.catch_up.is_complete()
    page.readiness.not_alone(late + silence)
    for step in range(5):
        page.pump(late + step * 0.5 * silence)
    assert not page.catch_up.is_complete(), "somebody was there a moment ago"
    for step in range(5, 12):
        page.pump(late + step * 0.5 * silence)
    assert page.catch_up.is_complete()


def test_a_member_that_is_alone_becomes_ready_after_a_while() -> None:
    page = repair()
    page.linked.clear()
    for now in (0.0, 5.0, 10.0, 15.0):
        assert page.pump(now) == []
    (report,) = page.pump(17.0)
    assert isinstance(report, Report)
    assert report.text == "ready: no other peer is here"


def test_a_leaving_peer_does_not_become_ready_again() -> None:
    page = repair()
    page.linked.clear()
    page.membership.local.leave(None)
    for now in (0.0, 5.0, 10.0, 15.0, 17.0):
        assert page.pump(now) == []
    assert not page.membership.local.ready


def bystander(*beats: Heartbeat, roster: CertifiedRoster | None = None, archives: bool = False) -> Repair:
    """Return the `Repair` of a founder that does not train, holds the initial state, and has heard others.

    Unless the roster says otherwise, three members count and reduce, and the founder is no longer needed.
    """
    rosters = (founding(), roster or roster_1(3))
    page = repair(membership=membership_of(peer_id("boot"), *rosters, trains=False, archives=archives))
    for beat in beats:
        page.membership.liveness.take(beat, 0.0)
    return page


def ready(peer: PeerId, **changes: object) -> Heartbeat:
    return heartbeat(peer, roster=ROSTER.digest(), heads=(fragment_head(),), **changes)


def test_a_bystander_follows_no_peer() -> None:
    assert repair().follows
    page = bystander()
    assert not page.follows
    assert page.pump(0.0) == []
    beat = heartbeat(B, roster=roster_1(3).roster.digest(), heads=(fragment_head(-2),))
    assert page.compare(B, beat, 0.0) == []


def test_an_archivist_follows_the_logs_keeps_what_it_holds_and_asks_for_no_place() -> None:
    beat = heartbeat(B, roster=roster_1(3).roster.digest(), heads=(fragment_head(-2),))
    page = bystander(beat, archives=True)
    page.serving.hold_state()
    assert page.follows
    (ask,) = page.compare(B, beat, 0.0)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, HeadsRequest)
    for now in (0.0, 60.0):
        for peer in (A, B, C):
            page.membership.liveness.take(ready(peer, sequence=int(now) + 2), now)
        assert not page.is_needless(now), "others hold the state too, but this peer keeps it"
    page.membership.local.set_ready(True)
    assert page.membership.declarations.own_news(60.0) is None, "it never becomes a member"


BOOTSTRAP = member(peer_id("boot"), trains=False, counts=False)
IN_NEED = {
    "two that count": roster_1(2),
    "one that reduces": certify(
        child_of(founding().roster, [member(A), *(member(peer, reduces=False) for peer in (B, C))]), [peer_id("boot")]
    ),
    "it is listed": certify(
        child_of(founding().roster, [BOOTSTRAP, *(member(peer) for peer in (A, B, C))]), [peer_id("boot")]
    ),
}


@pytest.mark.parametrize("roster", IN_NEED.values(), ids=IN_NEED.keys())
def test_a_founder_that_is_needed_on_the_roster_follows_the_logs(roster: CertifiedRoster) -> None:
    beat = heartbeat(B, roster=roster.roster.digest(), heads=(fragment_head(-2),))
    page = bystander(beat, roster=roster)
    assert page.follows
    (ask,) = page.compare(B, beat, 0.0)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, HeadsRequest)


def test_a_founder_that_is_needed_again_becomes_ready_like_a_joiner_and_keeps_what_it_holds() -> None:
    page = bystander(ready(A), ready(B), roster=roster_1(2))
    assert not is_needless(page)
    assert not page.membership.local.ready
    for fragment, num_spans in enumerate(run_rules().num_spans):
        for peer in (A, B):
            page.take_result(ContentCompared(peer=peer, fragment=fragment, num_equal=num_spans, differing=()), 0.0)
    assert page.membership.local.ready


def is_needless(page: Repair) -> bool:
    """Return whether a founder may drop the initial state at one of several times of asking."""
    return any(page.is_needless(now) for now in (0.0, 0.5 * SILENCE, SILENCE))


SILENCE = run_rules().silence_seconds


def test_a_founder_holds_the_initial_state_until_a_peer_with_a_fast_line_is_ready() -> None:
    assert not is_needless(bystander())
    assert not is_needless(bystander(ready(A, ready=False)))
    assert not is_needless(bystander(ready(A, share=7), ready(B, can_be_dialled=False)))
    page = bystander(ready(A, share=7), ready(B))
    assert is_needless(page)
    page.drop()
    assert not is_needless(page), "it holds nothing any more"


def test_a_founder_waits_for_a_ready_peer_to_declare_its_share() -> None:
    page = bystander(ready(A))
    assert not page.is_needless(0.0)
    page.membership.liveness.take(ready(A, share=7, sequence=2), 1.0)
    assert not page.is_needless(1.0)
    page.membership.liveness.take(ready(A, sequence=3), 2.0)
    assert not page.is_needless(2.0)
    assert not page.is_needless(1.9 + SILENCE)
    assert page.is_needless(2.0 + SILENCE)


def test_three_thin_lines_are_enough_but_a_fetch_from_the_founder_is_completed() -> None:
    joiner = peer_id("joiner")
    page = bystander(ready(A, share=7), ready(B, share=1), ready(C, share=3), ready(joiner, ready=False))
    assert is_needless(page)
    page.take(joiner, SpanRequest(span=SPAN, version=sha256(b""), offset=0, most_bytes=1 << 16), 0.0)
    assert not is_needless(page)
    page.membership.liveness.take(ready(joiner, share=1, sequence=2), 0.0)
    assert is_needless(page)


@pytest.mark.parametrize("roster", IN_NEED.values(), ids=IN_NEED.keys())
def test_a_founder_needed_on_the_roster_holds_the_state_whoever_is_ready(roster: CertifiedRoster) -> None:
    assert not is_needless(bystander(ready(A), ready(B), ready(C), roster=roster))


def test_the_state_is_not_handed_over_to_strangers() -> None:
    assert not is_needless(bystander(*(ready(peer_id(name)) for name in ("x", "y", "z"))))


def test_the_state_is_not_handed_over_to_a_ready_peer_that_does_not_train() -> None:
    """Only a founder is ready without training, and it is no more needed than this one."""
    assert not is_needless(bystander(ready(peer_id("other"), trains=False)))


def test_dropped_state_is_no_longer_fetched() -> None:
    page = bystander(ready(A))
    page.catch_up.fetcher.want_entry(SPAN, A)
    page.drop()
    for span in ALL_SPANS:
        page.chains.drop_head(span)
    listed = certify(child_of(roster_1(3).roster, [BOOTSTRAP, *(member(peer) for peer in (A, B, C))]), [A, B, C])
    page.membership.book.add(listed)
    beat = heartbeat(B, roster=listed.roster.digest(), heads=(fragment_head(),))
    page.membership.liveness.take(beat, 0.0)
    asked = [action.message for action in page.pump(0.0) if isinstance(action, Send)]
    assert asked
    assert all(isinstance(message, SpanRequest) for message in asked)


def test_spans_are_fetched_over_fast_lines_or_from_the_founder() -> None:
    page, boot = repair(), peer_id("boot")
    page.linked |= {C, boot}
    page.membership.liveness.take(ready(B, share=7, sequence=2), 0.0)
    assert page.sources.for_spans(0.0) == [B]
    page.membership.liveness.take(ready(boot, ready=False, trains=False), 0.0)
    assert page.sources.for_spans(0.0) == [boot]
    page.linked.remove(B)
    assert page.sources.donors(0.0) == [], "what a founder holds is old: nobody is ready by its word"
    assert page.sources.for_spans(0.0) == [boot]
    page.linked.add(B)
    page.membership.liveness.take(ready(C), 0.0)
    assert page.sources.for_spans(0.0) == [boot], "from strangers nothing is learnt"
    page.membership.book.add(certify(child_of(ROSTER, [member(peer) for peer in (A, B, C)]), [A, B]))
    assert page.sources.for_spans(0.0) == [C]
    assert page.sources.donors(0.0) == sorted([B, C]), "entries come from whoever is ready"


def test_spans_are_fetched_from_an_unready_founder_if_all_members_are_empty() -> None:
    """It left, and came back when all members had lost their disks: no other peer holds anything."""
    page, boot = repair(holds=False), peer_id("boot")
    page.linked.add(boot)
    empty = heartbeat(B, roster=ROSTER.digest(), ready=False, sequence=2)
    for beat in (empty, ready(boot, ready=False)):
        page.membership.liveness.take(beat, 0.0)
    asked = [action for action in page.pump(0.0) if isinstance(action, Send)]
    assert {send.to for send in asked if isinstance(send.message, SpanRequest)} == {boot}
    assert page.sources.donors(0.0) == [], "nobody is ready by its word"


HEAD = head_of()


def differing(page: Repair, peer: PeerId = B, now: float = 0.0) -> list[Action]:
    """Let a peer differ from this one in `SPAN`, at equal chain digests."""
    page.catch_up.verifier.ask_content(0, peer, now)
    page.take(peer, ContentReply(fragment=0, digests=((HEAD.digest, sha256(b"x")),)), now)
    return page.take_result(ContentCompared(peer=peer, fragment=0, num_equal=0, differing=(SPAN,)), now)


def sentences(actions: list[Action]) -> str:
    return "; ".join(action.text for action in actions if isinstance(action, Report))


def test_a_peer_that_differs_checks_its_own_disk_first() -> None:
    page = repair()
    actions = differing(page)
    assert RebuildSpan(span=SPAN) in actions
    assert "checking it against this disk" in sentences(actions)
    assert RebuildSpan(span=SPAN) not in differing(page, now=10.0), "the disk is asked once at a time"
    mended = page.take_result(SpanRebuilt(span=SPAN, head=HEAD, state=b"right"), 0.1)
    assert ReplaceSpan(span=SPAN, head=HEAD, state=b"right", is_mended=True) in mended
    assert "damaged in memory" in sentences(mended)
    assert page.take_result(SpanRebuilt(span=SPAN, head=HEAD, state=b"right"), 0.2) == [], (
        "an answer that nobody waits for"
    )


def test_an_unready_peer_believes_the_only_other_member_over_its_disk() -> None:
    page = repair()
    differing(page)
    assert "differs from what a majority holds" in sentences(page.take_result(SpanRebuilt(span=SPAN, head=HEAD), 0.1))
    assert not page.catch_up.is_complete()


def among_four(*, is_ready: bool = True) -> Repair:
    """Return the `Repair` of one of four members that hears all others; `D` has not answered yet."""
    page = repair(num_members=4)
    page.linked.update({C, D})
    roster = roster_1(4).roster.digest()
    for peer in (B, C, D):
        page.membership.liveness.take(heartbeat(peer, roster=roster, heads=(fragment_head(),), sequence=2), 0.0)
    page.membership.local.set_ready(is_ready)
    return page


def test_memory_that_agrees_with_the_disk_stays_unless_a_majority_differs() -> None:
    page = among_four()
    differing(page)
    assert "peers that differ must be wrong" in sentences(page.take_result(SpanRebuilt(span=SPAN, head=HEAD), 0.1))
    assert page.catch_up.is_complete()
    differing(page, C)
    assert page.catch_up.is_complete(), "two of four: one may lie, and the other's memory be damaged"
    assert "differs from what a majority holds" in sentences(differing(page, D))
    assert not page.catch_up.is_complete()


def test_a_span_that_is_being_fetched_is_not_fetched_from_the_beginning_when_another_peer_differs() -> None:
    page = among_four()
    differing(page)
    page.take_result(SpanRebuilt(span=SPAN, head=HEAD), 0.1)
    differing(page, C)
    sent = [action for action in differing(page, D) if isinstance(action, Send)]
    (request,) = [one for one in sent if isinstance(one.message, SpanRequest)]
    page.take(request.to, SpanReply(span=SPAN, head=HEAD, total_bytes=32, offset=0, piece=bytes(8)), 0.2)
    again = [action for peer in (B, C, D) for action in differing(page, peer, 20.0)]
    assert "differs" not in sentences(again)


def test_a_peer_that_differs_with_a_sound_disk_asks_all_voters_including_unlinked_ones() -> None:
    """A bit that flipped before the checkpoint is wrong on disk as well; a peer behind a router has one link."""
    page = among_four()
    page.linked.intersection_update((B, C))
    differing(page)
    asked = [action for action in page.take_result(SpanRebuilt(span=SPAN, head=HEAD), 0.1) if isinstance(action, Send)]
    assert {send.to for send in asked if isinstance(send.message, ContentRequest)} == {B, C}
    assert {send.message.voter for send in asked if isinstance(send.message, SignedContentRequest)} == {D}


def test_without_evidence_on_disk_a_majority_is_believed_and_one_peer_is_not() -> None:
    page = among_four()
    differing(page)
    said = sentences(page.take_result(SpanRebuilt(span=SPAN), 0.1))
    assert "keeping it unless a majority disagrees" in said
    assert page.catch_up.is_complete()
    differing(page, C)
    assert page.catch_up.is_complete(), "two of four: one may lie, and the other's memory be damaged"
    assert "differs from what a majority holds" in sentences(differing(page, D))
    assert not page.catch_up.is_complete()
    page = among_four()
    for peer in (B, C, D):
        differing(page, peer)
    assert "differs from what a majority holds" in sentences(page.take_result(SpanRebuilt(span=SPAN), 0.1))


def test_a_span_that_advanced_during_the_disk_check_is_checked_again() -> None:
    page = repair()
    differing(page)
    assert page.take_result(SpanRebuilt(span=SPAN, head=head_of(digest=b"older"), state=b"old bytes"), 0.1) == []
    assert RebuildSpan(span=SPAN) in differing(page, now=10.0)


def test_on_a_tie_without_checkpoints_one_of_two_moves_and_later_the_other() -> None:
    mover, other = (A, B) if A > B else (B, A)
    for me, peer, expected in (
        (mover, other, "fetching it from that peer"),
        (other, mover, "the other peer has to move"),
    ):
        page = repair(membership=membership_of(me, founding(), roster_1(2)))
        page.membership.local.set_ready(True)
        differing(page, peer)
        said = sentences(page.take_result(SpanRebuilt(span=SPAN), 0.1))
        assert expected in said, said
    page.begin_round(2 * 8)
    differing(page, mover, now=100.0)
    assert "fetching it from that peer" in sentences(page.take_result(SpanRebuilt(span=SPAN), 100.1))


def answer(page: Repair, *said: Digest, peer: PeerId = B, now: float = 0.0) -> list[type]:
    """Let a peer report the chain digests of fragment 0; return the actions that follow."""
    page.catch_up.verifier.ask_content(0, peer, now)
    actions = page.take(peer, ContentReply(fragment=0, digests=tuple((chain, sha256(b"x")) for chain in said)), now)
    return [type(action.message if isinstance(action, Send) else action) for action in actions]


def test_a_donor_that_has_advanced_is_asked_for_its_heads() -> None:
    """A peer slightly ahead of the only donor compared its contents with what that had left, forever."""
    page, elsewhere = repair(), sha256(b"elsewhere")
    page.linked.add(C)
    assert answer(page, HEAD.digest, HEAD.digest, HEAD.digest) == [CompareContent]
    assert answer(page, HEAD.digest, elsewhere, HEAD.digest) == [CompareContent, HeadsRequest]
    assert answer(page, elsewhere, now=1.0) == [CompareContent], "it was asked a moment ago"
    assert answer(page, elsewhere, peer=C, now=3.0) == [CompareContent], "who is no donor cannot give it"
    assert answer(page, *[HEAD.digest] * 3, elsewhere, now=3.0) == [CompareContent], "there are three spans"
    assert answer(page, elsewhere, now=3.0) == [CompareContent, HeadsRequest]
    page.membership.local.set_ready(True)
    assert answer(page, elsewhere, now=6.0) == [CompareContent], "members get entries from their reducers"


def test_a_donor_at_our_earlier_tip_is_not_asked() -> None:
    page = repair()
    book = page.membership.book
    owner = book.folded(ROSTER.digest(), 0)[1].owner(SPAN)
    assert owner is not None
    page.chains.offer(entry_on(HEAD, ROSTER, owner), 1.0, book, 1000)
    assert page.chains.heads[SPAN] != HEAD
    assert answer(page, HEAD.digest, HEAD.digest, HEAD.digest) == [CompareContent]


def test_contents_are_compared_once_in_a_scrub_period_by_all_in_the_same_round() -> None:
    page = repair()
    page.begin_round(3)
    for peer in (B, C):
        page.catch_up.scrub.compared(peer, 0, 3, [], 0.0, Quorum())
        page.catch_up.scrub.compared(peer, 1, 2, [], 0.0, Quorum())
    page.begin_round(15)
    assert page.catch_up.scrub.is_verified([B, C])
    page.begin_round(16)
    assert not page.catch_up.scrub.is_verified([B, C])


def test_a_peer_proved_reachable_expects_members_that_only_dial_out() -> None:
    rules, me = run_rules(), self_of(A, dialable=False)
    roster = child_of(founding().roster, [member(A), member(B, reduces=False), member(C, reduces=False)])
    book = book_with(founding(), certify(roster, [peer_id("boot")]))
    membership = Membership(me=me, rules=rules, book=book, ballots=NO_BALLOTS, verify=verify, remembers=True)
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    heartbeats = HeartbeatBuilder(rules=rules, membership=membership, chains=chains)
    page = Repair(
        rules=rules, membership=membership, chains=chains, heartbeats=heartbeats, linked={B, C}, verify=verify
    )
    membership.local.set_conditions(Conditions(can_be_dialled=True))
    for peer in (B, C):
        membership.liveness.take(
            heartbeat(peer, roster=roster.digest(), heads=(fragment_head(),), can_be_dialled=False), 0.0
        )
    page.pump(0.0)
    assert page.catch_up.quorums.tips.are_enough([B, C]), "else the only one who can be dialled could never come back"


def test_a_span_that_cannot_follow_an_entry_is_rebuilt_from_disk() -> None:
    page = repair()
    actions = page.take_result(SpanDamaged(span=SPAN, reason="the update holds 0"), 0.0)
    assert actions[1:] == [RebuildSpan(span=SPAN)]
    assert sentences(actions) == (
        f"{SPAN} could not follow an entry: the update holds 0; its memory is damaged, rebuilding it from this disk"
    )
    moved_on = page.take_result(SpanRebuilt(span=SPAN, head=head_of(digest=b"older"), state=b"old bytes"), 0.1)
    assert moved_on == [RebuildSpan(span=SPAN)], "its log has gone on: only bytes at its tip replace it"
    mended = page.take_result(SpanRebuilt(span=SPAN, head=HEAD, state=b"right"), 0.2)
    assert ReplaceSpan(span=SPAN, head=HEAD, state=b"right", is_mended=True) in mended
    assert "was damaged in memory; repaired" in sentences(mended)
    assert page.begin_round(2) == []


def test_a_damaged_span_that_cannot_be_rebuilt_from_disk_is_fetched() -> None:
    page = repair()
    page.take_result(SpanDamaged(span=SPAN, reason="a reason"), 0.0)
    assert "cannot be rebuilt from this disk; fetching it again" in sentences(
        page.take_result(SpanRebuilt(span=SPAN), 0.1)
    )
    assert not page.catch_up.is_complete()


def test_fetching_a_damaged_span_is_retried_every_round() -> None:
    page = repair()
    page.linked.clear()
    page.take_result(SpanDamaged(span=SPAN, reason="a reason"), 0.0)
    assert page.begin_round(1) == [], "the disk is being asked"
    for round_index in (2, 3):
        assert "no peer here can serve it; it stays unchanged" in sentences(
            page.take_result(SpanRebuilt(span=SPAN), 100.0)
        )
        assert page.begin_round(round_index) == [RebuildSpan(span=SPAN)]
    assert ReplaceSpan(span=SPAN, head=HEAD, state=b"right", is_mended=True) in page.take_result(
        SpanRebuilt(span=SPAN, head=HEAD, state=b"right"), 101.0
    )


def test_a_wait_for_a_majority_is_reported_after_a_while_and_rarely() -> None:
    page = among_four(is_ready=False)
    for span in ALL_SPANS:
        page.chains.drop_head(span)
    asked = [one for one in page.pump(0.0) if isinstance(one, Send) and isinstance(one.message, SpanRequest)]
    send = next(one for one in asked if one.message.span == SPAN)  # type: ignore[union-attr]
    whole = SpanReply(span=SPAN, head=head_of(), total_bytes=32, offset=0, piece=bytes(32))
    (order,) = [one for one in page.take(send.to, whole, 0.1) if isinstance(one, HashSpan)]
    said = [sentences(page.take_result(SpanHashed(span=SPAN, head=order.head, content=sha256(b"x")), 0.2))]
    for step in range(1, 12):
        said.append(sentences(page.pump(step * 0.5 * SILENCE)))
    told = [text for text in said if "must name the same state" in text]
    assert len(told) == 1
    assert "of the 3 members whose answers count; 2 must name" in told[0]


def test_a_peer_without_a_roster_accepts_nothing() -> None:
    page = repair(holds=False, membership=membership_of(A))
    assert page.take_result(SpanHashed(span=SPAN, head=head_of(), content=sha256(b"x")), 0.0) == []


def damaged_for_good(page: Repair) -> None:
    page.membership.local.set_ready(True)
    page.take_result(SpanDamaged(span=SPAN, reason="a reason"), 0.0)
    page.take_result(SpanRebuilt(span=SPAN), 0.1)


def test_a_damaged_span_of_one_of_two_members_is_fetched_from_the_other() -> None:
    page, state = repair(), bytes(BYTES_PER_ELEMENT_OF_STATE * run_rules().span_elements[SPAN])
    damaged_for_good(page)
    piece = SpanReply(span=SPAN, head=HEAD, total_bytes=len(state), offset=0, piece=state)
    actions = page.take(B, piece, 0.2)
    assert HashSpan in map(type, actions)
    page.take_result(SpanHashed(span=SPAN, head=HEAD, content=sha256(b"x")), 0.3)
    said = tuple((HEAD.digest, sha256(b"x")) for _ in range(run_rules().num_spans[0]))
    replaced = page.take(B, ContentReply(fragment=0, digests=said), 0.4)
    assert ReplaceSpan in map(type, replaced), "of two a majority would be both"
    assert page.begin_round(1) == []


def test_a_damaged_span_with_an_abandoned_transfer_is_retried_in_the_next_round() -> None:
    page = repair()
    damaged_for_good(page)
    assert page.begin_round(1) == [], "it is being fetched"
    page.catch_up.differences.stop_waiting()
    assert page.begin_round(2) == [RebuildSpan(span=SPAN)]


def test_adopting_a_branch_continues_when_the_clock_is_set_back() -> None:
    """Otherwise this peer would continue with what it has given up, and report it to others."""
    page = repair()
    page.adopt_branch()
    page.set_back(0.0)
    assert page.closed_heads(0.0) == ()
    assert page.catch_up.differences.left_out() is None


def test_a_damaged_span_stays_damaged_when_the_clock_is_set_back() -> None:
    page = repair()
    page.take_result(SpanDamaged(span=SPAN, reason="a reason"), 0.0)
    page.set_back(0.0)
    assert ReplaceSpan(span=SPAN, head=HEAD, state=b"right", is_mended=True) in page.take_result(
        SpanRebuilt(span=SPAN, head=HEAD, state=b"right"), 0.1
    )
