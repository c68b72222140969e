"""`status.json`: a peer's status, written about once a second, for `p2p-diloco status` and other readers.

The file is replaced atomically, so a reader never sees a partial one. A reader of an older or newer file takes the
fields that it knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from p2p_diloco.errors import StateError

STATUS_FILE = "status.json"
MAX_STATUS_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCounts:
    """Bytes since this process started."""

    vectors: Annotated[int, "contributions and entries with their headers"] = 0
    control: Annotated[int, "heartbeats, rosters, ballots, requests"] = 0
    transfer: Annotated[int, "state sent to peers that catch up"] = 0

    @property
    def total(self) -> int:
        return self.vectors + self.control + self.transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLine:
    """One other peer, as its heartbeats describe it; None where they do not."""

    peer: Annotated[str, "text id"]
    name: Annotated[str, "what its owner calls it, which nobody checks; empty if nothing, or no name"] = ""
    ready: Annotated[bool, "whether it holds the run's state"] = False
    reachable: Annotated[bool, "whether others have proved that they can dial it"] = False
    trains: Annotated[bool, "False for a bootstrap peer or an archivist"] = True
    steps: Annotated[int, "its optimiser steps"] = 0
    step_tokens: Annotated[float | None, "mean tokens of a step since its start, as it claims"] = None
    cycle_steps: Annotated[float | None, "steps of this size that its rate makes in a cycle, as it claims"] = None
    tokens_per_second: Annotated[float | None, "recent rate, as it claims"] = None
    loss: Annotated[float | None, "its last training loss in nats per token"] = None
    seconds_since_heard: Annotated[float | None, "since its last heartbeat"] = None
    row: Annotated[int | None, "its row of the grid, counted from 0; None while it is not a member"] = None
    weight: Annotated[
        float | None,
        "its share of the weight of the means in the last cycles; None if it was in none",
    ] = None
    claimed_token_share: Annotated[
        float | None,
        "its share of the members' tokens per second in the same cycles, as each of them claims its own",
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """One peer's view of itself and the swarm."""

    run: Annotated[str, "run id in hexadecimal digits; empty until the peer knows it"] = ""
    run_name: Annotated[str, "name of the run"] = ""
    peer: Annotated[str, "id of this peer, as text"] = ""
    name: Annotated[str, "what the owner of this peer calls it; empty if nothing"] = ""
    role: Annotated[str, '"trainer", "bootstrap" or "archivist"'] = "trainer"
    incarnation: Annotated[int, "increases with each start of this identity"] = 0
    pid: Annotated[int, "process id"] = 0
    updated: Annotated[float, "time of this status, Unix seconds"] = 0.0
    round: Annotated[int, "current round; negative before the first"] = -1
    cycle: Annotated[int, "current cycle; every fragment is due once per cycle"] = -1
    roster: Annotated[int, "number of the newest certified roster"] = 0
    degraded_rosters: Annotated[int, "number of rosters certified without a majority"] = 0
    num_members: Annotated[int, "members of that roster that train"] = 0
    grid: Annotated[
        tuple[int, ...],
        "number of members in each row (averaging group) of the grid in force; one row in a small run",
    ] = ()
    row: Annotated[int | None, "row of this peer, counted from 0; None while it is not a member"] = None
    averaging_share: Annotated[
        float,
        "share of averaging that this peer's connection carries; 1 is an equal share, and 2 is the maximum, used "
        "for one that was never saturated",
    ] = 2.0
    num_ready: Annotated[int, "trainers of that roster that hold the run's state"] = 0
    share_done: Annotated[
        float | None, "share of the planned length of the run that has passed, at most 1; None if no end is planned"
    ] = None
    seconds_left: Annotated[float | None, "time to the planned end; 0 after it; None if no end is planned"] = None
    ready: Annotated[bool, "whether this peer holds it"] = False
    leaving: Annotated[bool, "whether it has been asked to leave"] = False
    phase: Annotated[
        str,
        '"connecting", "fetching manifest", "catching up", "training", "following", "serving", "not stepping", '
        '"paused", "leaving" or "finished"',
    ] = "connecting"
    inner_steps: Annotated[int, "optimiser steps of this peer"] = 0
    steps_undone: Annotated[
        int,
        "steps that were undone or not made because something was not finite; not among `inner_steps`",
    ] = 0
    cycle_steps: Annotated[float | None, "recent optimiser steps per cycle; None until known"] = None
    planned_steps: Annotated[int | None, "steps per cycle planned by the manifest; None if it plans none"] = None
    step_windows: Annotated[
        int | None,
        "windows of a step here, chosen to suit the planned steps; None for a training loop of your own",
    ] = None
    planned_windows: Annotated[int | None, "windows of a step planned by the manifest; likewise"] = None
    fewest_windows: Annotated[int | None, "fewest windows that a step here may take; likewise"] = None
    most_windows: Annotated[
        int | None, "most windows that a step here may take: the same as the fewest if their number is fixed"
    ] = None
    tokens: Annotated[int, "tokens of these steps"] = 0
    tokens_per_second: Annotated[float, "recent rate"] = 0.0
    loss: Annotated[float | None, "last training loss in nats per token"] = None
    anchor_loss: Annotated[float | None, "last held-out loss of the anchor"] = None
    local_loss: Annotated[float | None, "last held-out loss of the local parameters"] = None
    parameters: Annotated[int, "number of parameters of the model"] = 0
    rounds_closed: Annotated[int, "rounds since ready whose deadline has passed"] = 0
    spans_closed: Annotated[int, "spans of these rounds, including skipped ones"] = 0
    entries_absorbed: Annotated[int, "entries of these rounds, counted span by span"] = 0
    participation: Annotated[
        float | None,
        "share of the contributions of live, ready members that were included, over closed rounds since ready",
    ] = None
    bytes_sent: Annotated[ByteCounts, "bytes sent on all links"] = field(default_factory=ByteCounts)
    bytes_received: Annotated[ByteCounts, "bytes received on all links"] = field(default_factory=ByteCounts)
    max_upload: Annotated[float | None, "upload cap, bits per second on the wire; None: no cap"] = None
    max_download: Annotated[float | None, "download cap, likewise"] = None
    upload_rate: Annotated[
        float | None,
        "approximate recent upload rate, bits per second on the wire; None if not measured",
    ] = None
    download_rate: Annotated[float | None, "approximate recent download rate, likewise"] = None
    vector_cycles: Annotated[float, "number of cycles over which `bytes_sent.vectors` were sent"] = 0.0
    peers: Annotated[tuple[PeerLine, ...], "the other peers"] = ()
    log_digest: Annotated[str, "SHA-256 over all chain digests, hexadecimal"] = ""
    state_digest: Annotated[
        str,
        "SHA-256 over anchor, momentum and chains of all spans, hexadecimal; empty until finished",
    ] = ""
    addresses: Annotated[tuple[str, ...], "addresses that this peer announces; only proofs show whether they work"] = ()
    reachable: Annotated[
        bool,
        "whether others have proved that they can dial it; otherwise it is outbound only and reduces no spans",
    ] = False
    reachable_at: Annotated[
        tuple[str, ...],
        "host and port of each proved address, those relevant to this run first",
    ] = ()
    proved_by: Annotated[int, "number of peers that proved it"] = 0
    reach: Annotated[str, "the same in one sentence, with what to do about it"] = ""
    trouble: Annotated[
        str,
        "why this peer has been in no entry for some cycles, or trains alone; empty if all is well",
    ] = ""
    pace: Annotated[
        str,
        "warning about too many or too few inner steps per cycle, with what to do; empty if all is well",
    ] = ""
    length_learnt: Annotated[
        float,
        "sum of norms of what the contributions of the last eight cycles had newly learnt, before clipping",
    ] = 0.0
    length_sent: Annotated[float, "the same of what they sent: less if they were clipped to the run's limit"] = 0.0
    length_given_up: Annotated[
        float, "the same of what was removed from this peer's parameters, because it was too much to be sent later"
    ] = 0.0
    clock: Annotated[
        str,
        "wall clocks that are far from those of other peers, this machine's first; empty if all is well",
    ] = ""
    weight: Annotated[
        float | None,
        "this peer's own share of the weight of the means in the last cycles; None if it was in none",
    ] = None
    claimed_token_share: Annotated[
        float | None,
        "this peer's own share of the members' tokens per second in the same cycles, as each of them claims its own",
    ] = None
    influence: Annotated[
        tuple[str, ...],
        "members with much influence on the run, or signs that they abuse it, as sentences",
    ] = ()
    invite: Annotated[str, "invite of this run; empty until known"] = ""
    own_model: Annotated[
        bool,
        "whether the run trains a user's own model, so that peers join from a training loop instead of the "
        "command line",
    ] = False
    paused: Annotated[str, '"paused until 22:00 (hours)"; empty while this peer runs'] = ""
    pause_reason: Annotated[
        str,
        '"asked", "hours", "days", "battery" or "monthly quota"; empty while this peer runs',
    ] = ""
    paused_until: Annotated[float | None, "end of the pause, Unix seconds; None if it is unknown"] = None
    limits: Annotated[
        Mapping[str, str],
        "limits of this machine's owner that are in force, as texts by setting",
    ] = field(default_factory=dict)
    month: Annotated[str, "the calendar month of the next two, such as 2026-11"] = ""
    month_sent: Annotated[int, "bytes sent this month, as on the wire, across restarts"] = 0
    month_received: Annotated[int, "bytes received this month, likewise"] = 0
    disk_saving: Annotated[str, 'what is written to the disk: "all", "only the newest checkpoint" or "nothing"'] = "all"
    control: Annotated[
        str,
        "number of the `control.json` that this peer obeys; it answers `pause`, `resume`, `limits` and `leave`",
    ] = ""


