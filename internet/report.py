"""The result of a play: when each trainer was ready, its share of the entries, rosters, loss, and bytes.

Entries and rosters are read from the peers' disks, so no peer's own word counts.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from internet.causes import missed, skipped
from internet.play import Played, Process
from p2p_diloco.config.manifest import decode_kept_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.ids import Digest, PeerId, parse_peer_id, short_peer_id
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.grid import fold_roster
from p2p_diloco.protocol.wire.entry import Entry, included_places
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.storage.archive import ENTRIES_FOLDER
from p2p_diloco.storage.entry_log import EntryLog
from p2p_diloco.storage.run_folder import MANIFEST_FILE, ROSTERS_FILE, RunFolder

KEPT_CYCLES = 1 << 20
SETTLED_SECONDS = 120.0
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The result of one trainer.

    Attributes:
        ready: seconds from its start until it first held the run's state; None: never.
        in_entries: share of the settled entries that include it.
        in_entries_of: the same by the peer that finished them.
        missing: number of settled entries without it, by cause.
        num_dropped: how often a roster left it out while it ran.
        losses: held-out loss of the shared copy, by seconds since the start of the trainers.
        reach, trouble: the last sentences of its status.
        forecast: bytes that it expected to send and to receive, by the forecasts that it printed.
        measured: bytes that its line carried; None if machines share it.
    """

    name: str
    ready: float | None
    in_entries: float
    in_entries_of: Mapping[str, float]
    missing: Mapping[str, int]
    num_dropped: int
    losses: tuple[tuple[float, float], ...]
    steps: int
    reach: str
    trouble: str
    forecast: tuple[float, float]
    measured: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of a play.

    Attributes:
        since: seconds from which on entries and rosters count as settled.
        rosters_per_minute: rosters since then.
        entries_share: share of the spans since then that got an entry.
        longest_gap: seconds since then in which no round got an entry, at most.
        skipped: reasons why others got none, and in how many rounds a reducer told each.
        rosters: a line for each roster.
        trouble: what went wrong on the way, if a trouble was played.
        told: a line for each change of what a trainer's status says is wrong.
        carried: what the lines carried (`Internet.look`).
    """

    scene: str
    how: str
    congestion: str
    round_seconds: float
    num_fragments: int
    since: float
    rosters_per_minute: float
    entries_share: float
    longest_gap: float
    lines: tuple[Line, ...]
    skipped: Mapping[str, int]
    rosters: tuple[str, ...]
    trouble: str
    told: tuple[str, ...]
    carried: Mapping[str, Any]


def read_events(process: Process) -> list[Event]:
    """Return the events that a process wrote, oldest first."""
    path = process.state / "events.jsonl"
    return list(_documents(path)) if path.is_file() else []


def report(scene: str, played: Played) -> Row:
    """Return the result of a play."""
    processes = {played.bootstrap.name: played.bootstrap, **played.trainers}
    events = {name: read_events(process) for name, process in processes.items()}
    plan = _plan(processes.values())
    clock = plan.rules.clock
    rosters, entries = _histories(processes.values(), plan)
    chain = _chain(rosters.values())
    peers = {name: parse_peer_id(status["peer"]) for name, status in played.statuses.items() if status.get("peer")}
    since = min(SETTLED_SECONDS, played.play.seconds / 2.0)
    first, last = clock.round_at(played.began + since), clock.round_at(played.ended) - 1
    first = max(first, last - plan.rules.retained_cycles * clock.num_fragments + 1)  # older ones are kept nowhere
    settled = [entry for entry in entries.values() if first <= entry.round <= last]
    trainers = {name: peers[name] for name in played.trainers if name in peers}
    missing = missed(settled, rosters, clock, trainers, events)
    names = {peer: name for name, peer in peers.items()}
    owners = {entry.digest(): names.get(_owner(entry, rosters[entry.roster], plan), "another") for entry in settled}
    included = Counter(
        (names.get(rosters[entry.roster].members[place].peer), owners[entry.digest()])
        for entry in settled
        for place in included_places(entry)
    )
    finished = Counter(owners.values())
    until = clock.cycle(clock.round_at(played.ended))  # then all leave
    chain = [roster for roster in chain if roster.cycle < until]
    dropped = Counter(peer for before, after in itertools.pairwise(chain) for peer in before.peers() - after.peers())
    num_late = sum(_begin(roster, clock) >= played.began + since for roster in chain)
    length = played.ended - played.began  # while the processes leave, they go on learning
    possible = sum(plan.rules.num_spans[clock.fragment(index)] for index in range(first, last + 1))
    return Row(
        scene=scene,
        how=played.play.how.value,
        congestion=played.congestion,
        round_seconds=clock.round_seconds,
        num_fragments=clock.num_fragments,
        since=since,
        rosters_per_minute=60.0 * num_late / max(played.ended - played.began - since, 1.0),
        entries_share=len(settled) / max(possible, 1),
        longest_gap=_longest_gap(sorted({first, *(entry.round for entry in settled), last}), clock.round_seconds),
        lines=tuple(
            Line(
                name=name,
                ready=next((each["time"] - process.began for each in events[name] if each["topic"] == "ready"), None),
                in_entries=sum(included[name, owner] for owner in finished) / max(len(settled), 1),
                in_entries_of={owner: included[name, owner] / finished[owner] for owner in sorted(finished)},
                missing=missing.get(name, {}),
                num_dropped=dropped[peers[name]] if name in peers else 0,
                losses=tuple(loss for loss in _losses(process, events[name], played.began) if loss[0] <= length),
                steps=played.statuses[name].get("inner_steps", 0),
                reach=played.statuses[name].get("reach", ""),
                trouble=played.statuses[name].get("trouble", "") or _end_of(process),
                forecast=_forecast(events[name], played.ended),
                measured=_measured(played, name),
            )
            for name, process in played.trainers.items()
        ),
        skipped=skipped(events.values(), first),
        rosters=tuple(_changes(chain, names, clock, played.began)),
        trouble=played.play.trouble.told if played.play.trouble is not None else "",
        told=tuple(f"{since:6.1f} s  {name}: {sentence}" for since, name, sentence in played.told),
        carried=played.carried,
    )


def lines_of(row: Row) -> Iterator[str]:
    """Yield a row as lines of text."""
    last = last_loss(row)
    loss = f"{last:.3f}" if last is not None else "unknown"
    yield (
        f"{row.scene} ({row.how}, {row.congestion}): {row.num_fragments} x {row.round_seconds:g} s; from "
        f"{row.since:.0f} s on {row.rosters_per_minute:.1f} rosters a minute, {100 * row.entries_share:.0f} % of the "
        f"spans got an entry, longest gap {row.longest_gap:g} s; loss {loss}"
    )
    if row.trouble:
        yield f"  trouble: {row.trouble}"
    for line in row.lines:
        ready = f"{line.ready:.0f} s" if line.ready is not None else "never"
        yield (
            f"  {line.name:10} ready {ready:>6}, in {100 * line.in_entries:3.0f} %, dropped {line.num_dropped}, "
            f"{line.steps} steps; {line.reach}{f'; trouble: {line.trouble}' if line.trouble else ''}"
        )
        if line.missing:
            by_owner = ", ".join(f"{owner} {100 * share:.0f} %" for owner, share in line.in_entries_of.items())
            yield f"             in those of {by_owner}; missing: {_told(line.missing)}"
    if row.skipped:
        yield f"  skipped: {_told(row.skipped)}"
    if row.carried:
        ways = {name: (site["up"], site["down"]) for name, site in row.carried["sites"].items()}
        megabytes = (f"{name} {up['bytes'] / 1e6:.0f} / {down['bytes'] / 1e6:.0f}" for name, (up, down) in ways.items())
        yield f"  megabytes up / down: {', '.join(megabytes)}; latest packet {row.carried['latest_seconds']:.3f} s late"
    shares = [
        f"{line.name} {line.measured[0] / line.forecast[0]:.2f} / {line.measured[1] / line.forecast[1]:.2f}"
        for line in row.lines
        if line.measured is not None and all(line.forecast)
    ]
    if shares:
        yield f"  bytes relative to the forecast, up / down: {', '.join(shares)}"


def last_loss(row: Row) -> float | None:
    """Return the median of the trainers' last losses of the shared copy."""
    last = [line.losses[-1][1] for line in row.lines if line.losses]
    return statistics.median(last) if last else None


