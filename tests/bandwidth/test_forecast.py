"""The forecast shown at join follows the manifest, and a cap below it is reported with its cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_diloco.bandwidth.forecast import Forecast, cap_notices, forecast, month_sentence, traffic_notice
from p2p_diloco.ids import SpanId
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.transport.link import TransportLimits
from simulator.run import run_rules

PARAMETERS = 128_000_000
FRAGMENTS = 4
SPANS = 32
MBIT = 1e6 / 8


def rules(cycle_seconds: float = 1800.0) -> RunRules:
    """Return the rules for a model of 128 million parameters: int4 both ways, one cycle every half hour."""
    spans = [SpanId(fragment, index) for fragment in range(FRAGMENTS) for index in range(SPANS)]
    elements = PARAMETERS // len(spans)
    base = run_rules(group_size=16)
    clock = replace(base.clock, round_seconds=cycle_seconds / FRAGMENTS, num_fragments=FRAGMENTS)
    return replace(
        base,
        clock=clock,
        num_spans=(SPANS,) * FRAGMENTS,
        span_elements=dict.fromkeys(spans, elements),
        payload_bytes=dict.fromkeys(spans, round(elements * 4.25 / 8)),
        row_mean_bytes=dict.fromkeys(spans, round(elements * 8.25 / 8)),
        entry_bytes=dict.fromkeys(spans, round(elements * 4.25 / 8)),
    )


def expected(members: int = 16, *, is_reachable: bool = True, cycle_seconds: float = 1800.0) -> Forecast:
    reachable = members if is_reachable else members - 1
    return forecast(rules(cycle_seconds), members=members, reachable=reachable, is_reachable=is_reachable)


def cap_texts(of: Forecast, *, up: float | None = None, down: float | None = None) -> list[str]:
    limits = TransportLimits(upload_bytes_per_second=up, download_bytes_per_second=down)
    return [notice.text for notice in cap_notices(of, limits)]


def test_the_traffic_of_a_month_is_that_of_a_full_row_both_ways() -> None:
    sentence, month_bytes = month_sentence(rules())
    assert sentence == ("at full rate this run sends up to 6.4 GB and receives up to 6.4 GB a day, 383.7 GB in 30 days")
    assert month_bytes == pytest.approx(30 * 48 * 2 * 133.2e6, rel=1e-3)


def test_the_traffic_notice_gives_text_and_figures() -> None:
    notice = traffic_notice(expected())
    assert notice.topic == "traffic"
    assert notice.text == (
        "with 16 trainers about 133.2 MB each way every 30 min, 6.4 GB a day each way; a new peer downloads "
        "1.0 GB once; limit this with --max-upload and --max-download"
    )
    assert notice.figures["up_bytes"] == notice.figures["down_bytes"] == pytest.approx(133.2e6, rel=1e-3)
    assert notice.figures["cycle_seconds"] == 1800.0
    # 31.9 MB in a round of 450 s; half of it, the contribution, by half time, on 85 % of the line.
    assert notice.figures["upload_needed"] == pytest.approx(8 * 31.9e6 / 450 / 0.85, rel=1e-2)


def test_a_peer_that_only_dials_out_sends_and_receives_other_amounts() -> None:
    at_home = traffic_notice(expected(is_reachable=False)).text
    assert "71.1 MB each way every 30 min" in at_home, "its contribution up, all entries down"
    few = forecast(rules(), members=16, reachable=2, is_reachable=True)
    assert few.cycle.sent > 4 * expected().cycle.sent, "the few that can be dialled reduce for all"


def test_upload_and_download_are_both_shown_if_they_differ() -> None:
    base = rules()
    sparse = replace(base, payload_bytes={span: size // 10 for span, size in base.payload_bytes.items()})
    notice = traffic_notice(forecast(sparse, members=16, reachable=15, is_reachable=False))
    assert "about 7.1 MB up and 71.1 MB down every 30 min, 341.1 MB and 3.4 GB a day" in notice.text


def test_caps_that_are_wide_enough_cause_no_notice() -> None:
    assert cap_texts(expected()) == []
    assert cap_texts(expected(), up=1.0 * MBIT, down=1.0 * MBIT) == []


@pytest.mark.parametrize(
    ("share", "says"),
    [
        (0.5, "lets this peer send about 50 % of a contribution, each part of the model in about 1 round of 2"),
        (0.2, "lets this peer send about 20 % of a contribution, each part of the model in about 1 round of 5"),
        (0.9, "lets this peer send about 90 % of a contribution; it still receives all entries"),
    ],
)
def test_an_upload_cap_below_the_need_reports_the_share_that_fits(share: float, says: str) -> None:
    of = expected(is_reachable=False)
    needed = float(traffic_notice(of).figures["upload_needed"])
    (text,) = cap_texts(of, up=share * needed / 8)
    assert text.startswith("this run needs about 711 kbit/s up; --max-upload ")
    assert says in text
    assert text.endswith("it still receives all entries")


def test_an_upload_cap_below_what_reducing_needs_is_reported() -> None:
    (text,) = cap_texts(expected(), up=0.2 * MBIT)
    assert "is too little even for the entries of the spans that this peer averages" in text
    assert "--dial-out-only" in text


def test_an_upload_cap_too_small_for_any_span_is_reported() -> None:
    (text,) = cap_texts(expected(is_reachable=False, cycle_seconds=20.0), up=0.6 * MBIT)
    assert "is too little to send any span in time" in text


def test_a_download_cap_below_the_entries_reports_the_rate_they_need() -> None:
    of = expected(cycle_seconds=180.0)
    (text,) = cap_texts(of, down=1.0 * MBIT)
    assert text.startswith(
        "this run's entries alone need about 3.33 Mbit/s down; with --max-download 1 Mbit/s this peer"
    )
    assert "cannot follow the run" in text
    (text,) = cap_texts(of, down=4.0 * MBIT)
    assert "receives the entries, but contributions" in text
    assert len(cap_texts(of, up=0.2 * MBIT, down=1.0 * MBIT)) == 2
