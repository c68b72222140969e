"""The recording of a run, read from its peers' disks (traces, entries, rosters), and its pace in inner steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from p2p_diloco.config.manifest import decode_kept_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.outer.state import SpanState
from p2p_diloco.protocol.wire.entry import Entry, next_head
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.storage.archive import ENTRIES_FOLDER
from p2p_diloco.storage.entry_log import EntryLog
from p2p_diloco.storage.run_folder import MANIFEST_FILE, RunFolder
from p2p_diloco.storage.trace import TRACE_FILE
from research.trace import read_trace

KEPT_CYCLES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded run.

    Attributes:
        lives: trace records by peer and start.
        entries: entries by digest, from all peers.
        rosters: rosters by digest.
        founding: roster 0.
    """

    plan: RunPlan
    lives: dict[PeerId, list[list[dict[str, Any]]]]
    entries: dict[Digest, Entry]
    rosters: dict[Digest, Roster]
    founding: Roster

    def chain(self, start: Mapping[SpanId, SpanState]) -> Iterator[Entry]:
        """Yield the entries of all spans from the start on, without gaps, span by span."""
        following = {(entry.span, entry.parent): entry for entry in self.entries.values()}
        for span, state in start.items():
            head = state.head
            while (entry := following.get((span, head.digest))) is not None:
                yield entry
                head = next_head(head, entry)


def read_recording(folders: Mapping[PeerId, Path]) -> Recording:
    """Read the run folders of some peers of one run.

    Args:
        folders: state directory of each peer; each has one run.
    Raises:
        StateError: a folder has no run or no trace, the runs differ, or roster 0 is missing.
    """
    runs = {peer: _run_folder(folder) for peer, folder in folders.items()}
    files = [path / MANIFEST_FILE for path in runs.values()]
    manifests = {file.read_bytes() for file in files if file.is_file()}
    if not manifests:
        raise StateError(
            "none of the folders has the manifest, which founders of earlier versions did not store; add the state "
            "directory of a peer that joined with the invite"
        )
    if len(manifests) != 1:
        raise StateError(f"the folders have manifests of {len(manifests)} runs; expected peers of the same run")
    path = next(file for file in files if file.is_file())
    plan = plan_run(decode_kept_manifest(manifests.pop(), path, "name the state directory of another peer").manifest)
    rosters: dict[Digest, Roster] = {}
    entries: dict[Digest, Entry] = {}
    for folder, path in zip(folders.values(), runs.values(), strict=True):
        for certified in RunFolder(folder, plan.rules.run).read_rosters():
            rosters[certified.roster.digest()] = certified.roster
        log = EntryLog(path / ENTRIES_FOLDER, keep_cycles=KEPT_CYCLES, mends=False)
        entries |= {entry.digest(): entry for entry in log.kept()}
    if any(len(roster.members) > plan.manifest.membership.group_size for roster in rosters.values()):
        raise StateError(
            f"the run had more than {plan.manifest.membership.group_size} members, so several rows; only a run of one "
            "row can be replayed, because row means are not stored"
        )
    founding = [roster for roster in rosters.values() if roster.k == 0]
    if len(founding) != 1:
        raise StateError(f"the folders have {len(founding)} founding rosters; expected one")
    return Recording(
        plan=plan,
        lives={peer: _lives(list(read_trace(path))) for peer, path in runs.items()},
        entries=entries,
        rosters=rosters,
        founding=founding[0],
    )


def _run_folder(folder: Path) -> Path:
    found = [path.parent for path in sorted(folder.glob(f"*/{TRACE_FILE}"))]
    if len(found) != 1:
        raise StateError(f"{folder} has the traces of {len(found)} runs; expected one, recorded with keep_trace")
    return found[0]


def _lives(lines: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    lives: list[list[dict[str, Any]]] = []
    for line in lines:
        if line["what"] == "began":
            lives.append([])
        elif not lives:
            raise StateError("the beginning of a trace is missing")
        lives[-1].append(line)
    return lives


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace of a run, in inner steps of the islands.

    Attributes:
        round_steps: median number of steps from one contribution to the next; 0.0 if no peer contributed twice.
        late: number of entries by the steps between the contribution to their round and their absorption.
    """

    round_steps: float
    late: dict[int, int]

    def late_at_most(self, share: float) -> int:
        """Return the number of steps by which at most `share` of the entries were late; 0 if there are none."""
        left = share * sum(self.late.values())
        for steps, entries in self.late.items():
            left -= entries
            if left <= 0:
                return steps
        return 0


def pace_of(recording: Recording) -> Pace:
    """Measure the pace over all starts of all peers; ignores entries of rounds without a contribution of the peer."""
    rounds = {digest: entry.round for digest, entry in recording.entries.items()}
    lives = [lines for starts in recording.lives.values() for lines in starts]
    between = [steps for lines in lives for steps in _steps_between(lines)]
    late = Counter(steps for lines in lives for steps in _steps_late(lines, rounds))
    return Pace(round_steps=median(between) if between else 0.0, late=dict(sorted(late.items())))


def _steps_between(lines: Sequence[dict[str, Any]]) -> Iterable[int]:
    at = [line["steps"] for line in lines if line["what"] == "contributed"]
    return (later - earlier for earlier, later in pairwise(at))


def _steps_late(lines: Sequence[dict[str, Any]], rounds: dict[Digest, int]) -> Iterable[int]:
    contributed: dict[int, int] = {}
    for line in lines:
        if line["what"] == "contributed":
            contributed[line["round"]] = line["steps"]
        elif line["what"] == "absorbed":
            began = contributed.get(rounds.get(Digest(bytes.fromhex(line["entry"])), -1))
            if began is not None:
                yield line["steps"] - began
