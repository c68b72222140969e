"""A peer that its owner has paused is there, but trains, averages and serves nothing; the others know it."""

from __future__ import annotations

from exchanges import ANN, BOB, contribution, exchange, feed, owned, sent_openings
from fake_run import run_rules, verify
from made import change, founding, heartbeat, membership_of, roster_1

from p2p_diloco.protocol.actions import Report, RequestContribution
from p2p_diloco.protocol.heartbeats import HeartbeatBuilder
from p2p_diloco.protocol.membership.local import Progress
from p2p_diloco.protocol.round.chain import ChainBook
from p2p_diloco.protocol.wire.messages import SpanVector


def test_a_paused_peer_names_its_tips_at_once_and_sends_no_vector() -> None:
    rounds, _ = exchange(2)
    change(rounds.membership, is_paused=True)
    actions = rounds.begin(0, True)
    assert not [action for action in actions if isinstance(action, RequestContribution)]
    (opening,) = sent_openings(actions).values()
    assert opening.spans, "an entry needs a majority that is there"
    assert not any(offer.sends for offer in opening.spans)


def test_a_contribution_that_is_ready_after_the_pause_began_is_not_sent() -> None:
    rounds, _ = exchange(2)
    rounds.begin(0, True)
    change(rounds.membership, is_paused=True)
    actions = rounds.contribute(contribution(), 1.0)
    assert not [action for action in actions if isinstance(getattr(action, "message", None), SpanVector)]
    (opening,) = sent_openings(actions).values()
    assert opening.spans
    assert not any(offer.sends for offer in opening.spans)


def test_missing_contributions_are_reported_neither_by_nor_about_a_paused_peer() -> None:
    rounds, _ = exchange(2)
    for is_ready, me_paused, num_reports in ((True, False, 1), (False, False, 0), (True, True, 0)):
        rounds.membership.liveness.views.clear()
        assert rounds.membership.liveness.take(heartbeat(BOB, ready=is_ready), 0.0)
        rounds.begin(0, True)
        feed(rounds, ANN, contribution(spans=owned(rounds)), 1.0)
        rounds.tick(5.0)
        change(rounds.membership, is_paused=me_paused)
        reports = [action for action in rounds.close() if isinstance(action, Report)]
        assert len(reports) == num_reports


def test_the_others_learn_it_from_heartbeats_and_declarations() -> None:
    membership = membership_of(ANN, founding(), roster_1(2))
    membership.local.set_ready(True)
    chains = ChainBook(
        rules=run_rules(),
        retained_cycles=1,
        verify=verify,
    )
    builder = HeartbeatBuilder(rules=run_rules(), membership=membership, chains=chains)
    progress = Progress(tokens=10, steps=2, tokens_per_second=5.0, loss=1.0)
    change(membership, can_be_dialled=True, progress=progress)
    for is_paused in (False, True, False):
        change(membership, is_paused=is_paused)
        beat = builder.heartbeat(())
        assert (beat.ready, beat.can_be_dialled) == (not is_paused, not is_paused)
        assert (beat.tokens_per_second, beat.steps) == (0.0 if is_paused else 5.0, 2)
        assert membership.declarations.declare(0.0).reachable is not is_paused
        assert membership.presence.num_ready(0.0) == (not is_paused)
