"""Stages of evidence: exploring, tuning and testing, each with its own seeds and its own held-out text.

The rules are in research/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.app.text.data import Corpus
from p2p_diloco.errors import ConfigError

Stage = Literal["explore", "tune", "test"]

SEEDS: dict[Stage, range] = {
    "explore": range(1000),
    "tune": range(1000, 2000),
    "test": range(2000, 3000),
}
"""Seeds of each stage; no two overlap."""
BLOCKS = 16
"""Pieces of held-out text of a stage, which a trial judges one by one."""
JUDGED_TOKENS: dict[Stage, int] = {"explore": 32_768, "tune": 32_768, "test": 131_072}
"""Held-out tokens of the final loss of a trial."""


def seeds_of(stage: Stage, count: int) -> range:
    """Return the first `count` seeds of a stage.

    Raises:
        ConfigError: the stage has fewer.
    """
    seeds = SEEDS[stage]
    if count > len(seeds):
        raise ConfigError(f"--seeds is {count}; expected at most {len(seeds)}")
    return seeds[:count]


def check_seed(stage: Stage, seed: int) -> None:
    """Refuse a seed of another stage.

    Raises:
        ConfigError: the seed belongs to another stage, or to none.
    """
    if seed not in SEEDS[stage]:
        own = SEEDS[stage]
        raise ConfigError(f"seed {seed} is not one of the stage {stage!r}; expected {own.start} to {own.stop - 1}")


def held_out_blocks(corpus: Corpus, stage: Stage) -> tuple[Corpus, ...]:
    """Return the text once for each piece of held-out text that the stage judges by.

    Exploring has a single piece, all of the held-out text. Tuning and testing have 16 each, of the same length, which
    take turns in the order of the text: they cover the same topics and share no byte.
    """
    if stage == "explore":
        return (corpus,)
    pieces = cut_evenly(corpus.held_out_parts, 2 * BLOCKS)
    return tuple(_judged_by(corpus, piece) for piece in pieces[0 if stage == "tune" else 1 :: 2])


def cut_evenly(parts_S2: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], ...]:
    """Cut stretches, laid end to end, into `count` pieces whose lengths differ by at most one byte.

    Args:
        parts_S2: (start, stop) of the stretches, shape (S, 2).
    Returns:
        For each piece the stretches in it, same form.
    """
    total = int((parts_S2[:, 1] - parts_S2[:, 0]).sum())
    borders = [total * index // count for index in range(count + 1)]
    return tuple(np.array(list(_between(parts_S2, first, last)), dtype=np.int64) for first, last in pairwise(borders))


def _between(parts_S2: NDArray[np.int64], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield what lies between two positions in the stretches laid end to end."""
    position = 0
    for start, stop in parts_S2.tolist():
        own_first, own_last = max(first - position, 0), min(last - position, stop - start)
        if own_first < own_last:
            yield start + own_first, start + own_last
        position += stop - start


def _judged_by(corpus: Corpus, piece_S2: NDArray[np.int64]) -> Corpus:
    own = copy(corpus)
    own.held_out_parts = piece_S2
    return own
