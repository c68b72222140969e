"""Why a trainer is missing from entries, and why spans got none: from entries and rosters on disk, and from events."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.wire.entry import Entry, included_places, places_in
from p2p_diloco.protocol.wire.roster import Roster

NOT_READY, NOT_LISTED, OTHER_INCARNATION = "not ready", "ready, not listed", "listed with an earlier start"
LATE_VECTORS, SILENT = "announced, vectors late", "no opening in time, or another parent"
_ROUND = re.compile(r"\bround (\d+)")
_NUMBERS = re.compile(r"\b(?:span )?\d+[/\d]*\b|12D3\w+|…\w+")


def missed(
    entries: Iterable[Entry],
    rosters: Mapping[Digest, Roster],
    clock: RoundClock,
    peers: Mapping[str, PeerId],
    events: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, dict[str, int]]:
    """Return, per trainer, the number of entries without it by cause."""
    found: dict[str, Counter[str]] = {name: Counter() for name in peers}
    refused = {name: _refusals(events[name]) for name in peers}
    ready = {name: _times_ready(events[name]) for name in peers}
    for entry in entries:
        roster = rosters[entry.roster]
        included, present = included_places(entry), places_in(entry.present)
        begin = clock.begin(entry.round)
        for name, peer in peers.items():
            place = next((place for place, member in enumerate(roster.members) if member.peer == peer), None)
            if place in included:
                continue
            if not _is_ready(ready[name], begin):
                cause = NOT_READY
            elif place is None:
                cause = NOT_LISTED
            elif place in present:
                cause = LATE_VECTORS
            else:
                cause = refused[name].get(entry.round, SILENT)
            found[name][cause] += 1
    return {name: dict(counts.most_common()) for name, counts in found.items()}


def skipped(events: Iterable[Sequence[Mapping[str, Any]]], first: int) -> dict[str, int]:
    """Return the reasons for skipped spans from a round on, with their numbers left out, and how often each was told.

    A reducer tells one reason for each round.
    """
    found = Counter[str]()
    for each in events:
        for event in each:
            number = _ROUND.search(event["text"])
            if event["topic"] == "skipped" and number is not None and int(number[1]) >= first:
                found[_NUMBERS.sub("N", event["text"].partition(": ")[2].partition(" (and")[0])] += 1
    return dict(found.most_common())


def _refusals(events: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return, by round, why a reducer refused an opening or vectors of this peer, or why it named no parent."""
    found: dict[int, str] = {}
    for event in events:
        number = _ROUND.search(event["text"])
        if number is not None and event["topic"] == "refused":
            found.setdefault(int(number[1]), "refused: " + _NUMBERS.sub("N", event["text"].partition(": ")[2]))
        elif number is not None and event["topic"] == "roster" and "no contribution under" in event["text"]:
            found[int(number[1])] = "waited for a certificate after its vote"
    return found


def _times_ready(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, bool]]:
    """Return when a peer became ready and when it lost that."""
    return [(event["time"], event["text"].startswith("ready")) for event in events if event["topic"] == "ready"]


def _is_ready(changes: Sequence[tuple[float, bool]], at: float) -> bool:
    return next((is_ready for time, is_ready in reversed(changes) if time <= at), False)