def _longest_gap(rounds: Sequence[int], round_seconds: float) -> float:
    return max((round_seconds * (after - before - 1) for before, after in itertools.pairwise(rounds)), default=0.0)


def _forecast(events: Sequence[Event], ended: float) -> tuple[float, float]:
    """Return the bytes that a peer told to expect, from its first forecast until the end, with the state at first."""
    told = [(event["time"], event["figures"]) for event in events if event["topic"] == "traffic" and event["figures"]]
    ready = next((event["time"] for event in events if event["topic"] == "ready"), ended)
    sent, received = 0.0, told[0][1]["state_bytes"] if told else 0.0
    for (begin, figures), end in zip(told, [*(time for time, _ in told[1:]), ended], strict=True):
        cycles = max(end - max(begin, ready), 0.0) / figures["cycle_seconds"]
        sent, received = sent + cycles * figures["up_bytes"], received + cycles * figures["down_bytes"]
    return sent, received


def _measured(played: Played, name: str) -> tuple[float, float] | None:
    """Return what a trainer's line carried; None if other machines share it."""
    machine = played.scene.trainers[name].machine
    site, plan = next(each for each in played.scene.sites.items() if machine in each[1].machines)
    if len(plan.machines) > 1 or machine == played.scene.bootstrap or not played.carried:
        return None
    ways = played.carried["sites"][site]
    return float(ways["up"]["bytes"]), float(ways["down"]["bytes"])


