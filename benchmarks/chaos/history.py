"""The final history of a run, collected from its peers' disks while it goes on: they keep only the latest entries."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from benchmarks.chaos.carried import carried_tokens
from benchmarks.chaos.figures import Inclusion
from p2p_diloco.app.models.run_model import make_start
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import StateError
from p2p_diloco.ids import Digest, PeerId, SpanId
from p2p_diloco.protocol.wire.entry import Entry, included_places, next_head
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.session.founding import genesis_states
from p2p_diloco.span_log import SpanHead
from p2p_diloco.storage.archive import ENTRIES_FOLDER
from p2p_diloco.storage.entry_log import EntryLog
from p2p_diloco.storage.run_folder import ROSTERS_FILE, RunFolder, run_folder
from research.trace import read_trace

_ALL_CYCLES = 1 << 30


class History:
    """Copies the entries and rosters of all peers before they are deleted.

    Args:
        folder: where the copies are.
        plan: the run.
    """

    def __init__(self, folder: Path, plan: RunPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._seen: dict[Path, tuple[int, int]] = {}
        self._rosters: dict[Digest, Roster] = {}

    def collect(self, name: str, state_directory: Path) -> None:
        """Copy what is new on a peer's disk. The peer may be running; an unfinished file is copied again later."""
        source = run_folder(state_directory, self._plan.rules.run)
        target = self._folder / name
        target.mkdir(parents=True, exist_ok=True)
        for path in source.glob(f"{ENTRIES_FOLDER}/*.log"):
            if self._is_new(path):
                shutil.copyfile(path, target / path.name)
        if self._is_new(source / ROSTERS_FILE):
            for certified in RunFolder(state_directory, self._plan.rules.run).read_rosters():
                self._rosters[certified.roster.digest()] = certified.roster

    def _is_new(self, path: Path) -> bool:
        try:
            found = path.stat()
        except OSError:
            return False  # not written yet, or deleted meanwhile
        stamp = (found.st_mtime_ns, found.st_size)
        if self._seen.get(path) == stamp:
            return False
        self._seen[path] = stamp
        return True

    def inclusions(self, islands: Mapping[PeerId, tuple[str, Path]]) -> list[Inclusion]:
        """Return the entries of the final history.

        Args:
            islands: name of each peer's island, and the folder of its trace.
        Raises:
            StateError: the founding roster, an entry or a trace is missing.
        """
        entries: dict[Digest, Entry] = {}
        for folder in sorted(self._folder.iterdir()):
            log = EntryLog(folder, keep_cycles=_ALL_CYCLES, mends=False)
            entries |= {entry.digest(): entry for entry in log.kept()}
        founding = [roster for roster in self._rosters.values() if roster.k == 0]
        if len(founding) != 1:
            raise StateError(f"the peers' disks have {len(founding)} founding rosters; expected one")
        rounds = {digest: entry.round for digest, entry in entries.items()}
        carried = {peer: self._carried(folder, rounds) for peer, (_, folder) in islands.items()}
        children: dict[tuple[SpanId, Digest], list[Entry]] = defaultdict(list)
        for entry in entries.values():
            children[entry.span, entry.parent].append(entry)
        found = []
        for span, state in genesis_states(make_start(self._plan), founding[0]).items():
            chain = _longest_chain(span, state.head, children)
            highest = max((entry.height for entry in entries.values() if entry.span == span), default=0)
            if len(chain) < highest:
                raise StateError(
                    f"the entry of {span} at height {len(chain) + 1} is on no peer's disk; a longer "
                    "rounds.retained_cycles would keep it"
                )
            found += [self._inclusion(entry, islands, carried) for entry in chain]
        return found

    def _carried(self, folder: Path, rounds: Mapping[Digest, int]) -> dict[Digest, int]:
        return carried_tokens(
            read_trace(folder),
            rounds=rounds,
            spans_of=[self._plan.spans_of(fragment.index) for fragment in self._plan.fragments],
            step_tokens=self._plan.manifest.inner.step_tokens,
        )

    def _inclusion(
        self,
        entry: Entry,
        islands: Mapping[PeerId, tuple[str, Path]],
        carried: Mapping[PeerId, Mapping[Digest, int]],
    ) -> Inclusion:
        members = self._rosters[entry.roster].members
        weights = dict(zip([members[place].peer for place in included_places(entry)], entry.weights, strict=True))
        return Inclusion(
            round=entry.round,
            share=self._share(entry.span),
            tokens={
                islands[peer][0]: carried[peer].get(entry.digest(), 0)
                for peer, weight in weights.items()
                if weight and peer in islands
            },
            present=frozenset(islands[peer][0] for peer in weights if peer in islands),
        )

    def _share(self, span: SpanId) -> float:
        place = self._plan.places[span]
        return (place.stop - place.start) / sum(one.stop - one.start for one in self._plan.places.values())


def _longest_chain(span: SpanId, head: SpanHead, children: Mapping[tuple[SpanId, Digest], list[Entry]]) -> list[Entry]:
    """Return the longest chain of entries from a tip on; peers followed it, whichever branch began first."""
    longest: list[Entry] = []
    branches: list[tuple[SpanHead, list[Entry]]] = [(head, [])]
    while branches:
        head, chain = branches.pop()
        while next_entries := children.get((span, head.digest), []):
            branches += [(next_head(head, other), [*chain, other]) for other in next_entries[1:]]
            chain.append(next_entries[0])
            head = next_head(head, next_entries[0])
        longest = max(longest, chain, key=len)
    return longest
