"""The rounds at one peer."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from exchanges import ANN, BOB, HEAD, SPANS, contribution, exchange, feed, owned, refusals, sent_openings, words
from fake_run import PAYLOAD_BYTES, RUN, peer_id, run_rules, verify
from made import certify, child_of, entry_on, founding, head_of, ids, membership_of, roster_of

from p2p_diloco.ids import PeerId
from p2p_diloco.protocol.actions import ReduceSpan, Report, RequestContribution, Send, Stage
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.round.exchange import MOST_EARLY_SENDERS, Exchange
from p2p_diloco.protocol.round.round import contribution_messages
from p2p_diloco.protocol.wire.ballot import Proposal
from p2p_diloco.protocol.wire.entry import Entry, next_head, places_in
from p2p_diloco.protocol.wire.messages import Opening, Refusal, RowMean, SpanVector

DIGEST_6 = roster_of(6).digest()


def test_a_lone_member_reduces_its_own_contribution_at_once() -> None:
    rounds, chains = exchange()
    (order,) = rounds.begin(0, True)
    assert isinstance(order, RequestContribution)
    reduces = rounds.contribute(contribution(), 1.0)
    orders = [action for action in reduces if isinstance(action, ReduceSpan)]
    assert [reduce.span for reduce in orders] == list(SPANS)
    entry = rounds.span_reduced(orders[0], frozenset({ANN}), b"mean")
    assert isinstance(entry, Entry)
    assert verify(ANN, entry.statement(), entry.signature)
    assert "sound" in str(rounds.span_reduced(orders[1], frozenset(), b"mean"))
    chains.set_head(SPANS[2], next_head(HEAD, entry_on(HEAD, roster_of(1), ANN, span=SPANS[2])))
    assert "moved on" in str(rounds.span_reduced(orders[2], frozenset({ANN}), b"mean"))
    assert rounds.tick(5.0) == []
    assert rounds.close() == []


def test_no_round_starts_without_a_roster() -> None:
    rounds, _ = exchange(with_roster=False)
    assert rounds.begin(0, True) == []
    assert rounds.contribute(contribution(), 1.0) == []
    assert rounds.tick(6.0) == []
    assert rounds.close() == []


def test_no_peer_contributes_before_round_0_or_without_state_or_late() -> None:
    rounds, _ = exchange()
    assert rounds.begin(-1, True) == []
    assert rounds.begin(0, False) == []
    assert rounds.contribute(contribution(), 4.5) == []
    assert rounds.contribute(contribution(2), 1.0) == []


def test_a_peer_that_does_not_train_takes_no_snapshot() -> None:
    rounds, _ = exchange(trains=False)
    assert rounds.begin(0, True) == []
    assert rounds.collection is not None
    assert not any(offer.sends for offer in rounds.collection.openings[ANN].spans), "but it is there"
    rounds.begin(0, False)
    assert rounds.collection.openings == {}, "unless it lacks the state"


def test_a_contribution_goes_to_the_owners() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, True)
    sends = [action for action in rounds.contribute(contribution(), 1.0) if isinstance(action, Send)]
    assert {send.to for send in sends} == {BOB}
    assert isinstance(sends[0].message, Opening)
    assert len(sends) == 1 + len(SPANS) - len(owned(rounds))


def test_a_span_is_reduced_once_all_contributions_have_arrived() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, True)
    mine = owned(rounds)
    assert feed(rounds, ANN, contribution(spans=mine), 1.0) == []
    reduces = feed(rounds, BOB, contribution(spans=mine), 1.0)
    assert [a.span for a in reduces if isinstance(a, ReduceSpan)] == list(mine)
    assert rounds.take(BOB, words(contribution(spans=mine))[1][0], 1.0) == []


def test_contributions_missing_at_the_deadline_are_left_out() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, False)
    mine = owned(rounds)
    feed(rounds, ANN, contribution(spans=mine), 1.0)
    assert rounds.tick(1.0) == []
    reports = rounds.tick(5.0)
    assert all(isinstance(report, Report) and report.text.startswith("skipped fragment") for report in reports)
    assert len(reports) == len(mine)
    (missing,) = rounds.close()
    assert isinstance(missing, Report)
    assert missing.topic == "missing"


def test_a_lagging_owner_waits_for_the_entry_until_the_deadline() -> None:
    rounds, chains = exchange(2)
    rounds.begin(0, False)
    mine = owned(rounds)
    for span in mine:
        chains.set_head(span, head_of(digest=b"behind"))
    feed(rounds, ANN, contribution(spans=mine), 1.0)
    assert feed(rounds, BOB, contribution(spans=mine), 1.0) == []
    for span in mine:
        chains.set_head(span, HEAD)
    assert all(isinstance(action, ReduceSpan) for action in rounds.tick(5.0))


def test_early_messages_wait_for_their_round() -> None:
    rounds, _ = exchange(2)
    rounds.begin(1, False)
    fragment_0 = contribution(2)
    opening, vectors = words(fragment_0)
    for _ in range(9):
        assert rounds.take(BOB, opening, 15.0) == []
    assert rounds.take(ANN, replace(vectors[0], payload=b"too long for it"), 15.0) == []
    for place in range(MOST_EARLY_SENDERS + 9):
        assert rounds.take(peer_id(str(place)), opening, 15.0) == []
    actions = rounds.begin(2, False)
    assert refusals(actions)


def in_order(opening: Opening, vectors: tuple[SpanVector, ...]) -> tuple[Opening | SpanVector, ...]:
    return opening, *vectors


def test_early_vectors_are_kept_only_from_members_and_strangers_displace_none() -> None:
    rounds, _ = exchange(2)
    rounds.begin(1, False)
    opening, vectors = words(contribution(2))
    for place in range(MOST_EARLY_SENDERS + 9):
        for message in in_order(opening, vectors):
            rounds.take(peer_id(str(place)), message, 15.0)
    for message in in_order(opening, vectors):
        rounds.take(BOB, message, 15.0)
    for far in (3, 2**60, -(2**60)):
        assert refusals(rounds.take(BOB, replace(opening, round=far), 15.0)) == ["late or far too early"]
    kept = rounds._early[2]
    assert len(kept) == MOST_EARLY_SENDERS + 1
    assert {len(messages) for peer, messages in kept.items() if peer != BOB} == {1}
    assert len(kept[BOB]) == 1 + len(vectors)


def test_messages_that_arrive_before_a_late_tick_wait_for_their_round() -> None:
    rounds, _ = exchange(2)
    rounds.begin(1, False)
    opening, _ = words(contribution(2))
    assert rounds.take(BOB, opening, 16.5) == [], "round 2 has begun on the clock, but not here yet"


def test_late_messages_are_refused() -> None:
    rounds, _ = exchange(2)
    rounds.begin(2, False)
    opening, _ = words(contribution(0))
    assert refusals(rounds.take(BOB, opening, 17.0)) == ["late or far too early"]


def test_invalid_openings_and_vectors_are_refused_with_a_reason() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, True)
    mine = owned(rounds)
    opening, vectors = words(contribution(spans=mine))
    assert rounds.take(BOB, vectors[0], 1.0) == []
    (refused,) = rounds.take(BOB, replace(opening, roster=founding().roster.digest()), 1.0)
    assert isinstance(refused, Send)
    assert isinstance(refused.message, Refusal)
    assert refused.message.newer_roster
    rounds.take(BOB, opening, 1.0)
    assert "15 bytes, 6 expected" in refusals(rounds.take(BOB, replace(vectors[0], payload=bytes(15)), 1.0))[0]
    (own,) = rounds.take(ANN, replace(opening, steps=0), 1.0)
    assert isinstance(own, Report)
    assert "own contribution left out" in own.text


def test_a_second_vector_for_a_settled_span_changes_nothing() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, True)
    mine = owned(rounds)
    feed(rounds, ANN, contribution(spans=mine), 1.0)
    rounds.tick(5.0)
    opening, vectors = words(contribution(spans=mine))
    rounds.take(BOB, opening, 5.1)
    assert rounds.take(BOB, vectors[0], 5.1) == []


def grid_round(me: PeerId = ANN) -> Exchange:
    """The round at one of six peers in a grid of two rows."""
    roster = certify(roster_of(6), [peer_id("boot")])
    rules = replace(run_rules(), group_size=2)
    membership = membership_of(me, founding(), roster, group_size=2)
    chains = ChainBook(rules=rules, retained_cycles=16, verify=verify)
    for span in SPANS:
        chains.set_head(span, HEAD)
    return Exchange(rules=rules, membership=membership, chains=chains)


def row_of_ann(rounds: Exchange) -> list[PeerId]:
    assert rounds.collection is not None
    return [member.peer for member in rounds.collection.members.values()]


def test_in_a_grid_a_reducer_sends_the_mean_of_its_row_and_an_owner_finishes() -> None:
    rounds = grid_round()
    rounds.begin(0, True)
    assert rounds.collection is not None
    assert rounds.finish is not None
    mine, owned_here = rounds.collection.reduced, rounds.finish.owned
    assert set(owned_here) <= set(mine)
    orders = []
    for peer in row_of_ann(rounds):
        opening, vectors = contribution_messages(contribution(spans=mine), contribution(spans=mine).spans, DIGEST_6, 1)
        rounds.take(peer, opening, 1.0)
        for vector in vectors:
            orders += [a for a in rounds.take(peer, vector, 1.0) if isinstance(a, ReduceSpan)]
    assert [(order.span, order.stage) for order in orders] == [(span, Stage.ROW) for span in mine]
    unsound = rounds.span_reduced(orders[0], frozenset(), b"mean")
    assert isinstance(unsound, RowMean)
    assert (places_in(unsound.present), unsound.included, unsound.payload) == ((0, 2, 4), b"\0", b"")
    rounds.begin(0, True)
    assert rounds.span_reduced(orders[0], frozenset(row_of_ann(rounds)), b"mean") == (
        "the round was over before its mean was ready"
    )


def test_an_owner_finishes_at_its_deadline_without_missing_rows() -> None:
    rounds = next(r for me in ids(6) if (r := grid_round(me)).begin(0, True) and r.finish and r.finish.owned)
    assert rounds.finish is not None
    reduced = rounds.finish.collection.reduced
    sent = [action.message for action in rounds.tick(5.0) if isinstance(action, Send)]
    means = [message for message in sent if isinstance(message, RowMean)]
    assert len(means) == len(reduced) - len(rounds.finish.owned), "nobody's vectors have come: only who is there"
    assert all(mean.payload == b"" for mean in means)
    reports = rounds.tick(6.0)
    assert len(reports) == len(rounds.finish.owned)
    assert all(isinstance(r, Report) and "1 of 6 voters were there" in r.text for r in reports), "the others' row"
    assert rounds.tick(6.1) == []


def test_an_invalid_row_mean_is_refused() -> None:
    rounds = grid_round()
    rounds.begin(0, True)
    mean = RowMean(
        round=0,
        span=SPANS[0],
        roster=RUN,
        parent=HEAD.digest,
        row=0,
        present=b"",
        included=b"",
        weights=(),
        norms=(),
        tokens=1,
        payload=bytes(PAYLOAD_BYTES),
    )
    assert "names a different roster; roster 1 is in force here" in refusals(rounds.take(BOB, mean, 1.0))[0]
    assert rounds.take(BOB, replace(mean, round=1), 7.9) == [], "of the next round: waits for it"


def test_a_voter_for_the_next_roster_sends_an_empty_opening() -> None:
    """Reducers need not wait for it, and it counts nowhere."""
    rounds, _ = exchange(2)
    membership = rounds.membership
    rounds.begin(0, True)
    child = child_of(roster_of(2), roster_of(2).members)
    ballot = next(number for number in count(1) if membership.rules.clock.agreed_in(number) == 1)
    assert membership.votes.vote(Proposal(ballot=ballot, roster=child, promises=(), origin=()))
    assert any(isinstance(action, RequestContribution) for action in rounds.begin(1, True)), "the round of its vote"
    report, *actions = rounds.begin(2, True)
    assert isinstance(report, Report)
    assert report.text.startswith("round 2: no contribution under roster 1")
    assert [opening.spans for opening in sent_openings(actions).values()] == [()]
    assert rounds.contribute(contribution(2), 17.0) == []
    assert membership.votes.named_round == 1


def test_a_leaving_peer_no_longer_names_parents() -> None:
    rounds, _ = exchange(2)
    rounds.membership.leave(0.0)
    actions = rounds.begin(0, True)
    assert [opening.spans for opening in sent_openings(actions).values()] == [()]
    assert not [action for action in actions if isinstance(action, Report)]


def test_rounds_with_named_parents_are_remembered_when_the_clock_steps_back() -> None:
    """It voted in the repeated round for a roster that governed the later round, in which it had named parents."""
    rounds, _ = exchange(2)
    rounds.begin(0, True)
    rounds.begin(2, True)
    rounds.begin(1, True)
    assert rounds.membership.votes.named_round == 2


def test_a_clock_that_was_ahead_at_the_start_blocks_no_vote_once_it_is_set_right() -> None:
    rounds, _ = exchange(2)
    for round_index in (5400, 3, 4):
        rounds.begin(round_index, False)
    assert rounds.membership.votes.named_round == 3
    rounds.begin(5, True)
    assert rounds.membership.votes.named_round == 5
