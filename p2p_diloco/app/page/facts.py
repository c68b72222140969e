"""Content of the page, derived from a peer's files: values with their texts, in the order in which they are read.

A public page gets no address, key or id of a member, and no sentence of a peer in which one could be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from p2p_diloco.app.page.charts import Line, chart
from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, clean_text
from p2p_diloco.protocol.wire.peer_name import named
from p2p_diloco.rate import counted, format_rate, parse_bytes, parse_rate
from p2p_diloco.status.event_log import PeerEvent, event_line
from p2p_diloco.status.history import SILENT_SECONDS, Point, RoundRow
from p2p_diloco.status.status_file import PeerLine, PeerStatus
from p2p_diloco.storage.member_files import MemberRecord
from p2p_diloco.wording import (
    NOTHING,
    format_bytes,
    format_count,
    format_how_far,
    format_loss,
    format_seconds,
    format_share,
    own_command,
    plain_words,
    short_peer,
)

LATE_SECONDS = 10.0
STRIP_ROUNDS = 120
SHOWN_EVENTS = 30
STALLED_ROUNDS = 8
"""Closed rounds in a row without a result beyond which the page says that the run stands still."""
DAY_SECONDS = 86_400.0
_HIDDEN_TOPICS = frozenset({"round", "evaluation", "skipped"})
SORTS = ("name", "state", "tokens", "rate", "loss", "share", "since", "seen", "group")

Over = Literal["time", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value, with the text that people read; empty `value` if it is not known."""

    name: str
    text: str
    value: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """A row of the table of members: figures by the key of their column, and keys by which rows are sorted."""

    figures: dict[str, Figure]
    keys: dict[str, float | str]
    is_silent: bool
    is_self: bool
    group: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMark:
    """A round of the strip: full, partial, empty, and whether a roster had just been certified without a majority."""

    kind: Literal["full", "partial", "skipped"]
    is_degraded: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer's files at one time.

    Attributes:
        members: who is and was in the run, by id.
        is_running: whether the process that wrote the status is alive.
        now: Unix seconds.
    """

    status: PeerStatus
    points: Sequence[Point]
    rounds: Sequence[RoundRow]
    events: Sequence[PeerEvent]
    members: Mapping[str, MemberRecord]
    is_running: bool
    now: float


def title(view: PeerView) -> str:
    """Return the name of the run."""
    return clean_text(view.status.run_name) or "a run"


def sentence(view: PeerView) -> str:
    """Return the run in a few sentences for somebody who sees the page for the first time."""
    status = view.status
    if not status.run:
        return "This peer has not yet reached the run."
    size = f" with {format_count(status.parameters)} parameters" if status.parameters else ""
    num = status.num_members
    if not view.is_running:
        who = f"When this machine last followed it, {counted(num, 'machine')} took part."
    elif num:
        who = f"{counted(num, 'machine')} now {'trains' if num == 1 else 'train'} it{' together' * (num > 1)}."
    else:
        who = "No machine trains it at the moment."
    since = f" This machine has followed the run since {day(view.points[0].at)}." if view.points else ""
    what = f"{title(view)} is a model{size}, trained by machines of many people together, without a server."
    return f"{what} {who}{since}"


def alarms(view: PeerView, *, is_public: bool) -> list[str]:
    """Return what is wrong, with what to do, the worst first; nothing if all is well."""
    status, found = view.status, []
    age = max(0.0, view.now - status.updated)
    if status.phase != "finished" and not view.is_running:
        found.append(
            f"This machine's peer is not running; its last status is from {format_seconds(age)} ago. "
            + ("" if is_public else "Start it again with the command that you used to join.")
        )
    elif status.phase != "finished" and age > LATE_SECONDS:
        found.append(
            f"This peer has written no status for {format_seconds(age)}: its process is stopped, or the machine or the "
            "disk is too busy."
        )
    last = view.rounds[-STALLED_ROUNDS:]
    if len(last) == STALLED_ROUNDS and not any(row.entries for row in last) and status.num_members:
        found.append(
            f"The last {STALLED_ROUNDS} rounds had no result, so the shared model stands still. Machines that were "
            "stopped return when they are started again."
        )
    if is_public:
        return found
    peers_own = (status.trouble, status.clock, status.pace, *status.influence)
    found += [_sentence(plain_words(clean_text(text))) for text in peers_own if text]
    if status.steps_undone:
        found.append(f"{counted(status.steps_undone, 'step')} undone here, because of a NaN or an infinity.")
    if status.disk_saving != "all":
        found.append(f"A limit of the disk is reached: this peer writes {status.disk_saving}.")
    if status.reach and not status.reachable and status.role == "bootstrap":
        found.append(_sentence(status.reach))
    return found


def figures(view: PeerView) -> list[Figure]:
    """Return the figures of the run."""
    status = view.status
    rate = view.points[-1].swarm_rate if view.points else None
    tokens = view.points[-1].swarm_tokens if view.points else None
    return [
        Figure(
            name="loss of the shared model",
            text=format_loss(status.anchor_loss),
            value=_value(status.anchor_loss),
            hint="nats per token of text that no machine trains on; lower is better",
        ),
        Figure(
            name="machines ready",
            text=f"{status.num_ready} of {status.num_members}",
            value=str(status.num_ready),
            hint="of those that train, how many have the current model",
        ),
        Figure(
            name="tokens per second, all together",
            text=format_count(rate),
            value=_value(rate),
            hint="as each machine reports it",
        ),
        Figure(
            name="tokens, all together",
            text=format_count(tokens),
            value=_value(tokens),
            hint="since this machine follows the run, as each machine reports them",
        ),
        Figure(
            name="contributions that count",
            text=format_share(status.participation),
            value=_value(status.participation),
            hint="share of the machines' work that arrived in time to be averaged",
        ),
        Figure(name="round", text=str(status.round), value=str(status.round), hint="machines average once in each"),
        Figure(
            name="how far",
            text=format_how_far(status.share_done, status.seconds_left),
            value=_value(status.share_done),
            hint="of the planned length; the run goes on after it",
        ),
    ]


def loss_chart(view: PeerView, over: Over) -> str:
    """Return the losses as a chart, over time or over the tokens of all machines."""
    lines = [
        Line(name="shared model, held-out text", kind="first", points=_series(view.points, "anchor_loss", over)),
        Line(name="this machine, training", kind="second", points=_series(view.points, "loss", over)),
    ]
    x_text = _clock(view.points) if over == "time" else lambda tokens: format_count(float(round(tokens)))
    return chart("loss, logarithmic", lines, x_text=x_text, y_text=format_loss, is_log=True)


def rate_chart(view: PeerView) -> str:
    """Return the tokens per second of all machines over time."""
    line = Line(name="tokens per second", kind="first", points=_series(view.points, "swarm_rate", "time"))
    return chart("tokens per second, all machines", [line], x_text=_clock(view.points), y_text=format_count)


def _clock(points: Sequence[Point]) -> Callable[[float], str]:
    """Return how a time is written on an axis: as short as tells the points apart."""
    seconds = points[-1].at - points[0].at if points else 0
    form = (
        "%H:%M:%S"
        if seconds < 1_200
        else "%H:%M"
        if seconds < DAY_SECONDS
        else "%d %b"
        if seconds > 8 * DAY_SECONDS
        else ""
    )
    return lambda at: time.strftime(form, time.localtime(at)) if form else moment(at)


def _series(points: Sequence[Point], name: str, over: Over) -> list[tuple[float, float]]:
    return [
        (float(point.at if over == "time" else point.swarm_tokens), float(value))
        for point in points
        if (value := getattr(point, name)) is not None and not (name == "loss" and value == 0.0)
    ]


def strip(view: PeerView) -> list[RoundMark]:
    """Return the last rounds, oldest first."""
    marks = []
    before = view.rounds[0].degraded if view.rounds else 0
    for row in view.rounds[-STRIP_ROUNDS:]:
        kind: Literal["full", "partial", "skipped"] = "partial"
        if not row.entries:
            kind = "skipped"
        elif row.entries == row.spans and row.included >= row.possible:
            kind = "full"
        is_degraded, before = row.degraded > before, row.degraded
        text = (
            f"round {row.round}: {row.entries} of {row.spans} parts of the model averaged, "
            f"{row.included} of {row.possible} contributions"
            f"{', by fewer than half of the members' if is_degraded else ''}"
        )
        marks.append(RoundMark(kind=kind, is_degraded=is_degraded, text=text))
    return marks


def members(view: PeerView, *, sort: str, is_descending: bool, is_public: bool) -> list[MemberRow]:
    """Return this peer and the others, sorted by a column; rows without its value come last."""
    status = view.status
    rows = [_own_row(view, is_public=is_public)]
    for number, line in enumerate(status.peers, 1):
        rows.append(_row(line, number, view.members.get(line.peer), is_public=is_public))
    column = sort if sort in SORTS else "name"
    known = [row for row in rows if row.keys[column] not in ("", -1.0)]
    unknown = [row for row in rows if row.keys[column] in ("", -1.0)]
    return sorted(known, key=lambda row: row.keys[column], reverse=is_descending) + unknown


def _own_state(view: PeerView) -> str:
    status = view.status
    if not view.is_running:
        return status.phase if status.phase == "finished" else "not running"
    return status.paused or status.phase


def _own_row(view: PeerView, *, is_public: bool) -> MemberRow:
    status = view.status
    trains = status.role == "trainer"
    return _member_row(
        name=Figure(name="machine", text=named("this machine", "" if is_public else clean_text(status.name))),
        sort_name="",
        state=_own_state(view),
        tokens=float(status.tokens) if trains else None,
        rate=status.tokens_per_second if trains else None,
        loss=status.loss,
        share=status.weight,
        claimed=status.claimed_token_share,
        reachable=status.reachable,
        seen=0.0,
        group=status.row,
        since=None if (record := view.members.get(status.peer)) is None else record.since,
        is_self=True,
    )


def _row(line: PeerLine, number: int, record: MemberRecord | None, *, is_public: bool) -> MemberRow:
    peer = clean_text(line.peer)
    name = f"machine {number}" if is_public else named(short_peer(peer), clean_text(line.name))
    return _member_row(
        name=Figure(name="machine", text=name, hint="" if is_public else peer),
        sort_name=f"{number:06d}" if is_public else clean_text(line.name).lower() or f"~{peer}",
        state=member_state(line),
        tokens=line.steps * line.step_tokens if line.step_tokens is not None else None,
        rate=line.tokens_per_second if line.trains else None,
        loss=line.loss,
        share=line.weight,
        claimed=line.claimed_token_share,
        reachable=line.reachable,
        seen=line.seconds_since_heard,
        group=line.row,
        since=None if record is None else record.since,
        is_self=False,
    )


def _member_row(
    *,
    name: Figure,
    sort_name: str,
    state: str,
    tokens: float | None,
    rate: float | None,
    loss: float | None,
    share: float | None,
    claimed: float | None,
    reachable: bool,
    seen: float | None,
    group: int | None,
    since: float | None,
    is_self: bool,
) -> MemberRow:
    is_silent = seen is None or seen > SILENT_SECONDS
    ago = "now" if is_self else NOTHING if seen is None else f"{format_seconds(seen)} ago"
    figures = {
        "name": name,
        "state": Figure(name="state", text=state),
        "tokens": Figure(name="tokens", text=format_count(tokens), value=_value(tokens)),
        "rate": Figure(name="tokens/s", text=format_count(rate), value=_value(rate)),
        "loss": Figure(name="loss", text=format_loss(loss), value=_value(loss)),
        "share": Figure(
            name="share", text=format_share(share), value=_value(share), hint=f"claims {format_share(claimed)}"
        ),
        "reach": Figure(name="reachable", text="yes" if reachable else "dials out"),
        "since": Figure(name="since", text=NOTHING if since is None else day(since), value=_value(since)),
        "seen": Figure(name="last seen", text=ago, value=_value(seen)),
        "group": Figure(name="group", text=NOTHING if group is None else str(group + 1)),
    }
    keys: dict[str, float | str] = {
        "name": sort_name or " ",
        "state": state,
        **{
            key: -1.0 if value is None else float(value)
            for key, value in (
                ("tokens", tokens),
                ("rate", rate),
                ("loss", loss),
                ("share", share),
                ("since", since),
                ("seen", seen),
                ("group", group),
            )
        },
    }
    return MemberRow(figures=figures, keys=keys, is_silent=is_silent, is_self=is_self, group=group)


def member_state(line: PeerLine) -> str:
    """Return the state of another peer, as its heartbeats show it."""
    if line.seconds_since_heard is None or line.seconds_since_heard > SILENT_SECONDS:
        return "silent"
    if not line.trains:
        return "serving"
    if line.ready:
        return "training"
    return "paused" if line.steps > 0 and line.tokens_per_second == 0.0 else "catching up"


def machine(view: PeerView) -> list[Figure]:
    """Return what this machine has contributed, and what it costs."""
    status = view.status
    hours = _hours(view.points)
    rows = [
        Figure(name="state", text=_own_state(view)),
        Figure(name="tokens", text=format_count(float(status.tokens)), value=str(status.tokens)),
        Figure(name="steps", text=format_count(float(status.inner_steps)), value=str(status.inner_steps)),
        Figure(name="hours", text=f"{hours:.1f}", value=_value(hours)),
        Figure(name="share of the run", text=format_share(status.weight), value=_value(status.weight)),
        Figure(
            name="sent since the start",
            text=format_bytes(status.bytes_sent.total),
            value=str(status.bytes_sent.total),
        ),
        Figure(
            name="received since the start",
            text=format_bytes(status.bytes_received.total),
            value=str(status.bytes_received.total),
        ),
        Figure(
            name="this month",
            text=f"{format_bytes(status.month_sent)} sent, {format_bytes(status.month_received)} received",
            value=str(status.month_sent + status.month_received),
        ),
        Figure(name="upload now", text=_rate(status.upload_rate), value=_value(status.upload_rate)),
        Figure(name="download now", text=_rate(status.download_rate), value=_value(status.download_rate)),
    ]
    if forecast := _day_forecast(view.points):
        rows.append(Figure(name="traffic of a day", text=f"about {format_bytes(forecast)}", value=_value(forecast)))
    return [row for row in rows if status.role == "trainer" or row.name not in ("tokens", "steps", "share of the run")]


def limits(view: PeerView) -> list[tuple[str, str]]:
    """Return the limits of this machine that are in force."""
    return [(key.replace("_", " "), _limit(key, text)) for key, text in view.status.limits.items()]


def _limit(key: str, text: str) -> str:
    try:
        if key in ("max_upload", "max_download"):
            return format_rate(parse_rate(text, key))
        return format_bytes(parse_bytes(text, key)) if key in ("monthly_quota", "disk_cap", "disk_free") else text
    except ConfigError:
        return text


def events(view: PeerView) -> list[tuple[str, str]]:
    """Return the last events with their time, newest first."""
    shown = [event for event in view.events if event.topic not in _HIDDEN_TOPICS]
    return [
        (moment(event.time), plain_words(clean_text(event_line(event)))) for event in shown[: -SHOWN_EVENTS - 1 : -1]
    ]


def organiser_lines(folder: Path) -> list[tuple[str, str]]:
    """Return what needs a terminal on this machine, as the exact lines to run.

    Args:
        folder: state directory of the peer.
    """
    where = () if folder == PeerSettings().state_directory else ("--state-directory", str(folder))
    return [
        ("name this machine", own_command("id", "--name", "NAME", *where)),
        ("list who is and was there", own_command("members", *where)),
        ("count whose tokens are in the model", own_command("members", "--credit", *where)),
        ("write the model as files", own_command("export", "model", *where)),
        ("let the model write", own_command("sample", "Once upon a time", *where)),
    ]


def _hours(points: Sequence[Point]) -> float:
    """Return the hours in which this peer trained, by points that are at most an hour apart."""
    gaps = ((after.at - before.at, after.tokens_per_second) for before, after in pairwise(points))
    return sum(gap for gap, rate in gaps if gap <= 3_600 and rate > 0.0) / 3_600


def _day_forecast(points: Sequence[Point]) -> float | None:
    """Return the bytes of a day at the rate of the last hour; None if less than a minute is known."""
    recent = [point for point in points if points[-1].at - point.at <= 3_600] if points else []
    while len(recent) > 1 and recent[0].sent + recent[0].received > recent[-1].sent + recent[-1].received:
        recent = recent[1:]  # an earlier start
    seconds = recent[-1].at - recent[0].at if recent else 0
    if seconds < 60:
        return None
    first, last = recent[0], recent[-1]
    return (last.sent + last.received - first.sent - first.received) / seconds * DAY_SECONDS


def _rate(bits: float | None) -> str:
    return NOTHING if bits is None else format_rate(bits)


def _value(number: float | None) -> str:
    return "" if number is None else repr(number)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def day(at: float) -> str:
    """Return the date of a time on this machine's clock."""
    return time.strftime("%d %b %Y", time.localtime(at))


def moment(at: float) -> str:
    """Return date and time of day."""
    return time.strftime("%d %b %H:%M", time.localtime(at))
