"""Contents of unlinked voters: signed for one asker, forwarded by others, and sufficient only as a majority."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from fake_run import ALL_SPANS, RUN, peer_id, run_rules, sign_as, verify
from fetching import ME, NEW, C, catch_up, hashed, indirect_voters, piece, quorum, what_is_fetched
from made import (
    SPAN,
    child_of,
    founding,
    fragment_head,
    head_of,
    heartbeat,
    ids,
    member,
    membership_of,
    roster_1,
    roster_of,
)

from p2p_diloco.ids import Digest, PeerId, sha256
from p2p_diloco.protocol.actions import Action, CompareContent, ReplaceSpan, Report, Send, ServeContent
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.heartbeats import HeartbeatBuilder
from p2p_diloco.protocol.repair.catch_up import CatchUp
from p2p_diloco.protocol.repair.quorum import Contacts, Quorum, content_quorum
from p2p_diloco.protocol.repair.repair import Repair
from p2p_diloco.protocol.repair.reports import ContentReports
from p2p_diloco.protocol.repair.signed_content import Relay
from p2p_diloco.protocol.results import ContentCompared
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.messages import ContentReply, HeadsReply, Message, SignedContent, SignedContentRequest
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster

ANN, BOB, CAT, DAN, EVE, FAY = ids(6)
JOINER = peer_id("joiner")
PAIR = (sha256(b"chain"), sha256(b"content"))


def question(
    voter: PeerId = BOB, requester: PeerId = JOINER, *, fragment: int = 0, nonce: int = 7
) -> SignedContentRequest:
    return SignedContentRequest(fragment=fragment, voter=voter, requester=requester, nonce=nonce)


def answer(
    to: SignedContentRequest, *, digests: tuple[tuple[Digest, Digest], ...] = (PAIR,), roster: Digest | None = None
) -> SignedContent:
    unsigned = SignedContent(
        fragment=to.fragment,
        voter=to.voter,
        requester=to.requester,
        nonce=to.nonce,
        roster=roster if roster is not None else roster_of(5).digest(),
        digests=digests,
        signature=bytes(64),
    )
    return signed(unsigned)


def signed(unsigned: SignedContent) -> SignedContent:
    return replace(unsigned, signature=sign_as(unsigned.voter, unsigned.statement(RUN)))


# -- forwarding


def test_a_request_is_forwarded_and_its_answer_returned_once() -> None:
    relay = Relay(seconds=2.0)

    def forward(asked: SignedContentRequest, now: float) -> PeerId | None:
        return relay.forward(JOINER, asked, [asked.voter], now)

    assert not relay.bring_back(BOB, answer(question()), 0.0), "nobody asked"
    assert forward(question(), 0.0) == BOB
    assert forward(question(nonce=8), 1.9) is None, "one at a time"
    assert forward(question(fragment=1), 1.9) == BOB
    assert forward(question(CAT), 1.9) == CAT
    assert not relay.bring_back(CAT, answer(question()), 1.9), "it does not come from whom it went to"
    assert not relay.bring_back(BOB, answer(question(nonce=8)), 1.9), "to another question"
    assert relay.bring_back(BOB, answer(question()), 1.9) == [JOINER]
    assert not relay.bring_back(BOB, answer(question()), 1.9)
    assert forward(question(nonce=9), 1.9) is None, "nor too often"
    assert forward(question(nonce=9), 2.0) == BOB
    assert relay.bring_back(BOB, answer(question(nonce=9)), 9.9) == [JOINER], "it had much to do"
    assert forward(question(nonce=10), 10.0) == BOB
    assert not relay.bring_back(BOB, answer(question(nonce=10)), 18.0), "it is too late"


def test_a_repeated_request_takes_another_route() -> None:
    relay = Relay(seconds=2.0)
    assert relay.forward(JOINER, question(), [], 0.0) is None
    ways = [relay.forward(JOINER, question(nonce=6), [ANN, CAT], now) for now in (0.0, 2.0, 4.0)]
    assert ways == [ANN, CAT, ANN]
    assert relay.forward(DAN, question(nonce=6), [ANN], 4.0) == ANN
    assert relay.bring_back(ANN, answer(question(nonce=6)), 4.1) == [JOINER, DAN], "whom it was carried for"


def test_an_answer_counts_even_if_its_request_has_since_taken_another_route() -> None:
    """Otherwise a voter that answers more slowly than the request is repeated would never be heard."""
    relay = Relay(seconds=2.0)
    for now in (0.0, 2.0):
        relay.forward(JOINER, question(nonce=6), [ANN, CAT], now)
    assert relay.bring_back(ANN, answer(question(nonce=6)), 2.1) == [JOINER]
    assert relay.bring_back(ANN, answer(question(nonce=6)), 2.1) == [], "one for each time that it went there"
    assert relay.bring_back(CAT, answer(question(nonce=6)), 2.2) == [JOINER], "what came before may be forged"
    assert relay.forward(JOINER, question(nonce=6), [ANN, CAT], 4.0) == ANN
    assert relay.forward(JOINER, question(nonce=6), [ANN, CAT], 11.9) == CAT
    assert relay.bring_back(ANN, answer(question(nonce=6)), 12.0) == [], "it is too late"
    assert relay.forward(JOINER, question(nonce=8), [ANN], 14.0) == ANN
    assert relay.bring_back(CAT, answer(question(nonce=6)), 14.1) == [], "to another question"


def test_old_forwarded_requests_are_dropped() -> None:
    relay = Relay(seconds=2.0)
    before = sys.getrefcount(BOB)
    for fragment in range(200):
        relay.forward(JOINER, question(fragment=fragment), [BOB], 0.0)
    for fragment in range(200, 1000):
        relay.forward(JOINER, question(fragment=fragment), [BOB], 8.0)
    assert not relay.bring_back(BOB, answer(question(fragment=0)), 8.0)
    num_kept = (sys.getrefcount(BOB) - before) // 2  # as the voter, and as the peer that the question was sent to
    assert 800 <= num_kept <= 801


# -- requests


def test_a_request_goes_through_more_and_more_peers_until_it_is_answered() -> None:
    far = indirect_voters(what_is_fetched(SPAN))
    carriers = ids(5)
    asked = far.ask([0], [BOB], carriers, 0.0)
    assert [carrier for carrier, _ in asked] == carriers[1:3], "whom it begins with follows from its number"
    assert not far.have_all_been_asked([BOB], 2.0)
    assert far.ask([0], [BOB], carriers, 1.9) == []
    again = far.ask([0], [BOB], carriers, 2.0)
    assert {carrier for carrier, _ in again} == set(carriers) - {carriers[0]}
    assert {carrier for carrier, _ in far.ask([0], [BOB], carriers, 4.0)} == set(carriers)
    assert not far.have_all_been_asked([BOB], 5.9)
    assert far.have_all_been_asked([BOB], 6.0)
    assert not far.have_all_been_asked([BOB, CAT], 6.0)
    assert far.ask([0], [BOB], [], 6.0) == []
    (request,) = {message for _, message in asked + again}
    assert request == question(requester=ME, nonce=request.nonce), "it keeps its number"
    reply = answer(request)
    assert far.expects(reply)
    assert not far.expects(answer(question(requester=ME, nonce=request.nonce + 1)))
    assert not far.expects(answer(request, digests=(PAIR, PAIR))), "it does not fit the run"
    assert not far.expects(answer(question(fragment=9)))
    assert far.take(reply, 6.0) == 0.0
    assert not far.expects(reply)
    assert far.signed(6.0, holds=True) == [BOB]
    assert far.signed(6.1, holds=True) == [], "it is too old"
    assert far.signed(0.0, holds=False) == []
    assert far.ask([0], [BOB], carriers, 7.9) == [], "it has just said it"
    ((_, later), _) = far.ask([0], [BOB], carriers, 8.0)
    assert later.nonce != request.nonce
    far.take(answer(later, digests=()), 8.1)
    assert far.have_all_been_asked([BOB], 8.1), "it was answered"
    assert far.rosters == {BOB: (roster_of(5).digest(), 8.1)}
    ((_, third),) = far.ask([0], [BOB], carriers[:1], 20.0)
    ((_, same),) = far.ask([0], [BOB], carriers[:1], 28.0)
    ((_, fourth),) = far.ask([0], [BOB], carriers[:1], 31.0)
    assert same == third
    assert fourth.nonce != third.nonce, "an answer that somebody has kept is worth nothing"
    assert far.signed(0.0, holds=False) == [BOB]
    assert far.signed(0.0, holds=True) == []


# -- answers that count


def electorate(
    roster: Roster,
    me: PeerId = JOINER,
    *,
    holders: tuple[PeerId, ...] = (),
    ready: tuple[PeerId, ...] = (),
    signed: tuple[PeerId, ...] = (),
    empty: tuple[PeerId, ...] = (),
    signed_empty: tuple[PeerId, ...] = (),
    gone: tuple[PeerId, ...] = (),
    has_waited: bool = False,
    is_parted: bool = False,
    group_size: int = 16,
    is_ready: bool = False,
) -> Quorum:
    contacts = Contacts(
        me=me,
        can_be_dialled=True,
        is_ready=is_ready,
        roster=roster,
        grid=fold_roster(roster, group_size),
        founder=peer_id("boot"),
        gone=gone,
        linked=holders,
        holders=holders,
        ready=ready,
        empty=empty,
    )
    return content_quorum(
        contacts,
        quorum(*holders),
        has_waited=has_waited,
        is_parted=is_parted,
        signed=signed,
        signed_empty=signed_empty,
    )


@pytest.mark.parametrize(("num_voters", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_joiner_needs_more_than_half_of_the_electorate_whoever_it_is_linked_with(
    num_voters: int, needed: int
) -> None:
    roster = roster_of(num_voters)
    found = electorate(roster, holders=(ANN,), signed=(BOB, CAT, DAN, EVE))
    assert found.needed == needed
    assert found.indirect == set(ids(num_voters)) - {ANN}
    assert found.are_enough(ids(num_voters)[:needed])
    assert not found.are_enough(ids(num_voters)[: needed - 1])
    assert not found.is_few


def test_a_linked_voter_is_asked_directly() -> None:
    found = electorate(roster_of(3), holders=(ANN,), signed=(ANN, BOB))
    assert found.signed == {BOB}
    assert found.relays == (ANN,)


def test_voters_that_report_no_state_are_not_waited_for() -> None:
    found = electorate(roster_of(3), holders=(ANN,), empty=(BOB, CAT))
    assert found.are_enough([ANN])
    assert electorate(roster_of(3), holders=(DAN,), empty=(ANN, BOB, CAT)) == quorum(DAN), "then all members count"
    assert electorate(roster_of(3), holders=(ANN,), gone=(BOB, CAT)).are_enough([ANN])


def test_a_member_of_a_grid_relies_on_its_row_and_column() -> None:
    assert electorate(roster_of(5), ANN, holders=(BOB,), group_size=2) == quorum(BOB)
    assert electorate(roster_of(5), JOINER, holders=(BOB,), group_size=2).needed == 3


def test_after_a_stall_a_peer_relies_on_those_it_could_ask_and_reports_it() -> None:
    early = electorate(roster_of(5), holders=(ANN,), signed=(BOB,))
    assert not early.are_enough([ANN, BOB])
    late = electorate(roster_of(5), holders=(ANN,), signed=(BOB,), has_waited=True)
    assert late.is_few
    assert late.are_enough([ANN, BOB])
    assert not late.are_enough([ANN])
    assert "most voters could not be reached, or lack the state themselves" in late.sentence_of_few()
    assert "2 of them must agree" in late.sentence_of_few()
    one = electorate(roster_of(5), holders=(ANN,), has_waited=True)
    assert one.is_few
    assert one.are_enough([ANN]), "as before: who hears one goes by it"
    assert "nobody" in electorate(roster_of(5), has_waited=True).sentence_of_few()
    enough = electorate(roster_of(5), holders=(ANN,), signed=(BOB, CAT), has_waited=True)
    assert not enough.is_few
    assert enough.needed == 3
    member = electorate(roster_of(5), EVE, holders=(ANN,), signed=(BOB,), has_waited=True)
    assert member.needed == quorum(ANN).needed


def test_with_too_few_ready_voters_a_member_relies_on_its_voices_after_waiting() -> None:
    """Most voters came back with old disks, and no peer has the entries since."""
    three = (ANN, BOB, CAT)
    assert not electorate(roster_of(4), DAN, holders=three, ready=(ANN,)).is_few
    late = electorate(roster_of(4), DAN, holders=three, ready=(ANN,), has_waited=True)
    assert late.is_few
    assert (late.witnesses, late.holders, late.needed) == (set(three), set(three), quorum(*three).needed)
    told = electorate(roster_of(4), DAN, holders=(ANN, BOB), signed=(CAT,), ready=(ANN,), has_waited=True)
    assert not told.is_few, "what a voter has signed it holds as the agreed state"
    nobody = electorate(roster_of(4), DAN, holders=three, has_waited=True)
    assert nobody.needed == 2
    assert not nobody.is_few, "after a power cut all wait"
    outside = electorate(roster_of(3), holders=three, ready=(ANN,), has_waited=True)
    assert outside.needed == 2
    assert not outside.is_few


def test_an_unready_voter_does_not_lower_the_majority() -> None:
    heard = (ANN, BOB, CAT, DAN)
    for ready in (heard, (BOB, CAT, DAN)):
        found = electorate(roster_of(5), EVE, holders=heard, ready=ready, has_waited=True)
        assert found.needed == 3
        assert not found.is_few
    two = electorate(roster_of(6), FAY, holders=(*heard, EVE), ready=(CAT, DAN, EVE), has_waited=True)
    assert not two.are_enough([ANN, BOB]), "two that say that they wait, against three that are ready"


def test_requests_are_forwarded_by_voters_before_other_members() -> None:
    whole = child_of(founding().roster, [member(ANN, counts=False), member(BOB), member(CAT), member(DAN)])
    assert electorate(whole, holders=(ANN, CAT, DAN)).relays[-1] == ANN


def test_answers_over_a_link_take_precedence_over_signed_ones() -> None:
    """A voter that signs that it holds nothing, and then links and reports that it does, is not counted twice."""
    liars = (CAT, DAN)
    found = electorate(roster_of(5), holders=(ANN, *liars), signed_empty=liars)
    assert found.needed == 3
    assert not found.are_enough(liars)
    assert electorate(roster_of(5), holders=(ANN,), signed_empty=liars).needed == 2


def test_a_ready_member_counts_itself_and_never_relies_on_a_few() -> None:
    found = electorate(roster_of(4), ANN, holders=(BOB,), signed=(CAT, DAN), is_ready=True, has_waited=True)
    assert found.needed == 3
    assert not found.is_few
    assert not found.is_strict
    assert found.are_enough([BOB, CAT, DAN])
    outside = electorate(roster_of(4), JOINER, holders=(BOB,), is_ready=True, has_waited=True)
    assert outside.needed == 3
    assert outside.is_strict


@pytest.mark.parametrize(("num_voters", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_ready_member_that_has_no_vote_follows_more_than_half_of_the_electorate(num_voters: int, needed: int) -> None:
    """It demanded two of one voter, so after a split it stayed on its own line for good, and reported ready."""
    voters = ids(num_voters)
    listed = child_of(founding().roster, [*(member(voter) for voter in voters), member(JOINER, counts=False)])
    found = electorate(listed, holders=(ANN,), signed=voters, is_ready=True, is_parted=True)
    assert found.needed == needed
    assert found.are_enough(voters[:needed])
    assert not found.are_enough(voters[: needed - 1])


def test_a_span_is_accepted_if_a_majority_named_it_through_others() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(quorum(C), electorate(roster_of(5), holders=(CAT,)))
    fetch.pump([CAT], 0.0)
    waiting = hashed(fetch, fetch.fetcher.take_piece(CAT, piece(), 1.0), 1.0)
    asked = [send.message for send in fetch.pump([CAT], 1.0) if isinstance(send, Send)]
    questions = [message for message in asked if isinstance(message, SignedContentRequest)]
    assert {message.voter for message in questions} == {ANN, BOB, DAN, EVE}
    assert not any(isinstance(action, ReplaceSpan) for action in waiting)
    pairs = ((piece().head.digest, sha256(b"content", b"12345678")),)
    assert not any(
        isinstance(action, ReplaceSpan)
        for action in fetch.verifier.take_content(CAT, ContentReply(fragment=0, digests=pairs), 2.0)
    )
    taken: list[Action] = []
    for message in questions[:2]:
        fetch.verifier.take_signed(answer(message, digests=pairs), 2.0)
        told = tuple(fetch.indirect.signed(0.0, holds=True))
        fetch.quorums.set(quorum(C), electorate(roster_of(5), holders=(CAT,), signed=told))
        taken = fetch.verifier.settle_fragment(0, 2.0)
    assert any(isinstance(action, ReplaceSpan) for action in taken)


# -- requests and answers of a whole `Repair`


def page_of(
    me: PeerId,
    *,
    holds: bool,
    linked: set[PeerId],
    rosters: tuple[CertifiedRoster, ...] = (founding(), roster_1(5)),
) -> Repair:
    rules = run_rules()
    membership = membership_of(me, *rosters)
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    for span in ALL_SPANS if holds else ():
        chains.set_head(span, head_of())
    page = Repair(
        rules=rules,
        membership=membership,
        chains=chains,
        heartbeats=HeartbeatBuilder(rules=rules, membership=membership, chains=chains),
        linked=linked,
        verify=verify,
    )
    if holds:
        page.serving.hold_state()
    roster = roster_1(5).roster.digest()
    for peer in sorted(linked - {JOINER}):
        membership.liveness.take(heartbeat(peer, roster=roster, heads=(fragment_head(), fragment_head())), 0.0)
    return page


def sent(actions: list[Action]) -> list[tuple[PeerId, Message]]:
    return [(action.to, action.message) for action in actions if isinstance(action, Send)]


def test_a_voter_signs_what_it_holds_or_that_it_holds_nothing() -> None:
    (serve,) = page_of(BOB, holds=True, linked={ANN}).take(ANN, question(), 0.0)
    assert serve == ServeContent(to=ANN, fragment=0, question=question())
    page = page_of(BOB, holds=False, linked={ANN})
    (((to, said)),) = sent(page.take(ANN, question(), 0.0))
    assert to == ANN
    assert isinstance(said, SignedContent)
    assert said == answer(question(), digests=())
    assert verify(BOB, said.statement(RUN), said.signature)
    assert page.take(ANN, question(fragment=99), 0.0) == []
    adopting = page_of(BOB, holds=True, linked={ANN})
    adopting.adopt_branch()
    assert adopting.take(ANN, question(), 0.0) == [], "soon it holds something else"
    unknowing = page_of(BOB, holds=False, linked={ANN}, rosters=())
    (((_, early)),) = sent(unknowing.take(ANN, question(), 0.0))
    assert isinstance(early, SignedContent)
    assert early.roster == bytes(32)


def test_a_peer_linked_with_both_forwards_request_and_answer() -> None:
    page = page_of(ANN, holds=True, linked={BOB, JOINER})
    assert sent(page.take(EVE, question(CAT), 0.0)) == [], "it has no link to that voter, and another one asks"
    assert sent(page.take(JOINER, question(), 0.0)) == [(BOB, question())]
    assert sent(page.take(BOB, answer(question()), 0.1)) == [(JOINER, answer(question()))]
    assert sent(page.take(BOB, answer(question()), 0.1)) == []
    page.take(JOINER, question(), 0.0)
    page.linked.discard(JOINER)
    assert sent(page.take(BOB, answer(question()), 0.1)) == []


def test_a_peer_not_linked_with_the_voter_forwards_to_one_that_should_be() -> None:
    page, mate = page_of(ANN, holds=True, linked={CAT, JOINER}), page_of(CAT, holds=True, linked={ANN, BOB, JOINER})
    assert sent(page.take(JOINER, question(), 0.0)) == [(CAT, question())]
    assert sent(mate.take(JOINER, question(requester=ANN), 0.0)) == [], "a stranger asks for itself alone"
    assert sent(mate.take(ANN, question(), 0.0)) == [(BOB, question())]
    assert sent(mate.take(BOB, answer(question()), 0.1)) == [(ANN, answer(question()))]
    assert sent(page.take(CAT, answer(question()), 0.2)) == [(JOINER, answer(question()))]
    mate.linked.discard(BOB)
    assert sent(mate.take(ANN, question(), 9.0)) == [], "two steps are enough"
    boot = peer_id("boot")
    assert sent(page.take(boot, question(requester=JOINER), 0.0)) == [], "two steps, whoever asks"
    page.linked.add(BOB)
    assert sent(page.take(boot, question(requester=JOINER), 0.0)) == [(BOB, question())], (
        "who founded need be no member"
    )
    alone = page_of(ANN, holds=False, linked={CAT, JOINER}, rosters=())
    assert sent(alone.take(JOINER, question(), 0.0)) == []


def test_only_requests_to_voters_are_forwarded() -> None:
    """Names cost nothing: made-up ones could use up the forwarding budget that a peer has for all."""
    page = page_of(ANN, holds=True, linked={CAT, JOINER})
    assert sent(page.take(JOINER, question(peer_id("made up")), 0.0)) == []
    assert sent(page.take(JOINER, question(peer_id("boot")), 0.0)) != [], "it votes by the roster before"
    first = page_of(peer_id("boot"), holds=True, linked={CAT, JOINER}, rosters=(founding(),))
    assert sent(first.take(JOINER, question(), 0.0)) == []


def test_an_answer_that_is_unsigned_or_of_another_line_does_not_count() -> None:
    page = page_of(JOINER, holds=False, linked={ANN})
    ((_, asked),) = page.catch_up.indirect.ask([0], [BOB], [ANN], 0.0)
    whole = (PAIR,) * page.rules.num_spans[0]
    forged = replace(answer(asked, digests=whole), digests=((PAIR[0], sha256(b"false")),) * len(whole))
    for useless in (
        forged,
        answer(asked, digests=whole, roster=sha256(b"another line")),
        answer(question(nonce=asked.nonce + 1), digests=whole),
    ):
        assert page.take(ANN, useless, 0.1) == []
        assert page.catch_up.indirect.signed(0.0, holds=True) == []
    page.take(ANN, answer(asked, digests=whole), 0.1)
    assert page.catch_up.indirect.signed(0.0, holds=True) == [BOB]


def test_a_signed_answer_shows_which_roster_its_voter_follows_though_it_is_unknown_here() -> None:
    page = page_of(JOINER, holds=False, linked={ANN})
    ((_, asked),) = page.catch_up.indirect.ask([0], [BOB], [ANN], 0.0)
    unknown = sha256(b"roster 3")
    whole = (PAIR,) * page.rules.num_spans[0]
    forged = replace(answer(asked, digests=whole, roster=sha256(b"forged")), signature=bytes(64))
    assert page.take(ANN, forged, 0.1) == []
    assert page.catch_up.indirect.rosters == {}
    assert page.take(ANN, answer(asked, digests=whole, roster=unknown), 0.1) == []
    assert page.catch_up.indirect.rosters == {BOB: (unknown, 0.1)}
    assert page.catch_up.indirect.signed(0.0, holds=True) == [], "its digests do not count"


def test_relying_on_a_few_is_reported_once() -> None:
    page = page_of(JOINER, holds=False, linked={ANN})
    page.catch_up.fetcher.want_everything()
    page.pump(0.0)
    reply = piece(total=page.catch_up.rules.span_bytes[SPAN], body=b"x" * 8, head=head_of())
    page.take(ANN, reply, 0.0)
    stall = page.rules.stalled_cycles * page.rules.cycle_seconds
    said = []
    for sequence, now in enumerate((stall - 0.1, stall, stall + 0.1), 2):
        roster = roster_1(5).roster.digest()
        beat = heartbeat(ANN, roster=roster, heads=(fragment_head(), fragment_head()), sequence=sequence)
        page.membership.liveness.take(beat, now)
        reports = [action for action in page.pump(now) if isinstance(action, Report)]
        said.append([report.text for report in reports if "relying on" in report.text])
    assert [len(texts) for texts in said] == [0, 1, 0]


def named_by(pairs: tuple[tuple[Digest, Digest], ...], voters: tuple[PeerId, ...], fetch: CatchUp, now: float) -> None:
    """Let linked voters name the bytes of what is fetched."""
    fetch.pump([], now)
    for voter in voters:
        fetch.verifier.take_content(voter, ContentReply(fragment=0, digests=pairs), now)


TRUE, FALSE = (((piece().head.digest, sha256(b"content", state)),) for state in (b"12345678", b"FALSEISH"))


def test_a_few_cannot_override_a_majority_of_the_electorate() -> None:
    """A donor may delay the rest of a span until all signed answers are old."""
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(quorum(CAT), electorate(roster_of(5), holders=(CAT, DAN, EVE)))
    fetch.pump([DAN], 0.0)
    fetch.fetcher.take_piece(DAN, piece(body=b"FALS"), 1.0)
    questions = [send.message for send in fetch.pump([DAN], 1.0) if isinstance(send, Send)]
    named_by(FALSE, (DAN, EVE), fetch, 1.0)
    named_by(TRUE, (CAT,), fetch, 1.0)
    for message in {message for message in questions if isinstance(message, SignedContentRequest)}:
        fetch.verifier.take_signed(answer(message, digests=TRUE), 1.5)
    told = tuple(fetch.indirect.signed(0.0, holds=True))
    assert set(told) == {ANN, BOB}
    fetch.quorums.set(quorum(CAT), electorate(roster_of(5), holders=(CAT, DAN, EVE), signed=told))
    fetch.verifier.settle_fragment(0, 1.5)
    assert not fetch.lacks_names
    few = electorate(roster_of(9), holders=(CAT, DAN, EVE), has_waited=True)
    assert few.is_few
    fetch.quorums.set(quorum(CAT), few)
    named_by(FALSE, (DAN, EVE), fetch, 50.0)
    actions = hashed(fetch, fetch.fetcher.take_piece(DAN, piece(4, body=b"EISH"), 51.0), 51.0)
    assert not any(isinstance(action, ReplaceSpan) for action in actions)
    assert any(isinstance(action, Report) and "other bytes" in action.text for action in actions)


def test_a_span_named_by_a_few_is_checked_again_once_more_can_be_asked() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(quorum(CAT), electorate(roster_of(5), holders=(DAN, EVE), has_waited=True))
    fetch.pump([DAN], 0.0)
    fetch.fetcher.take_piece(DAN, piece(body=b"FALS"), 1.0)
    named_by(FALSE, (DAN, EVE), fetch, 1.0)
    assert fetch.lacks_names, "it goes on asking"
    fetch.quorums.set(quorum(CAT), electorate(roster_of(5), holders=(DAN, EVE), signed=(ANN,), has_waited=True))
    actions = hashed(fetch, fetch.fetcher.take_piece(DAN, piece(4, body=b"EISH"), 2.0), 2.0)
    assert not any(isinstance(action, ReplaceSpan) for action in actions)


def test_a_non_member_never_believes_a_single_peer() -> None:
    fetch, _ = catch_up()
    fetch.fetcher.want_everything()
    fetch.quorums.set(quorum(CAT), electorate(roster_of(3), holders=(CAT,)))
    fetch.differences.yield_to(SPAN, CAT)
    fetch.pump([CAT], 0.0)
    actions = hashed(fetch, fetch.fetcher.take_piece(CAT, piece(), 1.0), 1.0)
    named_by(TRUE, (CAT,), fetch, 1.0)
    assert not any(isinstance(action, ReplaceSpan) for action in actions + fetch.verifier.settle_fragment(0, 1.0))


def test_an_unready_peer_compares_signed_contents_with_its_own() -> None:
    """Two donors may lie; more than half of the electorate is enough, wherever it is."""
    page = page_of(JOINER, holds=True, linked={ANN})
    page.catch_up.quorums.set(quorum(ANN), electorate(roster_of(5), holders=(ANN,)))
    asked = {message for _, message in page.catch_up.indirect.ask([0, 1], [BOB, CAT], [ANN], 0.0)}
    for message in sorted(asked, key=lambda message: (message.voter, message.fragment)):
        whole = (PAIR,) * page.rules.num_spans[message.fragment]
        actions = page.take(ANN, answer(message, digests=whole), 0.1)
        (order,) = [action for action in actions if isinstance(action, CompareContent)]
        assert (order.peer, order.link, order.digests) == (message.voter, ANN, whole)
        page.take_result(
            ContentCompared(peer=order.peer, fragment=order.fragment, num_equal=len(whole), differing=()), 0.1
        )
    for fragment in (0, 1):
        page.take_result(
            ContentCompared(peer=ANN, fragment=fragment, num_equal=page.rules.num_spans[fragment], differing=()), 0.1
        )
    scrub, voters = page.catch_up.scrub, electorate(roster_of(5), holders=(ANN,), signed=(BOB, CAT))
    assert scrub.is_verified([DAN, EVE], voters)
    assert not scrub.is_verified([DAN, EVE])
    few = electorate(roster_of(9), holders=(ANN,), signed=(BOB, CAT), has_waited=True)
    assert few.is_few
    assert not scrub.is_verified([DAN, EVE], few)


def test_a_ready_member_that_reaches_one_voter_follows_what_the_others_have_signed() -> None:
    """Behind a router it is linked with the bootstrap alone; its log cannot be joined with theirs."""
    fetch, chains = catch_up()
    chains.set_head(SPAN, head_of())
    fetch.quorums.set(replace(quorum(CAT), needed=2), electorate(roster_of(4), ANN, holders=(CAT,), is_ready=True))
    asks = fetch.differences.ask_tips(0, CAT, 0.0)
    assert asks
    reply = HeadsReply(fragment=0, heads=(NEW,))
    assert fetch.differences.take_tips(CAT, reply)
    fetch.differences.compare_tips(CAT, reply, 0.0)
    fetch.pump([CAT], 0.0)
    fetch.differences.entry_absent(CAT, SPAN, head_of().digest, 0.1)
    assert fetch.differences.is_parted
    questions = [send.message for send in fetch.pump([CAT], 0.2) if isinstance(send, Send)]
    for message in {message for message in questions if isinstance(message, SignedContentRequest)}:
        fetch.verifier.take_signed(answer(message, digests=((NEW.digest, sha256(b"content")),)), 0.3)
    told = tuple(fetch.indirect.signed(0.0, holds=True))
    fetch.quorums.set(
        replace(quorum(CAT), needed=2), electorate(roster_of(4), ANN, holders=(CAT,), signed=told, is_ready=True)
    )
    fetch.differences.ask_tips(0, CAT, 10.0)
    assert fetch.differences.take_tips(CAT, reply)
    reports = [action for action in fetch.differences.compare_tips(CAT, reply, 10.0) if isinstance(action, Report)]
    assert [report.topic for report in reports] == ["adoption"]
    assert fetch.fetcher.is_transferred(SPAN)


def test_the_later_answer_of_a_voter_is_kept() -> None:
    page = ContentReports(answer_seconds=4.0, pause_seconds=2.0)
    later, earlier = ((sha256(b"chain"), sha256(content)) for content in (b"later", b"earlier"))
    page.note(BOB, 0, (later,), 5.0)
    page.note(BOB, 0, (earlier,), 4.0)
    assert page.latest(SPAN) == {BOB: later}


def test_a_fragment_with_a_missing_span_is_adopted_if_a_majority_names_its_tip() -> None:
    fetch, chains = catch_up()
    fetch.adopt()
    fetch.quorums.set(quorum(CAT))
    fetch.differences.ask_tips(0, CAT, 0.0)
    reply = HeadsReply(fragment=0, heads=(NEW,))
    assert fetch.differences.take_tips(CAT, reply)
    fetch.differences.compare_tips(CAT, reply, 0.0)
    fetch.fetcher.clear()
    assert not fetch.is_complete(), "the span itself is still missing"
    chains.set_head(SPAN, NEW)
    assert fetch.is_complete()
