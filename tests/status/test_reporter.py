"""Events are counted once and reported accurately."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from session_stage import Watcher
from small_run import peer_key, small_manifest, small_plan, start_states

from p2p_diloco.bandwidth.uplink import UplinkWatch
from p2p_diloco.config.run_plan import plan_run
from p2p_diloco.ids import PeerId, format_peer_id, sha256, short_peer_id
from p2p_diloco.node.node import Traffic
from p2p_diloco.protocol.actions import RoundClosed
from p2p_diloco.protocol.engine import PeerEngine
from p2p_diloco.protocol.membership.liveness import PeerView
from p2p_diloco.protocol.membership.local import Conditions, LocalPeer, Progress
from p2p_diloco.protocol.membership.reach import Answer, Standing
from p2p_diloco.signing import is_signed_by
from p2p_diloco.status import trouble
from p2p_diloco.status.event_log import EVENTS_FILE, append_event
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.status.status_file import ByteCounts, PeerLine, PeerStatus
from p2p_diloco.transport.link import TransportCounters, TransportLimits
from tests.status.kept_events import read_events

PLAN = small_plan()
NOW = PLAN.rules.clock.begin(5) + 1.0
CLOSED = RoundClosed(round=3, num_spans=4, num_entries=3, num_included=6, num_ready=2, num_members=2)


def engine(trains: bool = True) -> PeerEngine:
    key = peer_key("ada")
    me = LocalPeer(peer=key.peer, incarnation=2, can_be_dialled=True, trains=trains, sign=key.sign)
    return PeerEngine(me=me, rules=PLAN.rules, verify=is_signed_by)


def reporter() -> tuple[StatusReporter, Watcher]:
    watcher = Watcher()
    return StatusReporter(observer=watcher, unix_seconds=lambda: 123.0, steady=lambda: 45.0), watcher


def status_of(reporter: StatusReporter, engine: PeerEngine, traffic: Traffic | None = None) -> PeerStatus:
    node: Any = SimpleNamespace(traffic=traffic or Traffic(), clocks=SimpleNamespace(sentence=""))
    return reporter.status(engine, node, small_manifest(), 1000, NOW)


def test_an_event_is_passed_on_with_its_time_and_figures() -> None:
    count, watcher = reporter()
    count.report("roster", "roster 3", k=3)
    (event,) = watcher.events
    assert (event.time, event.topic, event.text, event.figures) == (123.0, "roster", "roster 3", {"k": 3})


def test_an_event_with_a_peers_text_is_one_clean_line_on_the_terminal_and_in_the_log(tmp_path: Path) -> None:
    said, watcher = reporter()
    said.report("link", "lost the link: \x1b[2J\x1b]0;owned\x07\nready: all is well \u202e")
    (event,) = watcher.events
    assert event.text == "lost the link: ?[2J?]0;owned??ready: all is well ?"
    append_event(tmp_path, event)
    assert (tmp_path / EVENTS_FILE).read_bytes().count(b"\n") == 1
    assert read_events(tmp_path) == (event,)


def test_similar_events_of_many_spans_are_counted_beyond_a_few_a_minute() -> None:
    watcher, clock = Watcher(), [100.0]
    count = StatusReporter(observer=watcher, unix_seconds=lambda: clock[0], steady=lambda: 45.0)
    for number in range(10):
        count.report("adoption", f"span {number} has two children")
        count.report("ready", "ready")
    texts = [event.text for event in watcher.events if event.topic == "adoption"]
    assert texts == [f"span {number} has two children" for number in range(4)]
    assert sum(event.topic == "ready" for event in watcher.events) == 10
    clock[0] = 160.0
    count.round_closed(CLOSED)
    texts = [event.text for event in watcher.events if event.topic == "adoption"]
    assert texts[4:] == ["6 more spans like those above in the last minute"]
    count.report("adoption", "span 11 has two children")
    assert watcher.events[-1].text == "span 11 has two children"


def test_a_closed_round_is_an_event_with_all_its_figures() -> None:
    count, watcher = reporter()
    count.round_closed(CLOSED)
    (event,) = watcher.events
    assert event.topic == "round"
    assert event.text == "round 3: 3 of 4 spans got an entry"
    assert event.figures == {
        "round": 3, "num_spans": 4, "num_entries": 3, "num_included": 6, "num_ready": 2, "num_members": 2
    }  # fmt: skip


def test_rounds_are_counted_once_this_peer_is_ready() -> None:
    count, _ = reporter()
    peer = engine()
    count.round_closed(CLOSED)
    count.follow(peer)
    count.round_closed(CLOSED)
    assert status_of(count, peer).rounds_closed == 0
    assert status_of(count, peer).participation is None
    peer.membership.local.set_ready(True)
    for closed in (CLOSED, replace(CLOSED, num_included=2)):
        count.round_closed(closed)
    status = status_of(count, peer)
    assert (status.rounds_closed, status.spans_closed, status.entries_absorbed) == (2, 8, 6)
    assert status.participation == pytest.approx(8 / 16)
    assert status.vector_cycles == 1.0


def test_a_fresh_peer_reports_only_what_it_knows() -> None:
    count, _ = reporter()
    status = status_of(count, engine())
    assert (status.run, status.run_name) == (PLAN.rules.run.hex(), "small")
    assert (status.peer, status.role, status.incarnation) == (format_peer_id(peer_key("ada").peer), "trainer", 2)
    assert (status.round, status.cycle, status.roster, status.num_members) == (5, 2, 0, 0)
    assert (status.phase, status.ready, status.leaving, status.log_digest) == ("connecting", False, False, "")
    assert (status.loss, status.anchor_loss, status.local_loss) == (None, None, None)
    assert status.peers == ()
    assert status.updated == 123.0


def test_a_bootstrap_peer_reports_its_role() -> None:
    count, _ = reporter()
    assert status_of(count, engine(trains=False)).role == "bootstrap"


def test_progress_losses_and_addresses_are_reported() -> None:
    count, watcher = reporter()
    peer = engine()
    peer.set_conditions(Conditions(progress=Progress(tokens=40, steps=4, tokens_per_second=2.5, loss=1.5)))
    count.note(anchor_loss=2.0, local_loss=1.9, phase="training")
    count.note(addresses=("/ip4/1.2.3.4/tcp/5",), invite="p2pdiloco://x", state_digest="ab")
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    count.publish(peer, node, small_manifest(), 1000, NOW)
    status = watcher.last
    assert (status.tokens, status.inner_steps, status.tokens_per_second, status.loss) == (40, 4, 2.5, 1.5)
    assert (status.anchor_loss, status.local_loss, status.phase) == (2.0, 1.9, "training")
    assert (status.addresses, status.invite, status.state_digest) == (("/ip4/1.2.3.4/tcp/5",), "p2pdiloco://x", "ab")
    assert status.parameters == 1000


def test_bytes_are_reported_by_purpose() -> None:
    count, _ = reporter()
    traffic = Traffic()
    traffic.sent |= {"vectors": 10, "control": 20, "transfer": 30}
    traffic.received |= {"vectors": 1, "control": 2, "transfer": 3}
    status = status_of(count, engine(), traffic)
    assert status.bytes_sent == ByteCounts(vectors=10, control=20, transfer=30)
    assert status.bytes_received == ByteCounts(vectors=1, control=2, transfer=3)


def test_the_log_digest_covers_all_chains() -> None:
    count, _ = reporter()
    peer = engine()
    states = start_states(PLAN)
    peer.hold_state({span: state.head for span, state in states.items()})
    assert status_of(count, peer).log_digest == sha256(*(states[span].head.digest for span in sorted(states))).hex()


def test_peers_are_listed_as_in_their_heartbeats() -> None:
    count, _ = reporter()
    peer = engine()
    beat: Any = SimpleNamespace(
        ready=True,
        can_be_dialled=False,
        share=8,
        trains=True,
        steps=3,
        tokens=60,
        tokens_per_second=7.0,
        loss=1.25,
        incarnation=1,
        name="Łódź".encode(),
    )
    silent: Any = SimpleNamespace(
        ready=False,
        can_be_dialled=True,
        share=8,
        trains=False,
        steps=0,
        tokens=0,
        tokens_per_second=0.0,
        loss=0.0,
        incarnation=1,
        name=b"a\x1b[2J",
    )
    peer.membership.liveness.views[peer_key("ben").peer] = PeerView(heartbeat=beat, at=NOW - 2.0, since=NOW - 9.0)
    peer.membership.liveness.views[peer_key("boot").peer] = PeerView(heartbeat=silent, at=NOW + 5.0, since=NOW - 9.0)
    lines = {line.peer: line for line in status_of(count, peer).peers}
    ben, boot = (lines[format_peer_id(peer_key(name).peer)] for name in ("ben", "boot"))
    assert (ben.ready, ben.reachable, ben.trains, ben.steps) == (True, False, True, 3)
    assert (ben.tokens_per_second, ben.loss, ben.seconds_since_heard) == (7.0, 1.25, 2.0)
    assert (ben.step_tokens, ben.cycle_steps) == (20.0, pytest.approx(7.0 * PLAN.rules.cycle_seconds / 20.0))
    assert (boot.step_tokens, boot.cycle_steps) == (None, None)
    assert (boot.loss, boot.seconds_since_heard) == (None, 0.0)
    assert (ben.name, boot.name) == ("Łódź", "")


def test_an_event_names_the_peers_that_the_status_lists() -> None:
    count, watcher = reporter()
    ben, boot = (peer_key(name).peer for name in ("ben", "boot"))
    count.note(peers=(PeerLine(peer=format_peer_id(ben), name="12D3..x"), PeerLine(peer=format_peer_id(boot))))
    count.report("link", f"link to {short_peer_id(ben)} lost, not to {short_peer_id(boot)}")
    assert watcher.events[-1].text == (f"link to 12D3..x ({short_peer_id(ben)}) lost, not to {short_peer_id(boot)}")


def test_shares_of_weight_stand_beside_shares_of_tokens_as_trainers_claim_them() -> None:
    count, _ = reporter()
    peer = engine()
    for name, trains in (("ben", True), ("boot", False)):
        beat: Any = SimpleNamespace(
            ready=True, can_be_dialled=True, share=8, trains=trains, steps=0, tokens=0, tokens_per_second=0.0, loss=0.0,
            incarnation=1, name=b"",
        )  # fmt: skip
        peer.membership.liveness.views[peer_key(name).peer] = PeerView(heartbeat=beat, at=NOW, since=NOW)
    ada, ben, boot = (peer_key(name).peer for name in ("ada", "ben", "boot"))
    peer.influence.shares, peer.influence.claimed_shares = {ada: 0.5, ben: 0.5}, {ada: 0.8, ben: 0.2, boot: 0.0}
    status = status_of(count, peer)
    lines = {line.peer: line for line in status.peers}
    assert (status.weight, status.claimed_token_share) == (0.5, 0.8)
    assert (lines[format_peer_id(ben)].weight, lines[format_peer_id(ben)].claimed_token_share) == (0.5, 0.2)
    assert (lines[format_peer_id(boot)].weight, lines[format_peer_id(boot)].claimed_token_share) == (None, None)


def test_the_status_shows_the_caps_and_the_rates_of_the_line() -> None:
    count, watcher = reporter()
    peer, node = engine(), cast(Any, SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence="")))
    assert (status_of(count, peer).max_upload, status_of(count, peer).upload_rate) == (None, None)
    count.follow(peer, line=UplinkWatch(TransportLimits(upload_bytes_per_second=2.5e6), TransportCounters()))
    peer.set_conditions(replace(peer.conditions, share=2))
    count.publish(peer, node, small_manifest(), 1000, NOW)
    assert (watcher.last.max_upload, watcher.last.max_download) == (20e6, None)
    assert (watcher.last.upload_rate, watcher.last.download_rate) == (0.0, 0.0)
    assert watcher.last.averaging_share == 0.5
    assert watcher.events == [], "it neither steers nor reports the line"


def test_reachability_is_reported_when_it_changes_and_included_in_every_status() -> None:
    count, watcher = reporter()
    peer = engine()
    no = Answer(host="45.10.0.2", port=5, reason="45.10.0.2:5 timed out", at=0.0)
    yes = replace(no, reason="")
    for standing in (
        Standing(is_reachable=False, failures=(no,)),
        Standing(is_reachable=False, failures=(replace(no, reason="45.10.0.2:5 refused"),)),
        Standing(is_reachable=True, proofs=(yes,), num_proved=1),
        Standing(is_reachable=True, proofs=(yes, yes), num_proved=2),
        Standing(is_reachable=False, proofs=(yes,), failures=(no,)),
    ):
        count.report_reach(standing, (5,), trains=True)
    assert [event.text.partition(":")[0] for event in watcher.events if event.topic == "reach"] == [
        "outbound only",
        "reachable at 45.10.0.2",
        "outbound only",
    ]
    status = status_of(count, peer)
    assert (status.reachable, status.reachable_at, status.proved_by) == (False, ("45.10.0.2:5",), 0)
    assert status.reach.startswith("outbound only: reached only at 45.10.0.2:5")


def test_text_from_other_peers_is_shown_without_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    count, watcher = reporter()
    count.report_reach(
        Standing(is_reachable=False, failures=(Answer(host="45.10.0.2", port=5, reason="no\x1b[2J\u202e", at=0.0),)),
        (5,),
        trains=True,
    )
    monkeypatch.setattr(trouble, "explain_idleness", lambda *_: "dialled\x1b]0;owned\x07")
    peer, node = engine(), cast(Any, SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence="")))
    peer.membership.local.set_ready(True)
    for now in (NOW, NOW + 9 * PLAN.rules.cycle_seconds):
        count.publish(peer, node, small_manifest(), 1000, now)
    status = watcher.last
    assert "(no?[2J?)" in status.reach
    assert status.trouble == "dialled?]0;owned?"


def test_dials_that_fail_after_the_session_began_are_known_to_the_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    count, watcher = reporter()
    monkeypatch.setattr(trouble, "explain_idleness", lambda engine, idle, now: "; ".join(idle.failures.values()))
    peer, node = engine(), cast(Any, SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence="")))
    failures: dict[PeerId, str] = {}
    count.follow(peer, failed_dials=failures)
    failures[peer_key("ben").peer] = "45.10.0.9:31338 timed out"
    peer.membership.local.set_ready(True)
    for now in (NOW, NOW + 9 * PLAN.rules.cycle_seconds):
        count.publish(peer, node, small_manifest(), 1000, now)
    assert watcher.last.trouble == "45.10.0.9:31338 timed out"


def test_a_ready_peer_in_no_entry_for_three_cycles_reports_why_once_and_when_it_is_over() -> None:
    count, watcher = reporter()
    peer, clock = engine(), PLAN.rules.clock
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))

    def say(round_index: int) -> PeerStatus:
        count.publish(peer, node, small_manifest(), 1000, clock.begin(round_index) + 0.1)
        return watcher.statuses[-1]

    late = 3 * clock.num_fragments + 1
    assert say(late).trouble == "", "it was not ready"
    peer.membership.local.set_ready(True)
    for round_index in range(late, 2 * late):
        assert say(round_index).trouble == ""
    for round_index in (2 * late, 2 * late + 1):
        assert say(round_index).trouble.startswith("in no entry for 3 cycles: no roster received")
    peer.last_included = 2 * late + 1
    assert say(2 * late + 2).trouble == ""
    assert say(4 * late).trouble
    peer.last_included = 4 * late
    assert say(4 * late + 1).trouble == ""
    assert say(8 * late).trouble
    peer.membership.local.set_ready(False)
    assert say(8 * late).trouble == ""
    told = [event.text for event in watcher.events if event.topic == "trouble"]
    assert told[1::2] == ["contributions are included in entries", "contributions are included in entries again"]
    assert len(told) == 5, "who is not ready any more is not included again"


def test_a_process_that_stood_still_says_so_and_not_that_its_steps_are_too_long() -> None:
    steady, watcher = [45.0], Watcher()
    count = StatusReporter(observer=watcher, unix_seconds=lambda: 123.0, steady=lambda: steady[0])
    peer, clock = engine(), PLAN.rules.clock
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    peer.membership.local.set_ready(True)

    def say(cycles: float, seconds: float) -> str:
        steady[0] += seconds
        now = clock.begin(4) + cycles * PLAN.rules.cycle_seconds
        count.publish(peer, node, small_manifest(), 1000, now)
        return watcher.statuses[-1].trouble

    assert say(0.0, 1.0) == ""
    text = "in no entry for 4 cycles: this process stood still for 20 s"
    assert say(5.0, 20.0).startswith(text)
    assert say(5.0, 1.0).startswith(text)
    for _ in range(int(4 * PLAN.rules.cycle_seconds / 4.0) + 1):
        last = say(9.0, 4.0)
    assert "stood still" not in last


def test_inner_steps_per_cycle_are_shown_and_over_twice_the_plan_is_reported_once() -> None:
    count, watcher = reporter()
    peer = engine()
    peer.membership.local.set_ready(True)
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    manifest = small_manifest({"rounds.planned_steps": 10})
    cycle = PLAN.rules.cycle_seconds

    def say(cycles: float, steps: int) -> PeerStatus:
        peer.set_conditions(Conditions(progress=Progress(tokens=steps, steps=steps, tokens_per_second=1.0, loss=1.0)))
        count.publish(peer, node, manifest, 1000, NOW + 10.0 * cycles * cycle)
        return watcher.last

    first = say(0.0, 5)
    assert (first.cycle_steps, first.planned_steps, first.pace) == (None, 10, "")
    assert say(0.01, 50).cycle_steps is None, "too soon to tell"
    even = say(1.0, 205)
    assert (even.cycle_steps, even.pace) == (pytest.approx(20.0), "")
    for cycles, steps in ((2.0, 415), (3.0, 625)):
        status = say(cycles, steps)
        assert status.cycle_steps == pytest.approx(21.0)
        assert status.pace == (
            "a cycle has 21 inner steps here, 10 were planned, and longer cycles learn less; if most islands are like "
            f"this one, create the next run with new --step-seconds {cycle / 21:.2g}"
        )
    assert say(4.0, 725).pace == ""
    (event,) = (event for event in watcher.events if event.topic == "pace")
    assert event.figures == {"cycle_steps": pytest.approx(21.0)}
    few = PLAN.rules.clock.num_fragments * 2 - 1
    assert say(5.0, 725 + 10 * few).pace == (
        f"a cycle has {few} inner steps here, 10 were planned; contributions are due in the first half of a round, so "
        "many arrive late; if most islands are like this one, create the next run with new --step-seconds "
        f"{cycle / few:.2g}"
    )


@pytest.mark.parametrize(
    ("steps", "windows", "limits", "said"),
    [
        (210, 16, (1, 32), None),
        (210, 32, (1, 32), "although a step takes 32 windows, the most that help here, and longer cycles learn less"),
        (210, 8, (8, 8), "a cycle has 21 inner steps here, 10 were planned, and longer cycles learn less"),
        (30, 2, (1, 32), None),
        (
            30,
            1,
            (1, 32),
            "although a step takes 1 window, the fewest that help here; contributions are due in",
        ),
        (30, 8, (8, 8), "a cycle has 3 inner steps here, 10 were planned; contributions are due in the first half"),
        (60, 2, (1, 32), None),
    ],
)
def test_a_pace_that_another_batch_may_mend_is_no_trouble(
    steps: int, windows: int, limits: tuple[int, int], said: str | None
) -> None:
    count, watcher = reporter()
    peer = engine()
    peer.membership.local.set_ready(True)
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    count.note(step_windows=windows, planned_windows=8, fewest_windows=limits[0], most_windows=limits[1])
    for index in (1, 2):
        peer.set_conditions(
            Conditions(progress=Progress(tokens=1, steps=steps * index, tokens_per_second=1.0, loss=1.0))
        )
        manifest = small_manifest({"rounds.planned_steps": 10})
        count.publish(peer, node, manifest, 1000, NOW + 10.0 * index * PLAN.rules.cycle_seconds)
    assert (said or "") in watcher.last.pace
    assert bool(watcher.last.pace) == (said is not None)


def test_steps_of_another_batch_are_not_counted_as_those_of_the_present_one() -> None:
    count, watcher = reporter()
    peer = engine()
    peer.membership.local.set_ready(True)
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    for index, (steps, windows) in enumerate(((1, 8), (2, 8), (3, 1), (103, 1)), 1):
        count.note(step_windows=windows, planned_windows=8, fewest_windows=1, most_windows=32)
        peer.set_conditions(Conditions(progress=Progress(tokens=1, steps=steps, tokens_per_second=1.0, loss=1.0)))
        manifest = small_manifest({"rounds.planned_steps": 10})
        count.publish(peer, node, manifest, 1000, NOW + 10.0 * index * PLAN.rules.cycle_seconds)
        assert watcher.last.pace == ""
    assert watcher.last.cycle_steps == pytest.approx(10.0)


def test_for_a_custom_model_the_advice_names_the_python_call() -> None:
    count, watcher = reporter()
    peer = engine()
    peer.membership.local.set_ready(True)
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    manifest = small_manifest({"rounds.planned_steps": 10, "model.tensors": [["weight", [4, 4], "radial"]]})
    cycle = PLAN.rules.cycle_seconds
    for index in (1, 2):
        peer.set_conditions(
            Conditions(progress=Progress(tokens=1, steps=10_000 * index, tokens_per_second=1.0, loss=1.0))
        )
        count.publish(peer, node, manifest, 1000, NOW + 100.0 * index * cycle)
    assert watcher.last.pace.endswith(f"create the next run with new_run(step_seconds={cycle / 100:.2g})")


@pytest.mark.parametrize(
    ("values", "limit", "remedy"),
    [
        ({}, 4, 'use a lower --gpu-duty, or ask for a run with trust.weights = "tokens"'),
        ({"trust.weights": "tokens"}, 16, "use a lower --gpu-duty"),
        (
            {"model.tensors": [[name, [4, 4], "radial"] for name in "ab"], "trust.weights": "tokens"},
            16,
            "use a lower learning rate or gpu_duty",
        ),
    ],
)
def test_an_owner_is_told_once_an_hour_that_its_machine_gives_up_what_it_learns(
    values: dict[str, Any], limit: int, remedy: str
) -> None:
    count, watcher = reporter()
    manifest = small_manifest(values)
    key = peer_key("ada")
    me = LocalPeer(peer=key.peer, incarnation=2, can_be_dialled=True, trains=True, sign=key.sign)
    peer = PeerEngine(me=me, rules=plan_run(manifest).rules, verify=is_signed_by)
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    told = []
    plays = ((0, 0.0), (0.5, 0.05), (1, 1.25), (3600, 1.26), (3601, 1.26), (3601, 0.0), (9000, 1.26), (9100, 1.25))
    for seconds, given_up in plays:
        progress = Progress(length_learnt=8.0, length_sent=5.0, length_given_up=given_up)
        peer.set_conditions(Conditions(progress=progress))
        count.publish(peer, node, manifest, 1000, NOW + seconds)
        told.append(sum(event.topic == "length" for event in watcher.events))
        status = watcher.last
        assert (status.length_learnt, status.length_sent, status.length_given_up) == (8.0, 5.0, given_up)
    assert told == [0, 0, 1, 1, 2, 2, 2, 3], "at 9,000 s it has contributed nothing since it was told"
    assert {event.text for event in watcher.events if event.topic == "length"} == {
        "this machine has given up 20 % of what it could have contributed lately: contributions have at most "
        f"{limit} median lengths, and it learns more between two of them, or sends few (see participation and limits "
        f"on upload); if this goes on, {remedy}"
    }


def test_a_run_without_a_plan_never_has_too_many_steps() -> None:
    count, watcher = reporter()
    peer = engine()
    peer.membership.local.set_ready(True)
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    for index in (1, 2):
        peer.set_conditions(
            Conditions(progress=Progress(tokens=1, steps=10_000 * index, tokens_per_second=1.0, loss=1.0))
        )
        count.publish(peer, node, small_manifest(), 1000, NOW + 100.0 * index * PLAN.rules.cycle_seconds)
    assert (watcher.last.planned_steps, watcher.last.pace) == (None, "")
    assert watcher.last.cycle_steps == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("changes", "at", "expected"),
    [
        ({"rounds.planned_cycles": 40}, 10.0, (0.25, 30.0)),
        ({"rounds.planned_cycles": 40}, 50.0, (1.0, 0.0)),
        ({"rounds.planned_cycles": 40}, -1.0, (0.0, 40.0)),
        ({"rounds.planned_cycles": 1000, "inner.schedule": "cosine"}, 500.0, (0.5, 500.0)),
        ({"rounds.planned_cycles": 1000}, 500.0, None),
    ],
)
def test_how_far_the_run_is_follows_from_its_planned_cycles(
    changes: dict[str, Any], at: float, expected: tuple[float, float] | None
) -> None:
    """`at` and the time left are in cycles."""
    count, _ = reporter()
    node: Any = SimpleNamespace(traffic=Traffic(), clocks=SimpleNamespace(sentence=""))
    cycle = PLAN.rules.cycle_seconds
    status = count.status(engine(), node, small_manifest(changes), 1000, PLAN.rules.clock.begin(0) + at * cycle)
    if expected is None:
        assert (status.share_done, status.seconds_left) == (None, None)
    else:
        assert status.share_done == pytest.approx(expected[0])
        assert status.seconds_left == pytest.approx(expected[1] * cycle)
