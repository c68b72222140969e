"""Which of two lines of rosters to go by, where one went on without a majority or both did.

A line of rosters that a majority certified one after the other, without a long gap to this day, is *sound*. A peer on
a sound line never leaves it: no other line from the same parting had a majority too. One whose line is not sound takes
a sound one, whatever is counted on it. Of two that are not, the senior one is in force (`seniority`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from p2p_diloco.ids import ZERO_DIGEST, PeerId
from p2p_diloco.protocol.heartbeat import Heartbeat
from p2p_diloco.protocol.roster import Roster
from p2p_diloco.protocol.roster_book import RosterBook


def is_whole(parting: Roster, line: Sequence[Roster], cycle: int, void_cycles: int) -> bool:
    """Tell whether a majority certified all rosters of a line since the parting, the last of them lately."""
    return bool(line) and line[-1].cycle >= cycle - void_cycles and line[-1].epoch == parting.epoch


def is_sound(parting: Roster, line: Sequence[Roster], cycle: int, void_cycles: int) -> bool:
    """Tell whether a line has gone on with a majority since the parting, lately without a gap.

    Two who meet in the morning have a majority and one roster; that is not worth more than the night that a third one
    went on alone. Once they have gone on for as long as it takes to go below a majority, it is.

    Args:
        line: its last rosters are enough, two more than `void_cycles`: there is at most one in a cycle.
        cycle: the cycle in progress.
        void_cycles: so many cycles without a roster are a long gap: as many as make a peer go on without a majority.
    """
    cycles = [parting.cycle, *(roster.cycle for roster in line)]
    has_gap = any(late - early > void_cycles for early, late in pairwise(cycles) if late > cycle - void_cycles)
    return is_whole(parting, line, cycle, void_cycles) and not has_gap


def has_gone_on(parting: Roster, line: Sequence[Roster], void_cycles: int) -> bool:
    """Tell whether a majority went on from the parting in time, or for long, whatever became of it since.

    All that was certified without a majority from such a parting is of few who were cut off, or of one who made it up:
    a line that took a night is made in a moment, with the key of a single member of long ago.
    """
    if not line or line[-1].epoch != parting.epoch:
        return False
    return len(line) >= void_cycles or line[0].cycle - parting.cycle <= void_cycles


def is_better(
    parting: Roster, ours: Sequence[Roster], theirs: Sequence[Roster], cycle: int, void_cycles: int
) -> bool | None:
    """Tell whether the other line is the one to go by; None where that is told by seniority.

    Where ours is whole but young (all have slept), a line without a majority must have gone on for a while: it takes a
    single liar to begin one.
    """
    if is_sound(parting, ours, cycle, void_cycles):
        return False
    if is_sound(parting, theirs, cycle, void_cycles):
        return True
    return False if is_whole(parting, ours, cycle, void_cycles) and len(theirs) < void_cycles else None


def has_most_members(roster: Roster, peers: Iterable[PeerId]) -> bool:
    """Tell whether more than half of all members of a roster are among `peers`."""
    return 2 * len(roster.peers().intersection(peers)) > len(roster.members)


def is_left_behind(roster: Roster, heartbeats: Collection[Heartbeat], book: RosterBook) -> bool:
    """Tell whether most members of `roster` that are heard go by rosters that are not known here, or none is heard."""
    named = [beat.roster for beat in heartbeats if roster.member(beat.peer) is not None and beat.roster != ZERO_DIGEST]
    return not named or 2 * sum(digest not in book for digest in named) > len(named)
