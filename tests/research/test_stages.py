"""Stages of evidence: no seed and no held-out byte belongs to two of them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from p2p_diloco.app.text.data import open_corpus
from p2p_diloco.errors import ConfigError
from research.stages import BLOCKS, SEEDS, check_seed, cut_evenly, held_out_blocks, seeds_of


def test_no_seed_belongs_to_two_stages() -> None:
    for one, other in combinations(SEEDS, 2):
        assert not set(SEEDS[one]) & set(SEEDS[other])
    assert list(seeds_of("tune", 3)) == [1000, 1001, 1002]
    with pytest.raises(ConfigError, match="--seeds is 1001; expected at most 1000"):
        seeds_of("test", 1001)
    check_seed("explore", 7)
    with pytest.raises(ConfigError, match="seed 7 is not one of the stage 'tune'; expected 1000 to 1999"):
        check_seed("tune", 7)


def test_no_held_out_byte_belongs_to_two_stages(text: str) -> None:
    corpus = open_corpus(text)
    bytes_of = {stage: [held_out(piece) for piece in held_out_blocks(corpus, stage)] for stage in ("tune", "test")}
    assert len(bytes_of["tune"]) == len(bytes_of["test"]) == BLOCKS
    pieces = [*bytes_of["tune"], *bytes_of["test"]]
    assert sum(map(len, pieces)) == len(set().union(*pieces)) == np.diff(corpus.held_out_parts).sum()
    assert set().union(*pieces) == held_out(corpus), "no byte that somebody trains on"
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    for tune, test in zip(bytes_of["tune"], bytes_of["test"], strict=True):
        assert max(tune) < min(test), "they take turns"
    assert held_out_blocks(corpus, "explore") == (corpus,)


def held_out(corpus) -> set[int]:  # type: ignore[no-untyped-def]
    return {position for start, stop in corpus.held_out_parts.tolist() for position in range(start, stop)}


def test_stretches_are_cut_where_a_piece_ends() -> None:
    stretches = np.array([(0, 3), (10, 12), (20, 25)])
    pieces = [piece.tolist() for piece in cut_evenly(stretches, 3)]
    assert pieces == [[[0, 3]], [[10, 12], [20, 21]], [[21, 25]]]
