"""Presence in a round, and what an opening reports about the spans that are sent and held back."""

from __future__ import annotations

from dataclasses import replace

from exchanges import ANN, BOB, HEAD, SPANS, contribution, exchange, feed, owned, refusals, sent_openings, words
from fake_run import ROUND_SECONDS, RUN, peer_id, run_rules
from made import certify, change, child_of, founding, head_of, ids, member, membership_of, roster_of

from p2p_diloco.ids import Digest, PeerId, SpanId, short_peer_id
from p2p_diloco.protocol.actions import ReduceSpan, Report, RequestContribution, Send
from p2p_diloco.protocol.round.exchange import Exchange
from p2p_diloco.protocol.round.round import contribution_messages
from p2p_diloco.protocol.wire.entry import Entry, included_places, places_in
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.messages import Opening, SpanVector, decode_message, encode_message


def in_order(opening: Opening, vectors: tuple[SpanVector, ...]) -> tuple[Opening | SpanVector, ...]:
    return opening, *vectors


def test_openings_are_sent_before_all_vectors() -> None:
    rounds, _ = exchange(3)
    rounds.begin(0, True)
    kinds = [type(a.message) for a in rounds.contribute(contribution(), 1.0) if isinstance(a, Send)]
    assert kinds == [Opening] * 2 + [SpanVector] * 2


def test_unsent_spans_are_named_with_their_tip_unless_their_log_has_reached_the_round() -> None:
    rounds, chains = exchange(3)
    rounds.begin(0, True)
    (here,) = owned(rounds)
    there, ahead = (span for span in SPANS if span != here)
    chains.set_head(there, head_of(digest=b"another place"))
    chains.set_head(ahead, head_of(round_index=0))
    (opening,) = sent_openings(rounds.contribute(contribution(spans=(here,)), 1.0)).values()
    (offer,) = opening.spans
    assert (offer.index, offer.parent, offer.sends, offer.norm) == (there.index, chains.heads[there].digest, False, 0.0)
    assert rounds.collection is not None
    (own,) = rounds.collection.openings[ANN].spans
    assert (own.index, own.parent, own.sends, own.norm) == (here.index, HEAD.digest, True, 1.0)


def test_a_span_that_this_peer_does_not_hold_is_not_named() -> None:
    rounds, chains = exchange(2)
    rounds.begin(0, True)
    for span in SPANS:
        chains.drop_head(span)
    assert sent_openings(rounds.contribute(contribution(spans=owned(rounds)), 1.0)) == {}


def opened(rounds: Exchange, held_back: tuple[SpanId, ...], num_members: int = 3) -> Opening:
    parents = dict.fromkeys(held_back, HEAD.digest)
    return contribution_messages(contribution(spans=()), (), roster_of(num_members).digest(), 1, parents)[0]


def test_a_vector_that_was_not_announced_is_ignored() -> None:
    rounds, _ = exchange(3)
    rounds.begin(0, True)
    assert rounds.collection is not None
    rounds.take(BOB, opened(rounds, owned(rounds)), 1.0)
    for vector in words(contribution(spans=owned(rounds)), 3)[1]:
        assert rounds.take(BOB, vector, 1.0) == []
    assert rounds.collection.payloads == {}


def test_the_mean_is_taken_at_once_after_the_last_opening_without_vectors() -> None:
    rounds, _ = exchange(3)
    rounds.begin(0, True)
    third = next(peer for peer in ids(3) if peer not in (ANN, BOB))
    given, mine = contribution(spans=owned(rounds)), owned(rounds)
    opening, vectors = words(given, 3)
    for word in in_order(opening, vectors):
        assert rounds.take(ANN, word, 1.0) == []
    assert rounds.take(BOB, opened(rounds, mine), 1.1) == []
    orders = rounds.take(third, opened(rounds, mine), 1.2)
    assert [(order.span, [part.peer for part in order.parts]) for order in orders if isinstance(order, ReduceSpan)] == [
        (span, [ANN]) for span in mine
    ]
    assert isinstance(orders[0], ReduceSpan)
    entry = rounds.span_reduced(orders[0], frozenset({ANN}), b"mean")
    assert isinstance(entry, Entry)
    assert (entry.present, len(entry.weights)) == (b"\7", 1)


