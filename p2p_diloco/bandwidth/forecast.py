"""Forecast the traffic of a run on this machine's connection, and the effect of bandwidth caps."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.protocol.round.traffic import (
    Encoded,
    Flow,
    contribution_budget,
    download_needed,
    entries_needed,
    exchange_flow,
    upload_needed,
)
from p2p_diloco.protocol.rules import RunRules
from p2p_diloco.rate import counted, format_rate
from p2p_diloco.transport.link import TransportLimits
from p2p_diloco.wording import format_bytes, format_seconds

DAY_SECONDS = 86_400.0
MONTH_DAYS = 30
STATE_BYTES_PER_ELEMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An event to report: its topic, text and figures."""

    topic: str
    text: str
    figures: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected traffic of a member.

    Attributes:
        cycle: bytes on the line per cycle, in which every fragment is exchanged once, headers included.
        largest: bytes in the round of the largest fragment.
        span_bytes: bytes of a contribution to the largest span.
    """

    cycle: Flow
    largest: Flow
    span_bytes: int
    cycle_seconds: float
    round_seconds: float
    state_bytes: int
    members: int


def forecast(
    rules: RunRules,
    *,
    members: int,
    reachable: int,
    is_reachable: bool,
    has_bootstrap: bool = False,
    share: float = 1.0,
) -> Forecast:
    """Compute the traffic of a member that trains; see `exchange_flow` for the arguments."""
    sizes = (rules.payload_bytes, rules.row_mean_bytes, rules.entry_bytes)
    sums = [[0, 0, 0] for _ in range(rules.clock.num_fragments)]
    for place, of_spans in enumerate(sizes):
        for span, size in of_spans.items():
            sums[span.fragment][place] += size

    def flow(contribution: int, row_mean: int, entry: int) -> Flow:
        return exchange_flow(
            Encoded(contribution=contribution, row_mean=row_mean, entry=entry),
            members=members,
            group_size=rules.group_size,
            reachable=reachable,
            is_reachable=is_reachable,
            has_bootstrap=has_bootstrap,
            share=share,
        )

    return Forecast(
        cycle=flow(*map(sum, zip(*sums, strict=True))).with_headers(),
        largest=max((flow(*each) for each in sums), key=lambda each: each.sent + each.received),
        span_bytes=max(rules.payload_bytes.values()),
        cycle_seconds=rules.clock.num_fragments * rules.clock.round_seconds,
        round_seconds=rules.clock.round_seconds,
        state_bytes=STATE_BYTES_PER_ELEMENT * sum(rules.span_elements.values()),
        members=members,
    )


def traffic_notice(expected: Forecast) -> Notice:
    """Return a notice with the expected traffic."""
    up, down = expected.cycle.sent, expected.cycle.received
    days = DAY_SECONDS / expected.cycle_seconds
    every = format_seconds(expected.cycle_seconds).removesuffix(" 00 s")
    if format_bytes(up) == format_bytes(down):
        amounts = f"{format_bytes(up)} each way every {every}, {format_bytes(days * up)} a day each way"
    else:
        amounts = (
            f"{format_bytes(up)} up and {format_bytes(down)} down every {every}, "
            f"{format_bytes(days * up)} and {format_bytes(days * down)} a day"
        )
    text = (
        f"with {counted(expected.members, 'trainer')} about {amounts}; a new peer downloads "
        f"{format_bytes(expected.state_bytes)} once; limit this with --max-upload and --max-download"
    )
    figures: dict[str, float] = {
        "members": expected.members,
        "up_bytes": round(up),
        "down_bytes": round(down),
        "cycle_seconds": expected.cycle_seconds,
        "state_bytes": expected.state_bytes,
        "upload_needed": round(8 * upload_needed(expected.largest, expected.round_seconds)),
        "download_needed": round(8 * download_needed(expected.largest, expected.round_seconds)),
    }
    return Notice(topic="traffic", text=text, figures=figures)


def month_sentence(rules: RunRules) -> tuple[str, float]:
    """Return the traffic of a member at full rate as a sentence for people, and the bytes of 30 days both ways.

    In a run of few members it is less: down to half with two.
    """
    expected = forecast(rules, members=rules.group_size, reachable=rules.group_size, is_reachable=True)
    days = DAY_SECONDS / expected.cycle_seconds
    up, down = days * expected.cycle.sent, days * expected.cycle.received
    month = MONTH_DAYS * (up + down)
    text = (
        f"at full rate this run sends up to {format_bytes(up)} and receives up to {format_bytes(down)} a day, "
        f"{format_bytes(month)} in {MONTH_DAYS} days"
    )
    return text, month


def cap_notices(expected: Forecast, limits: TransportLimits) -> list[Notice]:
    """Return a notice for each cap that is below what the run needs."""
    texts = (
        _upload_text(expected, limits.upload_bytes_per_second),
        _download_text(expected, limits.download_bytes_per_second),
    )
    return [Notice(topic="cap", text=text, figures={}) for text in texts if text is not None]


def _upload_text(expected: Forecast, cap: float | None) -> str | None:
    flow, seconds = expected.largest, expected.round_seconds
    needed = upload_needed(flow, seconds)
    if cap is None or cap >= needed:
        return None
    needs = f"this run needs about {format_rate(8 * needed)} up; --max-upload {format_rate(8 * cap)}"
    budget = contribution_budget(cap, seconds, handed_out=flow.handed_out)
    if budget == 0.0:
        return (
            f"{needs} is too little even for the entries of the spans that this peer averages: they reach all peers "
            "late; raise the cap, or join with --dial-out-only, which averages nothing"
        )
    if budget < expected.span_bytes:
        return (
            f"{needs} is too little to send any span in time: this peer contributes almost nothing; it still receives "
            "all entries"
        )
    share = min(budget / flow.contributed, 1.0)
    turns = f", each part of the model in about 1 round of {round(1 / share)}" if share < 2 / 3 else ""
    return (
        f"{needs} lets this peer send about {100 * share:.0f} % of a contribution{turns}; it still receives all entries"
    )


def _download_text(expected: Forecast, cap: float | None) -> str | None:
    flow, seconds = expected.largest, expected.round_seconds
    if cap is None or cap >= download_needed(flow, seconds):
        return None
    entries = entries_needed(flow, seconds)
    if cap < entries:
        return (
            f"this run's entries alone need about {format_rate(8 * entries)} down; with --max-download "
            f"{format_rate(8 * cap)} this peer cannot follow the run and will rarely be ready; raise the cap to at "
            "least that, preferably 1.5 times as much"
        )
    return (
        f"this run needs about {format_rate(8 * download_needed(flow, seconds))} down; with --max-download "
        f"{format_rate(8 * cap)} this peer receives the entries, but contributions to the spans that it averages "
        "arrive late and are left out; raise the cap, or join with --dial-out-only, which averages nothing"
    )
