"""`events.jsonl`: a peer's events, one JSON object per line, in order; for people, reports and tests.

Readers skip a line that was cut off by a kill or a full disk; the next event begins on a new line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2p_diloco.errors import StateError

EVENTS_FILE, OLD_EVENTS_FILE = "events.jsonl", "events.old.jsonl"
MOST_EVENT_BYTES = 32 << 20
"""Size of the log at which it is renamed and begun anew: about a week; older lines than those two hold are lost."""

Figure = float | int | str

TOPICS = {
    "addresses": "saved addresses cannot be read, or the current ones cannot be saved",
    "adoption": "a span is replaced by the one that a majority holds",
    "asking": "fetching the manifest: the peers asked, and the peer that answered",
    "batch": "the windows of a step change, so that a cycle has about the planned steps",
    "branch": "peers hold different histories of the run",
    "cap": "effect of a bandwidth cap that is below what the run needs",
    "checkpoint": "a checkpoint could not be written or read",
    "checkpoints": "folder of the checkpoints",
    "clock": "this machine's clock differs from the members', or agrees again",
    "content": "the bytes of a span differ from the majority's, and how this is repaired",
    "content-sound": "a span that differed was correct",
    "contribution-dropped": "this peer left out a contribution of another peer, and why",
    "daemon": "the libp2p daemon ended and is started again",
    "device": "device that trains, and where contributions are encoded",
    "directory": "the distributed hash table cannot be reached, or can be reached again",
    "disk": "a limit of the disk is reached, and what is still written",
    "donor": "a peer sent a state that differs from its announcement",
    "entries": "entries cannot be written to disk, or can be written again",
    "entry-refused": "a peer sent an entry that breaks a rule",
    "equivocation": "an owner signed two entries for one span and round",
    "evaluation": "held-out losses",
    "export": "an archivist has exported the model, or could not, with the reason",
    "finished": "this peer has finished, with the digest of its state",
    "flood": "lines about peers, or messages of theirs, that were left out in the last minute",
    "founded": "this peer founded the run",
    "frame-refused": "a peer sent a frame that cannot be read, or too many",
    "good-bye": "another peer leaves",
    "identity": "another process or machine uses the identity of this peer, or its name cannot be read",
    "influence": "a member has much influence on the run, or abuses it",
    "inner": "the optimiser's state could not be saved or restored",
    "invite": "a new join command, or a problem with the given invite",
    "length": "this peer learns more than its contributions may carry, and gives some of it up",
    "limits": "the limits of this machine's owner have changed, or cannot be read",
    "line": "the upload is saturated, or no longer",
    "link": "whether known peers answer",
    "loops": "numba's compiled loops are not available; NumPy is used instead",
    "majority": "number of voters that have named the state that this peer waits for",
    "manifest": "the manifest was verified",
    "members": "what is remembered of the members cannot be read or written",
    "memory": "memory may run out; windows of a step that fit into the device; activations that are recomputed",
    "missing": "contributions missing from a mean",
    "not-finite": "a step that left parameters not finite was undone",
    "pace": "cycles have too many or too few inner steps",
    "pause": "this peer is paused, and why, or runs again",
    "port": "this peer listens on another port than before",
    "promise-refused": "a ballot arrived too late",
    "proposal-refused": "a peer proposed a roster that breaks a rule",
    "reach": "whether other peers can dial this one",
    "ready": "this peer holds the state of the run, or has lost it",
    "reducer-lost": "a reducer is lost, with the reason",
    "refused": "a contribution was refused, with the reason",
    "replay": "entries on disk are applied to the newest checkpoint",
    "roster": "a new roster of members",
    "roster-refused": "a roster breaks a rule",
    "round": "a round is over, with the number of spans that got an entry",
    "share": "this peer takes a larger or smaller share of averaging",
    "skipped": "a span got no entry in a round, with the reason",
    "split": "this peer is cut off from most members, or no longer",
    "start": "other peers hold the state that this bootstrap founded",
    "starting": "training starts",
    "text": "fetching the run's text from other peers, and sending it to them",
    "tips": "peers name different states, and none has a majority",
    "traffic": "expected traffic of this peer",
    "trouble": "why this peer's contributions are in no entry, or it trains alone; or that they are included again",
    "trust": "this peer is not on the list of the run, or the run has no list",
    "waiting": "a lone member waits for peers that are fetching its state",
}
"""Meaning of each event topic, for the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEvent:
    """An event of one peer.

    Attributes:
        time: Unix seconds.
        topic: one word for programs, such as "roster", "ready", "skipped", "evaluation", "finished".
        text: one sentence for people; lower case, no full stop.
        figures: the event's values, by name.
    """

    time: float
    topic: str
    text: str
    figures: Mapping[str, Figure] = field(default_factory=dict)


def format_event(event: PeerEvent) -> str:
    """Return `event` as one line of JSON, without a line break."""
    figures = {name: _plain(value) for name, value in event.figures.items()}
    document = {"time": event.time, "topic": event.topic, "text": event.text, "figures": figures}
    return json.dumps(document, ensure_ascii=True)


def event_line(event: PeerEvent) -> str:
    """Return `event` as one line for people: topic and text, or only the text if it begins with the topic."""
    return event.text if event.text.startswith(event.topic) else f"{event.topic}: {event.text}"


def append_event(folder: Path, event: PeerEvent) -> None:
    """Append `event` to the log in `folder`.

    Raises:
        StateError: the folder is read-only or missing, or the disk is full; earlier lines are kept.
    """
    path = folder / EVENTS_FILE
    try:
        if path.exists() and path.stat().st_size >= MOST_EVENT_BYTES:
            path.replace(folder / OLD_EVENTS_FILE)
        with path.open("ab") as file:
            torn = file.tell() > 0 and not _ends_with_line_break(path)
            file.write((b"\n" if torn else b"") + format_event(event).encode("ascii") + b"\n")
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}; check the folder and the disk") from None


def _ends_with_line_break(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _plain(value: Figure) -> Figure:
    # Python would write NaN and Infinity, which are not valid JSON.
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
