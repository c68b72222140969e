"""Format a peer's status for people: a table on a terminal, plain lines elsewhere.

The table fits the terminal: a line breaks between words, a number is never cut or parted from its unit, columns that do
not fit are left out by importance, and peers for which there is no room are summed up.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from p2p_diloco.protocol.wire.peer_name import named
from p2p_diloco.rate import counted, format_part
from p2p_diloco.status.status_file import PeerLine, PeerStatus
from p2p_diloco.wording import (
    NOTHING,
    format_bytes,
    format_count,
    format_how_far,
    format_loss,
    format_seconds,
    format_share,
    plain_words,
    short_peer,
)

MAX_PEER_ROWS = 24
"""Peers shown where no height limits them."""
_SILENT_SECONDS = 10.0
_GAP = "  "
_LINES_BELOW = 4
"""Lines of the terminal left for what is printed below the table."""
_COLUMNS = ("peer", "state", "tokens/s", "loss", "last seen", "claimed", "weight", "steps/cycle", "group")
"""The columns of other peers, the most important first."""
_ALWAYS = 2
_LEFT_ALIGNED = ("peer", "state")
_STATES = ("ready", "paused", "catching up", "serving", "silent")


def shows_table(console: Console) -> bool:
    """Return whether a table can be drawn there, and drawn anew in place."""
    return console.is_terminal and not console.is_dumb_terminal


class StatusTable:
    """The terminal view: the swarm and this peer, then every other peer.

    Args:
        status: what it shows.
        height: lines of the terminal; None: as many as the peers need, up to `MAX_PEER_ROWS`.
    """

    def __init__(self, status: PeerStatus, height: int | None = None) -> None:
        self._status, self._height = status, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self._status, options.max_width
        above = [
            *_heading(status, width),
            *_styled(_flow(_figures(status), width)),
            *_styled(_wrapped(status.reach, width), "" if status.reachable else "yellow"),
            *_styled(_wrapped(_shares(status), width)),
            *_styled((line for note in _notes(status) for line in _wrapped(note, width)), "bold yellow"),
        ]
        room = MAX_PEER_ROWS if self._height is None else self._height - len(above) - _LINES_BELOW
        yield from above
        yield from _peers(status, width, max(room, 1))


def status_line(status: PeerStatus) -> str:
    """Return the same, without the other peers, as one line for logs, with every value labelled."""
    return ", ".join((*_facts(status), *_figures(status), *filter(None, (_shares(status),)), *_notes(status)))


def status_lines(status: PeerStatus) -> list[str]:
    """Return the same as plain lines: one for this peer, one for each note and one for each other peer."""
    name = f"{status.run_name or 'run'} {status.run[:8]}".rstrip()
    shown = status.peers[:MAX_PEER_ROWS]
    left_out = status.peers[MAX_PEER_ROWS:]
    return [
        ", ".join((name, _self(status), *_facts(status), *_no_end(status))),
        ", ".join(_figures(status)),
        *filter(None, (status.reach, _shares(status), *_notes(status))),
        *(", ".join(_labelled(line, status)) for line in shown),
        *([_summed_up(left_out)] if left_out else []),
    ]


def line_key(status: PeerStatus) -> tuple[object, ...]:
    """Return that of a status whose change is worth a new line of a log: for a bootstrap, no new round is."""
    if status.role == "bootstrap":
        return status.phase, status.num_members, status.num_ready, status.trouble
    return status.phase, status.round


def peer_name(line: PeerLine) -> str:
    """Return the text of a peer's first column."""
    return named(short_peer(line.peer), line.name)


def _self(status: PeerStatus) -> str:
    return f"{status.role} {named(short_peer(status.peer), status.name)}".rstrip()


def _facts(status: PeerStatus) -> list[str]:
    """Return where the run is and what this peer does."""
    far = [] if status.share_done is None else [format_how_far(status.share_done, status.seconds_left)]
    groups = [f"{len(status.grid)} groups of {_sizes(status.grid)}"] if len(status.grid) > 1 else []
    return [f"round {status.round}", *far, _phase(status), _ready(status, "trainer"), *groups]


def _no_end(status: PeerStatus) -> list[str]:
    """Return that the run has no end, for the table: a log would repeat it in each line."""
    return ["no end set"] if status.run and status.share_done is None else []


def _heading(status: PeerStatus, width: int) -> list[Text]:
    name = f"{status.run_name or 'run'} {status.run[:8]}"
    lines = list(_styled(_flow([name, _self(status), *_facts(status), *_no_end(status)], width)))
    for line in lines:
        line.highlight_words([_phase(status)], _phase_style(status))
    lines[0].highlight_words([name], "bold")
    return lines


def _figures(status: PeerStatus) -> list[str]:
    """Return what is known in numbers; a peer that does not train has fewer."""
    trains = status.role == "trainer"
    values = (
        ("loss", format_loss(status.loss)),
        ("shared model", format_loss(status.anchor_loss)),
        ("own model", format_loss(status.local_loss)),
        ("", f"{format_count(status.tokens_per_second)} tokens/s" if trains else NOTHING),
        ("steps", format_count(status.inner_steps) if trains else NOTHING),
        ("steps a cycle", format_count(status.cycle_steps)),
        ("participation", format_share(status.participation) if trains else NOTHING),
        *_length_sent(status),
        ("sent", format_bytes(status.bytes_sent.total)),
        ("received", format_bytes(status.bytes_received.total)),
    )
    return [f"{name} {value}".lstrip() for name, value in values if value != NOTHING]


