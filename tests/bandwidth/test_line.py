"""Notices about the line are repeated only when they change; rates cover the last seconds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import small_plan

from p2p_diloco.bandwidth.forecast import Notice, forecast
from p2p_diloco.bandwidth.uplink import GROWTH, MOST_FORECASTS, WINDOW_SECONDS, UplinkWatch
from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.protocol.clock import CONTRIBUTE_SHARE
from p2p_diloco.protocol.membership.local import Conditions
from p2p_diloco.protocol.round.traffic import USABLE_SHARE
from p2p_diloco.protocol.wire.member import FULL_SHARE
from p2p_diloco.rate import WIRE_SHARE, format_rate
from p2p_diloco.transport.link import TransportCounters, TransportLimits
from p2p_diloco.transport.rate_limit import wire_bytes

PLAN = small_plan()


def peer_id(number: int) -> PeerId:
    return PeerId(sha256(b"%d" % number))


def engine(
    members: int,
    *,
    trains: bool = True,
    has_roster: bool = True,
    alive: dict[PeerId, Any] | None = None,
    has_bootstrap: bool = False,
) -> Any:
    listed = [SimpleNamespace(peer=peer_id(number), reduces=True, trains=True) for number in range(members)]
    if has_bootstrap:
        listed.append(SimpleNamespace(peer=PeerId(sha256(b"boot")), reduces=True, trains=False))
    peers = frozenset(member.peer for member in listed)
    roster = SimpleNamespace(members=listed, peers=lambda: peers)
    engine = SimpleNamespace(
        book=SimpleNamespace(in_force=roster if has_roster else None, grid=lambda: GRID),
        linked=frozenset(peer_id(number) for number in range(1, members)),
        me=SimpleNamespace(peer=peer_id(0), trains=trains),
        membership=SimpleNamespace(liveness=SimpleNamespace(alive=lambda now: alive or {})),
        rules=PLAN.rules,
        conditions=Conditions(can_be_dialled=True),
    )
    engine.set_conditions = lambda conditions: setattr(engine, "conditions", conditions)
    return engine


GRID = SimpleNamespace(share_of=lambda peer: 1.0)


def watch(**limits: float) -> UplinkWatch:
    return UplinkWatch(TransportLimits(**limits), TransportCounters())  # type: ignore[arg-type]


def test_there_is_no_notice_without_a_roster_or_for_a_peer_that_does_not_train() -> None:
    assert watch().notices(engine(2, has_roster=False), 0.0) == []
    assert watch().notices(engine(2, trains=False), 0.0) == []


def test_traffic_is_reported_once_and_again_when_it_changes() -> None:
    line = watch()
    assert [notice.topic for notice in line.notices(engine(4), 0.0)] == ["traffic"]
    assert line.notices(engine(4), 1.0) == []
    assert line.notices(engine(5), 2.0) == [], "a small increase is not reported"
    (more,) = line.notices(engine(30), 3.0)
    assert more.text.startswith("with 30 trainers about")
    (fewer,) = line.notices(engine(2), 4.0)
    assert fewer.text.startswith("with 2 trainers about")


def test_a_lone_peer_gets_the_forecast_for_two_trainers() -> None:
    (notice,) = watch().notices(engine(1), 0.0)
    assert notice.text.startswith("with 2 trainers about")
    assert notice.figures["up_bytes"]


@pytest.mark.parametrize(("members", "up", "down"), [(1, 1 / 2, 0), (2, 2 / 3, 1 / 3), (3, 2 / 3, 2 / 3)])
def test_a_bootstrap_peer_on_the_roster_reduces_for_fewer_than_three(members: int, up: float, down: float) -> None:
    (notice,) = watch().notices(engine(members, has_bootstrap=True), 0.0)
    assert notice.text.startswith(f"with {members} trainer")
    contribution, entry = (sum(sizes.values()) for sizes in (PLAN.rules.payload_bytes, PLAN.rules.entry_bytes))
    followed = 1 / 2 if members == 1 else 2 / 3
    assert notice.figures["up_bytes"] == pytest.approx(WIRE_SHARE * up * (contribution + entry), abs=1)
    received = WIRE_SHARE * (down * contribution + followed * entry)
    assert notice.figures["down_bytes"] == pytest.approx(received, abs=1)


def test_live_peers_count_only_if_they_train() -> None:
    alive = {peer_id(number): SimpleNamespace(can_be_dialled=True, trains=number != 1) for number in range(1, 4)}
    (notice,) = watch().notices(engine(2, alive=alive), 0.0)
    assert notice.figures["members"] == 3


def test_a_cap_below_the_need_is_reported_with_the_traffic() -> None:
    topics = [notice.topic for notice in watch(upload_bytes_per_second=1.0).notices(engine(4), 0.0)]
    assert topics == ["traffic", "cap"]


def test_rates_cover_the_last_seconds_and_count_wire_bytes() -> None:
    line = watch()
    counters = line.counters
    assert line.rates(100.0) == (0.0, 0.0)
    for second in range(1, 31):
        counters.bulk.bytes_sent += 1_000_000 if second <= 15 else 2_000_000
        counters.control.bytes_received += 1000
        counters.control.frames_received += 1
        up, down = line.rates(100.0 + second)
    assert up == pytest.approx(8 * wire_bytes(2_000_000))
    assert down == pytest.approx(8 * wire_bytes(1000, num_frames=1))
    assert line.rates(100.0 + 30 + WINDOW_SECONDS)[0] == 0.0


# -- share of averaging that the line carries


def needed(members: int) -> float:
    """Return the rate that distributes all entries of an equal share in time, in bytes per second for vectors."""
    flow = forecast(PLAN.rules, members=members, reachable=members, is_reachable=True).largest
    return flow.handed_out / ((1.0 - CONTRIBUTE_SHARE) * PLAN.rules.clock.round_seconds)


def test_changed_caps_are_reported_with_their_effect_and_the_rounds_follow_them() -> None:
    line, peer = watch(), engine(4)
    line.steer(peer, 0.0)
    assert line.follow(line.limits) == []
    cap = 0.5 * needed(4) / USABLE_SHARE
    (capped,) = line.follow(TransportLimits(upload_bytes_per_second=cap))
    assert (capped.topic, capped.text) == ("cap", f"upload is now capped at {format_rate(8 * cap)}")
    assert [notice.topic for notice in line.steer(peer, 1.0)] == ["share", "traffic", "cap"]
    assert (peer.conditions.upload_bytes_per_second, peer.conditions.share) == (cap, 2)
    free = line.follow(TransportLimits(download_bytes_per_second=1e6))
    assert [notice.text for notice in free] == ["upload is no longer capped", "download is now capped at 8 Mbit/s"]
    line.follow(TransportLimits())
    assert [notice.topic for notice in line.steer(peer, 2.0)] == ["share", "traffic"]
    assert (peer.conditions.upload_bytes_per_second, peer.conditions.share) == (None, FULL_SHARE)


def test_what_a_line_has_shown_under_a_cap_is_forgotten_without_it() -> None:
    """The cap was saturated, not the line."""
    rate = needed(4)
    line, _ = full_line(4, 3, rate, TransportLimits(upload_bytes_per_second=rate))
    assert line.shown is None
    line.follow(TransportLimits())
    assert line.upload_bytes_per_second() is None


def test_a_line_that_was_never_full_gets_a_full_share() -> None:
    assert watch().share(engine(4), 0.0) == FULL_SHARE


@pytest.mark.parametrize(("line", "share"), [(2.1, 8), (1.0, 4), (0.5, 2), (0.01, 1)])
def test_a_cap_is_taken_as_the_rate_of_the_line(line: float, share: int) -> None:
    cap = line * needed(4) / USABLE_SHARE
    assert watch(upload_bytes_per_second=cap).share(engine(4), 0.0) == share
    assert watch(download_bytes_per_second=cap).share(engine(4), 0.0) == share


@pytest.mark.parametrize(("num_waiting", "share"), [(3, 4), (2, 4), (1, 8), (0, 8)])
def test_a_line_on_which_vectors_wait_for_most_peers_shows_its_rate(num_waiting: int, share: int) -> None:
    """A single peer for which vectors wait may just not be reading."""
    assert shown(4, num_waiting, needed(4)) == share


def test_one_of_two_members_that_does_not_read_does_not_make_the_line_thin() -> None:
    assert shown(2, 1, 0.01 * needed(2)) == FULL_SHARE


@pytest.mark.parametrize(
    ("line", "cap", "known"), [(0.99, 1.0, 1.0), (0.5, 1.0, 0.5), (0.5, None, 0.5), (9.0, 1.0, 1.0)]
)
def test_the_upload_rate_is_the_cap_or_a_lower_rate_that_the_line_showed(
    line: float, cap: float | None, known: float
) -> None:
    rate = needed(4)
    limits = TransportLimits(upload_bytes_per_second=cap * rate if cap is not None else None)
    watched, _ = full_line(4, 3, line * rate, limits)
    assert watched.upload_bytes_per_second() == pytest.approx(known * rate, rel=0.01)
    assert (watched.shown is None) == (known == cap)


def test_a_peer_that_averages_nothing_tries_more_after_saturation_and_others_do_not() -> None:
    rate = needed(4)
    for share, factor in ((1.0, 1.0), (0.0, GROWTH)):
        line, _ = full_line(4, 3, 0.5 * rate, TransportLimits())
        state = engine(4)
        state.book.grid = lambda share=share: SimpleNamespace(share_of=lambda peer: share)
        clock = PLAN.rules.clock
        last = clock.round_at(clock.begin(0) + 10.0)
        for later in range(2):
            line.steer(state, clock.begin(last + later) + 0.1)
        budget = state.conditions.upload_bytes_per_second
        assert budget == pytest.approx(factor * 0.5 * rate, rel=0.01)


def test_the_rate_of_a_line_that_was_never_full_is_unknown() -> None:
    assert watch().upload_bytes_per_second() is None


def test_a_very_thin_line_gets_the_smallest_share() -> None:
    assert shown(4, 3, 10.0) == 1


def test_a_line_that_moves_nothing_has_no_rate() -> None:
    assert shown(4, 3, 0.0) == FULL_SHARE


def shown(members: int, num_waiting: int, rate: float) -> int:
    return full_line(members, num_waiting, rate, TransportLimits())[1]


def full_line(members: int, num_waiting: int, rate: float, limits: TransportLimits) -> tuple[UplinkWatch, int]:
    """Let ten seconds pass in which vectors wait for some peers; return the watch and the share that it finds."""
    waiting = {peer_id(number) for number in range(1, 1 + num_waiting)}
    now = [0.0]
    line = UplinkWatch(limits, TransportCounters(), lambda peer: int(peer in waiting), lambda: now[0])
    state = engine(members)
    for _ in range(10):
        now[0] += 1.0
        found = line.share(state, PLAN.rules.clock.begin(0) + now[0])
        line.counters.bulk.bytes_read += int(rate / wire_bytes(1))
        if rate > 0.0:
            line.counters.bulk.last_read_at = now[0]
    return line, found


def test_a_peer_that_does_not_average_or_has_no_roster_gets_a_full_share() -> None:
    line = watch(upload_bytes_per_second=1.0)
    assert line.share(engine(4, trains=False), 0.0) == FULL_SHARE
    assert line.share(engine(4, has_roster=False), 0.0) == FULL_SHARE
    home = engine(4)
    home.conditions = Conditions()
    assert line.share(home, 0.0) == FULL_SHARE


def test_the_forecast_follows_the_share_dealt_by_the_roster() -> None:
    line, state = watch(), engine(4)
    (whole, *_) = line.notices(state, 0.0)
    state.book.grid = lambda: SimpleNamespace(share_of=lambda peer: 0.1)
    (less, *_) = line.notices(state, 1.0)
    assert less.figures["up_bytes"] < 0.8 * whole.figures["up_bytes"]
    state.book.grid = lambda: None
    (again, *_) = line.notices(state, 2.0)
    assert again.figures == whole.figures, "a peer without a roster gets the full forecast"


def test_a_peer_that_cannot_be_dialled_any_more_moves_less_even_if_another_takes_its_place() -> None:
    others = [SimpleNamespace(can_be_dialled=False, trains=True) for _ in range(2)]
    line, state = watch(), engine(3, alive={peer_id(1): others[0], peer_id(2): others[1]})
    (reducing,) = line.notices(state, 0.0)
    state.conditions, others[0].can_be_dialled = replace(state.conditions, can_be_dialled=False), True
    (at_home,) = line.notices(state, 1.0)
    assert at_home.figures["up_bytes"] == reducing.figures["up_bytes"] / 2, "a contribution, where it sent two entries"


def test_few_forecasts_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    line, made = watch(), 0

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal made
        made += 1
        return forecast(*args, **more)

    monkeypatch.setattr("p2p_diloco.bandwidth.uplink.forecast", counted)
    sizes = range(2, 2 * MOST_FORECASTS)
    for members in (*sizes, sizes[-1], *sizes):
        line.notices(engine(members), 0.0)
    assert 2 * len(sizes) - MOST_FORECASTS <= made <= 2 * len(sizes)


class DrawnLine(UplinkWatch):
    """A line with a share and rate set by the test, and no notices."""

    drawn_share = FULL_SHARE
    drawn_rate: float | None = None
    shown = property(lambda self: self.drawn_rate)

    def share(self, engine: Any, now: float) -> int:
        return self.drawn_share

    def notices(self, engine: Any, now: float) -> list[Notice]:
        return []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [(8, 4, "carries 1 of"), (8, 1, "carries 0.25 of"), (1, 8, "a full share of averaging again")],
)
def test_a_peers_averaging_share_follows_its_line_and_is_reported_once(before: int, after: int, words: str) -> None:
    line, peer = DrawnLine(TransportLimits(), TransportCounters()), engine(4)
    peer.conditions, line.drawn_share = Conditions(share=before), after
    (notice,) = line.steer(peer, 0.0)
    assert words in notice.text
    assert notice.figures == {"averaging_share": after / 4}
    assert peer.conditions.share == after
    assert line.steer(peer, 1.0) == []


def test_the_upload_budget_follows_the_rate_that_the_line_showed() -> None:
    line, peer = DrawnLine(TransportLimits(), TransportCounters()), engine(4)
    reported = []
    for shown in (None, 2.5e5, 2.6e5, 1.25e5, None, None):
        line.drawn_rate = shown
        reported += line.steer(peer, 0.0)
        assert peer.conditions.upload_bytes_per_second == shown
    full, fuller, empty = reported
    assert full.text == "upload saturated at about 2 Mbit/s; sending only the spans that fit"
    assert full.figures == {"upload_shown": 2e6}
    assert fuller.figures == {"upload_shown": 1e6}
    assert empty.text == "upload no longer saturated; sending all spans again"


def test_notices_of_the_line_come_with_their_consequences() -> None:
    topics = [notice.topic for notice in watch(upload_bytes_per_second=1.0).steer(engine(4), 0.0)]
    assert topics == ["share", "traffic", "cap"]
