"""The vector maths of a whole simulated swarm, done once for all peers that hold the same bytes."""

from __future__ import annotations

from p2p_diloco.ids import Digest
from p2p_diloco.lab.maths import MERGE, OUTER, mean_of_span
from p2p_diloco.lab.maths import SharedMaths as LabMaths
from p2p_diloco.outer.state import AbsorbedEntry, SpanState, absorb
from p2p_diloco.swarm.vector_work import Codecs

__all__ = ["MERGE", "OUTER", "SharedMaths", "mean_of_span"]


class SharedMaths(LabMaths):
    """The lab's maths, for updates as a replica gets them: without the entry that they came in."""

    def __init__(self, codecs: Codecs, span_elements: int) -> None:
        super().__init__(codecs, span_elements)
        self._followed: dict[tuple[SpanState, Digest], SpanState] = {}

    def follow(self, state: SpanState, entry: AbsorbedEntry, payload: bytes | memoryview) -> SpanState:
        """Return the state after an entry; the same object for all who hold the same state object."""
        key = (state, entry.digest)
        found = self._followed.get(key)
        if found is None:
            update_N = self.decode(self.codecs.entry, payload)
            found = self._followed[key] = absorb(state, entry=entry, update_N=update_N, rule=OUTER)
        return found