def _notes(status: PeerStatus) -> list[str]:
    """Return what is wrong, or worth a look; nothing if all is well."""
    majority = (
        f"the list of members was changed without a majority {counted(status.degraded_rosters, 'time')}"
        if status.degraded_rosters
        else ""
    )
    undone = (
        f"{counted(status.steps_undone, 'step')} undone, because of a NaN or an infinity" if status.steps_undone else ""
    )
    disk = "" if status.disk_saving == "all" else f"a limit of the disk is reached: writes {status.disk_saving}"
    notes = (status.trouble, undone, status.pace, status.clock, *status.influence, majority, disk)
    return [plain_words(note) for note in notes if note]


def _shares(status: PeerStatus) -> str:
    """Return this peer's shares of the tokens, by what members claim, and of the weight; empty if it has neither."""
    if status.weight is None and status.claimed_token_share is None:
        return ""
    tokens, weight = format_share(status.claimed_token_share), format_share(status.weight)
    return f"this peer: tokens {tokens} (as members claim them), weight {weight}"


def _length_sent(status: PeerStatus) -> list[tuple[str, str]]:
    """Return the share of what was learnt lately that was sent; nothing if it was all, or nearly."""
    sent, learnt = status.length_sent, status.length_learnt
    return [("length sent", format_share(sent / learnt))] if sent < 0.999 * learnt else []


def _peers(status: PeerStatus, width: int, room: int) -> list[Text]:
    """Return a line for the names of the columns and one for each peer, at most `room` of these."""
    if not status.peers:
        return []
    shown = status.peers if len(status.peers) <= room else status.peers[: room - 1]
    cells = [_cells(line) for line in shown]
    names = [
        name
        for name in _COLUMNS
        if name in _COLUMNS[:_ALWAYS] or any(cell[name] != NOTHING for cell in cells)
        if name != "group" or len(status.grid) > 1
    ]
    widths = {name: max(map(len, (name, *(cell[name] for cell in cells)))) for name in names}
    while sum(widths.values()) + len(_GAP) * (len(widths) - 1) > width and len(widths) > _ALWAYS:
        widths.popitem()
    rows = [{name: name for name in widths}, *cells]
    texts = [
        _GAP.join(
            row[name].ljust(width) if name in _LEFT_ALIGNED else row[name].rjust(width)
            for name, width in widths.items()
        ).rstrip()
        for row in rows
    ]
    styles = ["dim", *("dim" if _state(line) == "silent" else "" for line in shown)]
    lines = [_line(text, style) for text, style in zip(texts, styles, strict=True)]
    left_out = status.peers[len(shown) :]
    return lines + list(_styled(_wrapped(_summed_up(left_out), width) if left_out else ()))


def _cells(line: PeerLine) -> dict[str, str]:
    """Return the text of each column."""
    heard = NOTHING if line.seconds_since_heard is None else f"{format_seconds(line.seconds_since_heard)} ago"
    return {
        "peer": peer_name(line),
        "state": _state(line) if line.reachable else f"{_state(line)}, dials out",
        "tokens/s": format_count(line.tokens_per_second) if line.trains else NOTHING,
        "loss": format_loss(line.loss),
        "last seen": heard,
        "claimed": format_share(line.claimed_token_share),
        "weight": format_share(line.weight),
        "steps/cycle": format_count(line.cycle_steps),
        "group": NOTHING if line.row is None else str(line.row + 1),
    }


def _labelled(line: PeerLine, status: PeerStatus) -> list[str]:
    """Return a peer as the parts of a plain line."""
    cells = {name: value for name, value in _cells(line).items() if value != NOTHING}
    first = f"{cells.pop('peer')}: {cells.pop('state')}"
    if len(status.grid) <= 1:
        cells.pop("group", None)
    return [first, *(f"{value} {name}" if name == "tokens/s" else f"{name} {value}" for name, value in cells.items())]


def _state(line: PeerLine) -> str:
    if line.seconds_since_heard is None or line.seconds_since_heard > _SILENT_SECONDS:
        return "silent"  # killed or gone; its last published state no longer applies
    if not line.trains:
        return "serving"
    if line.ready:
        return "ready"
    # A peer that catches up after a start has made no step, and one that falls behind goes on stepping.
    return "paused" if line.steps > 0 and line.tokens_per_second == 0.0 else "catching up"


def _summed_up(lines: Sequence[PeerLine]) -> str:
    """Return how many peers are not shown, by state."""
    counts = Counter(map(_state, lines))
    return f"and {len(lines)} more: {', '.join(f'{counts[state]} {state}' for state in _STATES if counts[state])}"


def _ready(status: PeerStatus, noun: str = "") -> str:
    """Return how many trainers hold the run's state; the list may lag behind, so never more than it names."""
    if not status.num_members:
        return "no trainer listed yet"
    return f"{format_part(status.num_ready, status.num_members, noun)} ready"


def _sizes(grid: tuple[int, ...]) -> str:
    least, most = min(grid), max(grid)
    return str(least) if least == most else f"{least} to {most}"


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


def _flow(parts: Iterable[str], width: int) -> list[str]:
    """Return lines of parts that stay whole, as many on each as fit; a part longer than a line breaks at words."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(_GAP) + len(part) <= width:
            lines[-1] += _GAP + part
        else:
            lines += _wrapped(part, width)
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Return `text` in lines that break at words, but not between a number and what follows it."""
    glued = re.sub(r"(?<=\d) (?=\S)", "\0", text)
    lines = textwrap.wrap(glued, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _styled(lines: Iterable[str], style: str = "") -> Iterable[Text]:
    return [_line(line, style) for line in lines]


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, overflow="fold")
