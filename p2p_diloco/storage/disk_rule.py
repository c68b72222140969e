"""Decide what a peer may still write to its disk. Pure: sizes are arguments.

A peer that reaches a limit first keeps only the newest checkpoint and the entries after it. If that is not enough, it
writes no further checkpoints and entries: what is on the disk stays, and the run continues from memory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

ROOM_TO_RETURN = 0.9
"""Share of a limit into which everything must fit before a peer writes all again: otherwise it would stop at once."""


class Saving(enum.Enum):
    """The part of its state that a peer writes to its disk."""

    ALL = "all"
    NEWEST = "only the newest checkpoint"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRules:
    """The owner's limits in bytes; None: no limit.

    Attributes:
        cap: maximum size of the state directory.
        free: space to leave free on its disk.
    """

    cap: float | None = None
    free: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Bytes on the disk, and bytes that would be written to it.

    Attributes:
        used: in the state directory.
        free: free space on its disk.
        checkpoint: size of the next checkpoint.
        num_checkpoints: number of checkpoints that a peer without limits keeps.
    """

    used: float
    free: float
    checkpoint: float = 0.0
    num_checkpoints: int = 1


def judge_disk(rules: DiskRules, use: DiskUse, before: Saving) -> Saving:
    """Return what to write from now on; call it again a moment after each change, once its effect shows.

    A checkpoint is written before an older one is removed, so there must be room for one more.
    """
    if _fits(rules, use, 1, 1.0):
        is_roomy = before is Saving.ALL or _fits(rules, use, use.num_checkpoints, ROOM_TO_RETURN)
        return Saving.ALL if is_roomy else before
    return Saving.NEWEST if before is Saving.ALL else Saving.NOTHING


def _fits(rules: DiskRules, use: DiskUse, num_more: int, share: float) -> bool:
    more = num_more * use.checkpoint
    fits_cap = rules.cap is None or use.used + more <= share * rules.cap
    return fits_cap and (rules.free is None or use.free - more >= rules.free / share)