def test_a_stalled_vector_holds_a_span_until_the_deadline_and_its_sender_is_present() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, False)
    given = contribution(spans=owned(rounds))
    feed(rounds, ANN, given, 1.0)
    assert rounds.take(BOB, words(given)[0], 1.0) == []
    assert rounds.tick(4.7) == []
    orders = [action for action in rounds.tick(4.8) if isinstance(action, ReduceSpan)]
    assert [order.span for order in orders] == list(owned(rounds))
    entry = rounds.span_reduced(orders[0], frozenset({ANN}), b"mean")
    assert isinstance(entry, Entry)
    assert (entry.present, len(entry.weights)) == (b"\3", 1)


def test_a_vector_of_the_wrong_size_costs_the_vector_alone() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, True)
    given = contribution(spans=owned(rounds))
    feed(rounds, ANN, given, 1.0)
    opening, vectors = words(given)
    rounds.take(BOB, opening, 1.0)
    assert refusals(rounds.take(BOB, replace(vectors[0], payload=b""), 1.0))
    (order, *_) = (action for action in rounds.tick(4.8) if isinstance(action, ReduceSpan))
    entry = rounds.span_reduced(order, frozenset({ANN}), b"mean")
    assert isinstance(entry, Entry)
    assert (entry.present, len(entry.weights)) == (b"\3", 1)


def test_the_first_opening_of_a_member_counts() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, False)
    given = contribution(spans=owned(rounds))
    elsewhere = replace(given, spans=tuple(replace(span, parent=RUN) for span in given.spans))
    feed(rounds, ANN, given, 1.0)
    rounds.take(BOB, words(elsewhere)[0], 1.0)
    assert refusals(rounds.take(BOB, words(given)[0], 1.1)) == ["is the second one for this round"]
    reports = rounds.tick(4.8)
    assert all(
        isinstance(action, Report) and "1 of 2 voters were there on one parent" in action.text for action in reports
    )
    assert len(reports) == len(owned(rounds))


def test_a_vector_without_an_opening_does_not_count() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, False)
    given = contribution(spans=owned(rounds))
    feed(rounds, ANN, given, 1.0)
    for vector in words(given)[1]:
        assert rounds.take(BOB, vector, 1.0) == []
    assert "1 of 2 voters were there" in str(rounds.tick(4.8)[0])


def test_a_reducer_that_gets_nothing_under_a_cap_is_informed_and_does_not_wait() -> None:
    rounds, _ = exchange(num_members=3)
    change(rounds.membership, upload_bytes_per_second=1.0)
    (order,) = rounds.begin(0, True)
    assert isinstance(order, RequestContribution)
    assert order.spans == frozenset(owned(rounds)), "what this peer reduces itself costs it nothing"
    sends = rounds.contribute(contribution(spans=owned(rounds)), 1.0)
    openings = sent_openings(sends)
    assert openings.keys() == set(ids(3)) - {ANN}
    assert [offer.sends for opening in openings.values() for offer in opening.spans] == [False, False]

    ahead, chains = exchange(num_members=3)
    change(ahead.membership, upload_bytes_per_second=1.0)
    ahead.begin(0, True)
    for span in SPANS:
        chains.set_head(span, head_of(round_index=0))
    openings = sent_openings(ahead.contribute(contribution(spans=()), 1.0))
    assert [opening.spans for opening in openings.values()] == [(), ()]

    other, _ = exchange(num_members=3)
    other.begin(0, True)
    other.contribute(contribution(spans=owned(other)), 1.0)
    third = next(peer for peer in ids(3) if peer not in (ANN, BOB))
    assert other.collection is not None
    (opening, vectors) = words(contribution(spans=owned(other)), 3)
    for word in in_order(opening, vectors):
        other.take(third, word, 1.0)
    empty = replace(opening, spans=())
    assert decode_message(encode_message(empty)) == empty
    orders = other.take(BOB, empty, 1.0)
    assert [(order.span, len(order.parts)) for order in orders if isinstance(order, ReduceSpan)] == [
        (span, 2) for span in owned(other)
    ]