def _end_of(process: Process) -> str:
    if process.ended_after is None:
        return ""
    return f"ended after {process.ended_after:.0f} s: {process.told().strip().splitlines()[-1]}"


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {num}" for what, num in counts.items())


def _losses(process: Process, events: Sequence[Event], began: float) -> Iterator[tuple[float, float]]:
    for document in _documents(process.log):
        yield document["time"] - began, document["loss"]
    for event in events:
        if event["topic"] == "evaluation" and "anchor_loss" in event["figures"]:
            yield event["time"] - began, event["figures"]["anchor_loss"]


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _plan(processes: Iterable[Process]) -> RunPlan:
    path = next(path for process in processes for path in process.state.glob(f"*/{MANIFEST_FILE}"))
    return plan_run(decode_kept_manifest(path.read_bytes(), path, "").manifest)


def _histories(processes: Iterable[Process], plan: RunPlan) -> tuple[dict[Digest, Roster], dict[Digest, Entry]]:
    rosters: dict[Digest, Roster] = {}
    entries: dict[Digest, Entry] = {}
    for process in processes:
        for path in process.state.glob(f"*/{ROSTERS_FILE}"):
            for certified in RunFolder(process.state, plan.rules.run).read_rosters():
                rosters[certified.roster.digest()] = certified.roster
            if (path.parent / ENTRIES_FOLDER).is_dir():
                log = EntryLog(path.parent / ENTRIES_FOLDER, keep_cycles=KEPT_CYCLES, mends=False)
                entries |= {entry.digest(): entry for entry in log.kept()}
    return rosters, entries


def _chain(rosters: Iterable[Roster]) -> list[Roster]:
    """Return the longest chain of rosters, the first one first."""
    by_digest = {roster.digest(): roster for roster in rosters}
    roster = max(by_digest.values(), key=lambda each: (each.k, each.cycle))
    chain = [roster]
    while roster.k and roster.parent in by_digest:
        roster = by_digest[roster.parent]
        chain.append(roster)
    return chain[::-1]


def _owner(entry: Entry, roster: Roster, plan: RunPlan) -> PeerId:
    grid = fold_roster(roster, plan.rules.group_size)
    return grid.turned(plan.rules.clock.cycle(entry.round)).owner(entry.span)


def _begin(roster: Roster, clock: RoundClock) -> float:
    """Return when the cycle begins in which a roster was agreed on."""
    return clock.begin(roster.cycle * clock.num_fragments)


def _changes(chain: Sequence[Roster], names: Mapping[PeerId, str], clock: RoundClock, began: float) -> Iterator[str]:
    for before, after in itertools.pairwise(chain):
        told = [
            f"{sign}{names.get(peer, short_peer_id(peer))}"
            for sign, peers in (("+", after.peers() - before.peers()), ("-", before.peers() - after.peers()))
            for peer in sorted(peers)
        ]
        reducers = sorted(f"{names.get(m.peer, '?')} ({m.share})" for m in after.members if m.reduces)
        yield (
            f"{_begin(after, clock) - began:6.1f} s  roster {after.k}{' degraded' if after.degraded else ''}: "
            f"{', '.join([f'{len(after.members)} members', *told])}; reducing: {', '.join(reducers) or 'none'}"
        )
