"""Format a peer's status for people: a table on a terminal, one line elsewhere."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_diloco.protocol.wire.peer_name import named
from p2p_diloco.rate import counted, format_part
from p2p_diloco.status.status_file import PeerLine, PeerStatus
from p2p_diloco.wording import (
    NOTHING,
    format_bytes,
    format_count,
    format_loss,
    format_seconds,
    format_share,
    short_peer,
)

MAX_PEER_ROWS = 24
LOG_WIDTH = 120
"""Width in columns of output that does not go to a terminal."""
_SILENT_SECONDS = 10.0


def status_table(status: PeerStatus) -> RenderableType:
    """Return the terminal view: one row for the swarm, one for this peer, then every other peer."""
    shares = [Text(_shares(status))] if _shares(status) else []
    return Group(_heading(status), *_notes(status), _figures(status), *shares, _peers(status))


def status_line(status: PeerStatus) -> str:
    """Return the same as one line for logs, with every value labelled."""
    parts = [
        f"round {status.round}",
        _phase(status),
        _ready(status, "trainer"),
        *([f"{len(status.grid)} rows"] if len(status.grid) > 1 else []),
        f"loss {format_loss(status.loss)}",
        f"shared model {format_loss(status.anchor_loss)}",
        f"{format_count(status.tokens_per_second)} tokens/s",
        f"participation {format_share(status.participation)}",
        *(f"{name} {share}" for name, share in _length_sent(status)),
        f"sent {format_bytes(status.bytes_sent.total)}",
        f"received {format_bytes(status.bytes_received.total)}",
        *filter(None, (_shares(status), status.trouble, _undone(status), status.pace, status.clock, *status.influence)),
    ]
    return ", ".join(parts)


def _heading(status: PeerStatus) -> Text:
    name = status.run_name or "run"
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{name} {status.run[:8]}", style="bold")
    text.append(f"  {status.role} {named(short_peer(status.peer), status.name)}  ")
    text.append(_phase(status), style=_phase_style(status))
    text.append(f"  round {status.round}  roster {status.roster}")
    if status.degraded_rosters:
        text.append(f" (degraded rosters: {status.degraded_rosters})", style="yellow")
    text.append(f"  {_ready(status)}")
    if len(status.grid) > 1:
        text.append(f"  {len(status.grid)} rows of {_sizes(status.grid)}")
    return text


def _notes(status: PeerStatus) -> list[Text]:
    """Return notes: whether others can dial this peer, and what is wrong, if anything."""
    notes = [Text(status.reach, style="" if status.reachable else "yellow")] if status.reach else []
    return notes + [
        Text(note, style="bold yellow")
        for note in (status.trouble, _undone(status), status.pace, status.clock, *status.influence, _disk_note(status))
        if note
    ]


def _shares(status: PeerStatus) -> str:
    """Return this peer's shares of the tokens, by what members claim, and of the weight; empty if it has neither."""
    if status.weight is None and status.claimed_token_share is None:
        return ""
    tokens, weight = format_share(status.claimed_token_share), format_share(status.weight)
    return f"this peer: tokens {tokens} (as members claim them), weight {weight}"


def _disk_note(status: PeerStatus) -> str:
    """Return what is not written to the disk any more; empty if everything is."""
    return "" if status.disk_saving == "all" else f"a limit of the disk is reached: writes {status.disk_saving}"


def _undone(status: PeerStatus) -> str:
    return (
        f"{counted(status.steps_undone, 'step')} undone, because of a NaN or an infinity" if status.steps_undone else ""
    )


def _length_sent(status: PeerStatus) -> list[tuple[str, str]]:
    """Return the share of what was learnt lately that was sent; nothing if it was all, or nearly."""
    sent, learnt = status.length_sent, status.length_learnt
    return [("length sent", format_share(sent / learnt))] if sent < 0.999 * learnt else []


def _figures(status: PeerStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    cells = (
        ("loss", format_loss(status.loss)),
        ("shared", format_loss(status.anchor_loss)),
        ("own", format_loss(status.local_loss)),
        ("steps", format_count(status.inner_steps)),
        ("a cycle", format_count(status.cycle_steps)),
        ("tokens/s", format_count(status.tokens_per_second)),
        ("participation", format_share(status.participation)),
        *_length_sent(status),
        ("sent", format_bytes(status.bytes_sent.total)),
        ("received", format_bytes(status.bytes_received.total)),
    )
    for name, _ in cells:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*(value for _, value in cells))
    return table


def _peers(status: PeerStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("peer", no_wrap=True)
    table.add_column("state", overflow="fold")  # the only one that wraps on a narrow terminal
    has_rows = len(status.grid) > 1
    names = ("steps\na cycle", "tokens/s", "claimed\ntokens", "weight", "loss", "last seen")
    for name in ("row", *names) if has_rows else names:
        table.add_column(name, justify="right", no_wrap=True)
    for line in status.peers[:MAX_PEER_ROWS]:
        table.add_row(*_peer_cells(line, has_rows=has_rows), style="dim" if _is_silent(line) else "")
    left_out = len(status.peers) - MAX_PEER_ROWS
    if left_out > 0:
        table.add_row(f"and {left_out} more", *[""] * (len(table.columns) - 1))
    return table


def _peer_cells(line: PeerLine, *, has_rows: bool) -> tuple[str, ...]:
    words = [] if line.trains else ["bootstrap"]
    if not line.reachable:
        words.append("dials out")
    if _is_silent(line):  # killed or gone; its last published state no longer applies
        words.append("silent")
    elif line.trains:
        # A peer that catches up after a start has made no step, and one that falls behind goes on stepping.
        is_paused = not line.ready and line.steps > 0 and line.tokens_per_second == 0.0
        words.insert(0, "ready" if line.ready else "paused" if is_paused else "catching up")
    heard = NOTHING if line.seconds_since_heard is None else f"{format_seconds(line.seconds_since_heard)} ago"
    return (
        named(short_peer(line.peer), line.name),
        ", ".join(words),
        *([NOTHING if line.row is None else str(line.row + 1)] if has_rows else []),
        format_count(line.cycle_steps),
        format_count(line.tokens_per_second),
        format_share(line.claimed_token_share),
        format_share(line.weight),
        format_loss(line.loss),
        heard,
    )


def _ready(status: PeerStatus, noun: str = "") -> str:
    """Return how many trainers hold the run's state; the roster may lag behind, so never more than it lists."""
    if not status.num_members:
        return "no trainer listed yet"
    return f"{format_part(status.num_ready, status.num_members, noun)} ready"


def _sizes(grid: tuple[int, ...]) -> str:
    least, most = min(grid), max(grid)
    return str(least) if least == most else f"{least} to {most}"


def _is_silent(line: PeerLine) -> bool:
    return line.seconds_since_heard is None or line.seconds_since_heard > _SILENT_SECONDS


def _phase(status: PeerStatus) -> str:
    """Return the phase of this peer, or until when it is paused."""
    if status.leaving and status.phase != "finished":
        return "leaving"
    if status.paused and status.phase not in ("leaving", "finished"):
        return status.paused
    return status.phase


def _phase_style(status: PeerStatus) -> str:
    if status.leaving or status.trouble:
        return "yellow"
    return "green" if status.phase in ("training", "following", "serving", "finished") else "yellow"
