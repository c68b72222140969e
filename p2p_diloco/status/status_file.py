"""`status.json`: what a peer says about itself about once a second, for `p2p-diloco status` and all who watch.

The file is replaced whole, so a reader never sees half of one; a reader that meets an older or newer file takes the
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
    """Bytes since this process began.

    Attributes:
        vectors: contributions and entries with their headers.
        control: heartbeats, rosters, ballots, requests.
        transfer: state for peers that catch up.
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
        trains: False for a bootstrap peer.
        steps: its optimiser steps.
        tokens_per_second: lately.
        loss: its last training loss in nats per token.
        seconds_since_heard: since its last heartbeat.
        row: its row of the grid, counted from 0; None while it is not a member.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """One peer's view of itself and of its swarm.

    Attributes:
        run: run id in hexadecimal digits; empty until the peer knows it.
        run_name: the run's name for people.
        peer: text id.
        role: "trainer" or "bootstrap".
        incarnation: grows with each start of this identity.
        pid: of the process.
        updated: when this was said, Unix seconds.
        round: of the swarm clock; negative before the first.
        cycle: all fragments were due once per cycle.
        roster: number of the newest certified roster.
        degraded_rosters: how many rosters went without a majority.
        num_members: members of that roster that train.
        grid: members in each row of the grid in force, the averaging groups; one row in a small run.
        row: the row of this peer, counted from 0; None while it is not a member.
        averaging_share: of averaging that this peer's line carries, 1 as much as all have where all have the same; 2 is
            the most, and said of a line that was never full.
        num_ready: those of them that hold the run's state.
        ready: whether this peer does.
        leaving: whether it has been told to go.
        phase: "connecting", "fetching manifest", "catching up", "training", "leaving" or "finished".
        inner_steps: own optimiser steps.
        cycle_steps: own optimiser steps in a cycle, lately; None until known.
        planned_steps: the same as the manifest plans it; None: it does not.
        tokens: tokens of these steps.
        tokens_per_second: lately.
        loss: last training loss in nats per token.
        anchor_loss: last held-out loss of the anchor.
        local_loss: last held-out loss of the local parameters.
        parameters: size of the model.
        rounds_closed: rounds since ready whose deadline has passed.
        spans_closed: spans of these rounds, skipped ones too.
        entries_absorbed: entries of these rounds, counted span by span.
        participation: contributions included, of those of members alive and ready; over closed rounds since ready.
        bytes_sent: on all links.
        bytes_received: on all links.
        max_upload: cap on what this peer sends, bits per second on the wire; None: none.
        max_download: the same for what it reads.
        upload_rate: bits per second on the wire lately, about; None where nobody measures.
        download_rate: the same for what comes in.
        vector_cycles: number of cycles over which `bytes_sent.vectors` were sent.
        peers: the others.
        log_digest: SHA-256 over all chain digests, hexadecimal.
        state_digest: of anchor, momentum and chains of all spans, hexadecimal; empty until finished.
        addresses: that this peer tells others; whether they lead to it is what proofs show.
        reachable: whether others have proved that they can dial it; else it is outbound only, and averages for nobody.
        reachable_at: where they did, host and port, those that count for this run first.
        proved_by: how many peers did.
        reach: the same in one sentence, with what to do about it.
        trouble: why this peer is in no entry for some cycles; empty while all is well.
        pace: that its cycles have too many or too few inner steps, and what to do; empty while all is well.
        invite: what joins this run; empty until known.
        own_model: the run trains a model of somebody's own: its loop joins, and not the command line.
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
    invite: str = ""
    own_model: bool = False


def status_document(status: PeerStatus) -> dict[str, Any]:
    """Return the JSON document of `status`; numbers that are not finite become null, which every reader knows."""
    document: dict[str, Any] = _finite(dataclasses.asdict(status))
    return document


def status_of(document: Mapping[str, Any]) -> PeerStatus:
    """Read a document that any version wrote: unknown keys are left out, missing ones have their defaults.

    Raises:
        ValueError: a known key holds something of another shape.
    """
    try:
        known = _known_fields(PeerStatus, document)
        for name in ("bytes_sent", "bytes_received"):
            if name in known:
                known[name] = ByteCounts(**_known_fields(ByteCounts, known[name]))
        known["peers"] = tuple(PeerLine(**_known_fields(PeerLine, line)) for line in known.get("peers", ()))
        known["grid"] = tuple(map(int, known.get("grid", ())))
        for name in ("addresses", "reachable_at"):
            known[name] = tuple(map(str, known.get(name, ())))
        return PeerStatus(**known)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a status document: {error}") from None


def write_status(folder: Path, status: PeerStatus) -> None:
    """Replace `status.json` in `folder`, whole or not at all.

    Raises:
        StateError: the folder is read-only, gone, or the disk is full; what was there stays.
    """
    path = folder / STATUS_FILE
    draft = folder / f".{STATUS_FILE}.{os.getpid()}"
    try:
        # No fsync: after a power cut an old status is as good as none.
        draft.write_text(json.dumps(status_document(status), allow_nan=False), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StateError(f"cannot write {path}: {error.strerror}; check the folder and the disk") from None


def read_status(folder: Path) -> PeerStatus | None:
    """Return the last status in `folder`; None when there is none or it cannot be understood."""
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