def test_a_span_that_is_being_fetched_is_not_named_and_the_others_continue() -> None:
    rounds, _ = exchange(3)
    rounds.begin(0, True)
    fetched, *others = (span for span in SPANS if span not in owned(rounds))
    (order,) = rounds.begin(0, True, frozenset({fetched, SpanId(1, 0)}))
    assert isinstance(order, RequestContribution)
    assert order.spans == frozenset(SPANS) - {fetched}
    openings = sent_openings(rounds.contribute(contribution(spans=(*owned(rounds), *others)), 1.0))
    assert openings.keys() == set(ids(3)) - {ANN}, "who gets nothing of what it expects is told, and waits for nothing"
    assert {offer.index for opening in openings.values() for offer in opening.spans} == {span.index for span in others}

    (order,) = rounds.begin(2, True, frozenset({SpanId(1, 0)}))
    assert isinstance(order, RequestContribution)
    assert order.spans is None, "of this fragment nothing is left out"


def test_a_member_that_announces_but_never_sends_vectors_is_reported_every_round() -> None:
    rounds, _ = exchange(2)
    for index in (0, 2):
        rounds.begin(index, True)
        mine, now = owned(rounds), ROUND_SECONDS * index
        opening, vectors = words(contribution(index, mine))
        rounds.contribute(contribution(index, mine), now + 1.0)
        rounds.take(BOB, opening, now + 1.0)
        for vector in vectors[1:]:
            rounds.take(BOB, vector, now + 1.0)
        rounds.tick(now + 4.8)
        (said,) = rounds.close()
        assert isinstance(said, Report)
        num, name = len(mine), short_peer_id(BOB)
        assert said.topic == "missing"
        assert said.text == (
            f"round {index}: of the {num} spans averaged here, 1 from {name} did not arrive in time; "
            "averaged the others"
        )


def test_a_member_that_announces_no_vectors_is_not_reported() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, True)
    rounds.contribute(contribution(spans=owned(rounds)), 1.0)
    rounds.take(BOB, opened(rounds, owned(rounds), 2), 1.0)
    rounds.tick(4.8)
    assert rounds.close() == []


def test_a_single_contribution_of_norm_0_leaves_the_next_round_its_limit() -> None:
    rounds, chains = exchange(2)
    rounds.begin(0, True)
    mine = owned(rounds)
    limited = head_of(radius=0.5)
    for span in mine:
        chains.set_head(span, limited)
    spans = tuple(replace(each, parent=limited.digest, norm=0.0) for each in contribution(spans=mine).spans)
    rounds.take(
        ANN,
        contribution_messages(
            contribution(spans=()), (), roster_of(2).digest(), 1, dict.fromkeys(mine, limited.digest)
        )[0],
        1.0,
    )
    orders = feed(rounds, BOB, replace(contribution(), spans=spans), 1.0)
    assert isinstance(orders[0], ReduceSpan)
    entry = rounds.span_reduced(orders[0], frozenset({BOB}), b"mean")
    assert isinstance(entry, Entry)
    assert (entry.weights, entry.median_norm) == ((10.0,), 0.5)


BOOT = peer_id("boot")


def with_bootstrap(me: PeerId, *others: Member) -> tuple[Exchange, Digest]:
    """The rounds at a member of a run whose bootstrap is on the roster; and that roster's digest."""
    roster = child_of(founding().roster, [member(BOOT, trains=False, counts=False), *others])
    _, chains = exchange()
    membership = membership_of(me, founding(), certify(roster, [BOOT]), trains=me != BOOT)
    return Exchange(rules=run_rules(), membership=membership, chains=chains), roster.digest()


def test_a_bootstrap_sends_an_empty_opening_at_the_start_of_the_round() -> None:
    """It is present for all that it holds, and needs no worker for that."""
    rounds, digest = with_bootstrap(BOOT, member(ANN), member(BOB))
    actions = rounds.begin(0, True)
    assert not [action for action in actions if isinstance(action, RequestContribution)]
    openings = sent_openings(actions)
    assert openings.keys() == {ANN, BOB}
    assert rounds.collection is not None
    for opening in (*openings.values(), rounds.collection.openings[BOOT]):
        assert (opening.roster, opening.steps, opening.tokens) == (digest, 0, 0)
        assert {(offer.parent, offer.sends) for offer in opening.spans} == {(HEAD.digest, False)}
    assert {offer.index for opening in openings.values() for offer in opening.spans}.isdisjoint(
        span.index for span in owned(rounds)
    )
    assert rounds.membership.votes.named_round == 0, "it has named parents: it votes for no roster of an earlier round"


