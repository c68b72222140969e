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
from typing import Any

from p2p_diloco.errors import StateError

STATUS_FILE = "status.json"
MAX_STATUS_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteCounts:
    """Bytes since this process started.

    Attributes:
        vectors: contributions and entries with their headers.
        control: heartbeats, rosters, ballots, requests.
        transfer: state sent to peers that catch up.
    """

    vectors: int = 0
    control: int = 0
    transfer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLine:
    """One other peer, as its heartbeats describe it; None where they do not.

    Attributes:
        peer: text id.
        ready: whether it holds the run's state.
        reachable: whether others have proved that they can dial it.
        trains: False for a bootstrap peer or an archivist.
        steps: its optimiser steps.
        tokens_per_second: recent rate.
        loss: its last training loss in nats per token.
        seconds_since_heard: since its last heartbeat.
        row: its row of the grid, counted from 0; None while it is not a member.
        weight: its share of the weight of the means in the last cycles; None if it was in none.
    """

    peer: str
    ready: bool = False
    reachable: bool = False
    trains: bool = True
    steps: int = 0
    tokens_per_second: float | None = None
    loss: float | None = None
    seconds_since_heard: float | None = None
    row: int | None = None
    weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """One peer's view of itself and the swarm.

    Attributes:
        run: run id in hexadecimal digits; empty until the peer knows it.
        run_name: name of the run.
        peer: id of this peer, as text.
        role: "trainer", "bootstrap" or "archivist".
        incarnation: increases with each start of this identity.
        pid: process id.
        updated: time of this status, Unix seconds.
        round: current round; negative before the first.
        cycle: current cycle; every fragment is due once per cycle.
        roster: number of the newest certified roster.
        degraded_rosters: number of rosters certified without a majority.
        num_members: members of that roster that train.
        grid: number of members in each row (averaging group) of the grid in force; one row in a small run.
        row: row of this peer, counted from 0; None while it is not a member.
        averaging_share: share of averaging that this peer's connection carries; 1 is an equal share, and 2 is the
            maximum, used for one that was never saturated.
        num_ready: trainers of that roster that hold the run's state.
        ready: whether this peer holds it.
        leaving: whether it has been asked to leave.
        phase: "connecting", "fetching manifest", "catching up", "training", "following", "serving", "not stepping",
            "paused", "leaving" or "finished".
        inner_steps: optimiser steps of this peer.
        steps_undone: steps that were undone or not made because something was not finite; not among `inner_steps`.
        cycle_steps: recent optimiser steps per cycle; None until known.
        planned_steps: steps per cycle planned by the manifest; None if it plans none.
        tokens: tokens of these steps.
        tokens_per_second: recent rate.
        loss: last training loss in nats per token.
        anchor_loss: last held-out loss of the anchor.
        local_loss: last held-out loss of the local parameters.
        parameters: number of parameters of the model.
        rounds_closed: rounds since ready whose deadline has passed.
        spans_closed: spans of these rounds, including skipped ones.
        entries_absorbed: entries of these rounds, counted span by span.
        participation: share of the contributions of live, ready members that were included, over closed rounds since
            ready.
        bytes_sent: bytes sent on all links.
        bytes_received: bytes received on all links.
        max_upload: upload cap, bits per second on the wire; None: no cap.
        max_download: download cap, likewise.
        upload_rate: approximate recent upload rate, bits per second on the wire; None if not measured.
        download_rate: approximate recent download rate, likewise.
        vector_cycles: number of cycles over which `bytes_sent.vectors` were sent.
        peers: the other peers.
        log_digest: SHA-256 over all chain digests, hexadecimal.
        state_digest: SHA-256 over anchor, momentum and chains of all spans, hexadecimal; empty until finished.
        addresses: addresses that this peer announces; only proofs show whether they work.
        reachable: whether others have proved that they can dial it; otherwise it is outbound only and reduces no spans.
        reachable_at: host and port of each proved address, those relevant to this run first.
        proved_by: number of peers that proved it.
        reach: the same in one sentence, with what to do about it.
        trouble: why this peer has been in no entry for some cycles, or trains alone; empty if all is well.
        pace: warning about too many or too few inner steps per cycle, with what to do; empty if all is well.
        weight: this peer's own share of the weight of the means in the last cycles; None if it was in none.
        influence: members with much influence on the run, or signs that they abuse it, as sentences.
        clock: wall clocks that are far from those of other peers, this machine's first; empty if all is well.
        invite: invite of this run; empty until known.
        own_model: whether the run trains a user's own model, so that peers join from a training loop instead of the
            command line.
        paused: "paused until 22:00 (hours)"; empty while this peer runs.
        pause_reason: "asked", "hours", "days", "battery" or "monthly quota"; empty while this peer runs.
        paused_until: end of the pause, Unix seconds; None if it is unknown.
        limits: limits of this machine's owner that are in force, as texts by setting.
        month: the calendar month of the next two, such as 2026-11.
        month_sent: bytes sent this month, as on the wire, across restarts.
        month_received: bytes received this month, likewise.
        disk_saving: what is written to the disk: "all", "only the newest checkpoint" or "nothing".
        control: number of the `control.json` that this peer obeys; it answers `pause`, `resume`, `limits` and `leave`.
    """

    run: str = ""
    run_name: str = ""
    peer: str = ""
    role: str = "trainer"
    incarnation: int = 0
    pid: int = 0
    updated: float = 0.0
    round: int = -1
    cycle: int = -1
    roster: int = 0
    degraded_rosters: int = 0
    num_members: int = 0
    grid: tuple[int, ...] = ()
    row: int | None = None
    averaging_share: float = 2.0
    num_ready: int = 0
    ready: bool = False
    leaving: bool = False
    phase: str = "connecting"
    inner_steps: int = 0
    steps_undone: int = 0
    cycle_steps: float | None = None
    planned_steps: int | None = None
    tokens: int = 0
    tokens_per_second: float = 0.0
    loss: float | None = None
    anchor_loss: float | None = None
    local_loss: float | None = None
    parameters: int = 0
    rounds_closed: int = 0
    spans_closed: int = 0
    entries_absorbed: int = 0
    participation: float | None = None
    bytes_sent: ByteCounts = field(default_factory=ByteCounts)
    bytes_received: ByteCounts = field(default_factory=ByteCounts)
    max_upload: float | None = None
    max_download: float | None = None
    upload_rate: float | None = None
    download_rate: float | None = None
    vector_cycles: float = 0.0
    peers: tuple[PeerLine, ...] = ()
    log_digest: str = ""
    state_digest: str = ""
    addresses: tuple[str, ...] = ()
    reachable: bool = False
    reachable_at: tuple[str, ...] = ()
    proved_by: int = 0
    reach: str = ""
    trouble: str = ""
    pace: str = ""
    clock: str = ""
    weight: float | None = None
    influence: tuple[str, ...] = ()
    invite: str = ""
    own_model: bool = False
    paused: str = ""
    pause_reason: str = ""
    paused_until: float | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    month: str = ""
    month_sent: int = 0
    month_received: int = 0
    disk_saving: str = "all"
    control: str = ""


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