def status_document(status: PeerStatus) -> dict[str, Any]:
    """Return `status` as a JSON document; numbers that are not finite become null."""
    document: dict[str, Any] = _finite(dataclasses.asdict(status))
    return document


def status_of(document: Mapping[str, Any]) -> PeerStatus:
    """Parse a document written by any version: unknown keys are ignored, missing ones get their defaults.

    Raises:
        ValueError: a known key has a value of the wrong shape.
    """
    try:
        known = _known_fields(PeerStatus, document)
        for name in ("bytes_sent", "bytes_received"):
            if name in known:
                known[name] = ByteCounts(**_known_fields(ByteCounts, known[name]))
        known["peers"] = tuple(PeerLine(**_known_fields(PeerLine, line)) for line in known.get("peers", ()))
        known["limits"] = {str(key): str(text) for key, text in dict(known.get("limits", {})).items()}
        known["grid"] = tuple(map(int, known.get("grid", ())))
        for name in ("addresses", "reachable_at", "influence"):
            known[name] = tuple(map(str, known.get(name, ())))
        return PeerStatus(**known)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a status document: {error}") from None


def write_status(folder: Path, status: PeerStatus) -> None:
    """Replace `status.json` in `folder` atomically.

    Raises:
        StateError: the folder is read-only or missing, or the disk is full; the old file is kept.
    """
    path = folder / STATUS_FILE
    draft = folder / f".{STATUS_FILE}.{os.getpid()}"
    try:
        # No fsync: losing the latest status in a power failure does no harm.
        draft.write_text(json.dumps(status_document(status), allow_nan=False), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StateError(f"cannot write {path}: {error.strerror}; check the folder and the disk") from None


def read_status(folder: Path) -> PeerStatus | None:
    """Return the last status in `folder`; None if there is none or it cannot be parsed."""
    try:
        with (folder / STATUS_FILE).open("rb") as file:
            content = file.read(MAX_STATUS_BYTES + 1)
        document = json.loads(content) if len(content) <= MAX_STATUS_BYTES else None
        return status_of(document) if isinstance(document, dict) else None
    except (OSError, ValueError, RecursionError):
        return None


def _known_fields(kind: type[Any], document: Mapping[str, Any]) -> dict[str, Any]:
    return {slot.name: document[slot.name] for slot in dataclasses.fields(kind) if slot.name in document}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