def test_a_bootstrap_and_one_of_two_are_a_majority_of_the_three_that_vote() -> None:
    rounds, digest = with_bootstrap(ANN, member(ANN), member(BOB))
    rounds.begin(0, True)
    mine = owned(rounds)
    given = contribution(spans=mine)
    for word in in_order(*contribution_messages(given, given.spans, digest, 1)):
        rounds.take(ANN, word, 1.0)
    nothing = contribution_messages(
        replace(given, tokens=0, steps=0, spans=()), (), digest, 1, dict.fromkeys(mine, HEAD.digest)
    )[0]
    rounds.take(BOOT, nothing, 1.0)
    (order, *_) = [action for action in rounds.tick(4.8) if isinstance(action, ReduceSpan)]
    entry = rounds.span_reduced(order, frozenset({ANN}), b"mean")
    assert isinstance(entry, Entry)
    assert (places_in(entry.present), included_places(entry)) == ((0, 1), (1,)), "bob is asleep"


def test_the_bootstrap_reduces_for_members_at_home() -> None:
    rounds, digest = with_bootstrap(BOOT, member(ANN, reduces=False), member(BOB, reduces=False))
    assert sent_openings(rounds.begin(0, True)) == {}, "nobody else reduces"
    assert owned(rounds) == SPANS
    orders: list[ReduceSpan] = []
    for peer in (ANN, BOB):
        opening, vectors = contribution_messages(contribution(), contribution().spans, digest, 1)
        for word in in_order(opening, vectors):
            orders += [action for action in rounds.take(peer, word, 1.0) if isinstance(action, ReduceSpan)]
    assert [(order.span, [part.peer for part in order.parts]) for order in orders] == [
        (span, [ANN, BOB]) for span in SPANS
    ]
    entry = rounds.span_reduced(orders[0], frozenset({ANN, BOB}), b"mean")
    assert isinstance(entry, Entry)
    assert (places_in(entry.present), included_places(entry)) == ((0, 1, 2), (1, 2))


def test_a_bootstrap_reports_members_whose_vectors_are_missing_and_never_itself() -> None:
    rounds, digest = with_bootstrap(BOOT, member(ANN, reduces=False), member(BOB, reduces=False))
    rounds.begin(2, True)
    now = 2 * ROUND_SECONDS
    opening, _ = contribution_messages(contribution(2), contribution(2).spans, digest, 1)
    assert rounds.take(ANN, opening, now + 1.0) == []
    rounds.tick(now + 4.8)
    texts = [said.text for said in rounds.close() if isinstance(said, Report)]
    assert len(texts) == 2
    assert f"no contribution from {short_peer_id(BOB)};" in texts[0]
    assert f"{len(SPANS)} from {short_peer_id(ANN)} did not arrive in time" in texts[1]


def test_an_island_without_a_step_border_is_present_without_a_contribution() -> None:
    rounds, _ = exchange(3)
    third = next(peer for peer in ids(3) if peer not in (ANN, BOB))
    rounds.begin(0, True)
    half = rounds.rules.clock.contribute_by(0)
    assert rounds.tick(half - 0.1) == []
    opened_by = sent_openings(rounds.tick(half))
    assert set(opened_by) == {BOB, third}
    for opening in opened_by.values():
        assert (opening.steps, opening.tokens) == (0, 0)
        assert [offer.sends for offer in opening.spans] == [False] * len(opening.spans)
    assert rounds.contribute(contribution(), half) == [], "it has said that nothing comes"
    assert rounds.tick(half) == []
    opening, vectors = words(contribution(spans=owned(rounds)), 3)
    for word in in_order(opening, vectors):
        assert rounds.take(BOB, word, half) == []
    orders = rounds.take(third, replace(opened_by[BOB], spans=()), half)
    assert [[part.peer for part in order.parts] for order in orders if isinstance(order, ReduceSpan)] == [
        [BOB] for _ in owned(rounds)
    ]
    (missing,) = rounds.close()
    assert isinstance(missing, Report)
    assert f"no contribution from this peer, {short_peer_id(third)}" in missing.text


def test_a_member_that_announces_vectors_has_trained() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, False)
    opening = words(contribution(spans=owned(rounds)))[0]
    assert refusals(rounds.take(BOB, replace(opening, steps=0, tokens=0), 1.0)) == ["claims 0 tokens in 0 steps"]


def test_a_member_not_asked_to_contribute_is_not_present() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, False)
    assert sent_openings(rounds.tick(rounds.rules.clock.contribute_by(0))) == {}
