"""Other systems, implemented from their papers, with the same learners, text and outer step.

Deviations from the papers are noted where they occur. Servers cost nothing here, nothing fails and no system waits,
which favours the baselines.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.outer_step import MergeRule, OuterRule, apply_outer_step, merge_local
from research.algorithm import Algorithm, Model, radial_mean
from research.learners import Learners
from simulator.maths import weighted_mean

BFLOAT16_BYTES, FLOAT32_BYTES = 2.0, 4.0
_E3M0_EXPONENTS = 7
"""Number of powers of two that three bits can encode; the eighth code is zero."""
_E3M0_LEAST = 1.0 - _E3M0_EXPONENTS
_E3M0_BLOCK = 128
_SPARSE_CHUNK, _SPARSE_KEPT = 4096, 128
_SPARSE_BINS, _SPARSE_SIGMAS = 4, 6.0
SPARSE_BYTES = (2 + 12) / 8 * _SPARSE_KEPT / _SPARSE_CHUNK
"""Bytes per parameter of a sparse contribution: 2 bits and a position of 12 for each element that is sent."""


class DataParallel(Algorithm):
    """One learner with the batch of all islands, equivalent to averaging gradients after every step.

    Bytes: a ring all-reduce of gradients among `num_islands`.

    Args:
        bytes_each: bytes per parameter of a gradient.
        accumulate: ticks per step; the gradients of these ticks are added up before they are sent.
        averaging: decay of a running mean of θ, which is then the result; 0: the result is θ.
    """

    def __init__(
        self,
        learners: Learners,
        num_islands: int,
        *,
        bytes_each: float = BFLOAT16_BYTES,
        accumulate: int = 1,
        averaging: float = 0.0,
    ) -> None:
        super().__init__(learners)
        if len(learners) != 1:
            raise ConfigError(f"data-parallel has one learner with the batch of all islands, not {len(learners)}")
        self._step_bytes = 2.0 * (1.0 - 1.0 / num_islands) * bytes_each * self.num_parameters
        self._accumulate = accumulate
        self._averaging = averaging
        self._mean = self.read_all(0)
        self._num_steps = 0

    def border(self, tick: int) -> None:
        """Count the bytes of the step, and add its result to the running mean."""
        if tick % self._accumulate:
            return
        self.sent_bytes += self._step_bytes
        if self._averaging:
            self._num_steps += 1
            # At first the mean is of few steps, so that the initial parameters are soon forgotten.
            decay = np.float32(min(self._averaging, (1.0 + self._num_steps) / (10.0 + self._num_steps)))
            self._mean = tuple(
                decay * mean_N + (np.float32(1.0) - decay) * local_N
                for mean_N, local_N in zip(self._mean, self.read_all(0), strict=True)
            )

    def models(self) -> list[Model]:
        """Return θ, or its running mean."""
        return [self._mean if self._averaging else self.read_all(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralRule:
    """Exchange rule of a run with a server, or with a blocking all-reduce in place of one.

    Attributes:
        sync_every: ticks between exchanges of a fragment.
        delay: ticks from a snapshot to the border at which learners get the new fragment.
        local_share: α in θ ← α θ + (1 − α) φ, applied when the fragment arrives.
        outer: outer optimiser, Nesterov as for all systems here.
        quantise: returns a contribution as it is received.
        bytes_up, bytes_down: bytes per parameter and exchange.
        weights_by_tokens: weigh by quantity times quality, tokens² / steps; False: equal weights.
        is_radial: average directions and norms separately.
        lost_share: share of contributions that never arrive; their learners get φ like all others.
    """

    sync_every: int
    delay: int
    local_share: float
    outer: OuterRule
    quantise: Callable[[Vector], Vector]
    bytes_up: float
    bytes_down: float
    weights_by_tokens: bool = False
    is_radial: bool = False
    lost_share: float = 0.0


class CentralDiloco(Algorithm):
    """DiLoCo and its variants with a single φ.

    Source: DiLoCo, arXiv 2311.08105, algorithm 1. With fragments, delay and α: Streaming DiLoCo, arXiv 2501.18512,
    algorithm 2. With token weights, radial means and α = 0: Decoupled DiLoCo, arXiv 2604.21428, if no learner is late.
    """

    def __init__(self, learners: Learners, rule: CentralRule, *, seed: int = 0) -> None:
        super().__init__(learners)
        self._rng = random.Random(seed)
        num_fragments = len(learners.fragments)
        if rule.sync_every % num_fragments:
            raise ConfigError(f"{rule.sync_every} steps do not divide into {num_fragments} exchanges")
        self._rule = rule
        self._ticks = rule.sync_every // num_fragments
        self._anchor: list[Vector] = list(self.read_all(0))
        self._momentum: list[Vector] = [np.zeros_like(anchor_N) for anchor_N in self._anchor]
        self._told = [[(0, 0)] * num_fragments for _ in range(len(learners))]
        self._under_way: list[tuple[int, int, Vector]] = []

    def border(self, tick: int) -> None:
        """Deliver updates that are due, then exchange a fragment if one is due."""
        self._deliver(tick)
        if tick % self._ticks == 0:
            self._exchange((tick // self._ticks) % len(self._anchor), tick)
            self._deliver(tick)

    def settle(self, tick: int) -> None:
        """Exchange once more each fragment that was not exchanged at the last step."""
        for later in range(tick + 1, tick + self._rule.sync_every):
            self.border(later)

    def models(self) -> list[Model]:
        """Return φ."""
        return [tuple(self._anchor)]

    def _exchange(self, fragment: int, tick: int) -> None:
        rule, learners = self._rule, self.learners
        vectors, weights = [], []
        for learner in range(len(learners)):
            now = (learners.tokens(learner), learners.steps(learner))
            told, self._told[learner][fragment] = self._told[learner][fragment], now
            if now[1] == told[1] or self._rng.random() < rule.lost_share:
                continue
            vectors.append(rule.quantise(self._anchor[fragment] - learners.read(learner, fragment)))
            tokens, steps = now[0] - told[0], now[1] - told[1]
            weights.append(tokens * tokens / steps if rule.weights_by_tokens else 1.0)
        if not vectors:
            return
        if rule.is_radial:
            mean_N = radial_mean(vectors, weights, self.tensors_of(fragment))
        else:
            mean_N = weighted_mean(vectors, weights)
        outer = rule.outer.at((tick - 1) // rule.sync_every)
        step = apply_outer_step(self._anchor[fragment], self._momentum[fragment], mean_N, outer)
        self._anchor[fragment], self._momentum[fragment] = step
        self.sent_bytes += (rule.bytes_up + rule.bytes_down) * self.elements(fragment)
        self._under_way.append((tick + rule.delay, fragment, self._anchor[fragment]))

    def _deliver(self, tick: int) -> None:
        while self._under_way and self._under_way[0][0] <= tick:
            _, fragment, anchor_N = self._under_way.pop(0)
            blend = MergeRule(kind="blend", alpha=self._rule.local_share)
            for learner in range(len(self.learners)):
                local_N = self.learners.read(learner, fragment)
                merged_N = merge_local(local_N, anchor_N, anchor_N, None, blend)
                self.learners.write(learner, fragment, merged_N)


class NoLoCo(Algorithm):
    """NoLoCo: pairs average their pseudo-gradients and pull their anchors together, without a run-wide φ.

    δ ← α δ + β mean(θ − φ) − γ (φ − mean φ); φ ← φ + δ; θ ← φ.

    Source: NoLoCo, arXiv 2506.10911, equation 2, with the sign of its appendix (equation 32) and of its authors' code.

    Args:
        sync_every: ticks of a cycle; pairs are drawn again in each.
        alpha, beta, gamma: coefficients of the rule; 0.5, 0.7, 0.7 in the authors' code.
    """

    def __init__(
        self,
        learners: Learners,
        *,
        sync_every: int,
        seed: int,
        alpha: float = 0.5,
        beta: float = 0.7,
        gamma: float = 0.7,
    ) -> None:
        super().__init__(learners)
        self._sync_every = sync_every
        self._rng = random.Random(seed)
        self._rates = (np.float32(alpha), np.float32(beta), np.float32(gamma))
        self._anchors = [list(self.read_all(learner)) for learner in range(len(learners))]
        self._deltas = [[np.zeros_like(anchor_N) for anchor_N in anchors] for anchors in self._anchors]

    def border(self, tick: int) -> None:
        """Exchange at the end of a cycle."""
        if tick % self._sync_every == 0:
            for group in draw_pairs(self._rng, len(self.learners)):
                for fragment in range(len(self.learners.fragments)):
                    self._exchange(group, fragment)
            # Each learner sends its pseudo-gradient and its anchor to the other.
            self.sent_bytes += 2 * FLOAT32_BYTES * self.num_parameters

    def models(self) -> list[Model]:
        """Return the anchors of all."""
        return [tuple(anchors) for anchors in self._anchors]

    def _exchange(self, group: list[int], fragment: int) -> None:
        alpha, beta, gamma = self._rates
        ones = [1.0] * len(group)
        anchors = [self._anchors[learner][fragment] for learner in group]
        moved = [self.learners.read(i, fragment) - anchor_N for i, anchor_N in zip(group, anchors, strict=True)]
        mean_moved_N, mean_anchor_N = weighted_mean(moved, ones), weighted_mean(anchors, ones)
        for learner, anchor_N in zip(group, anchors, strict=True):
            delta_N = alpha * self._deltas[learner][fragment] + beta * mean_moved_N - gamma * (anchor_N - mean_anchor_N)
            self._deltas[learner][fragment] = delta_N
            self._anchors[learner][fragment] = anchor_N + delta_N
            self.learners.write(learner, fragment, anchor_N + delta_N)


class SparseLoCo(Algorithm):
    """SparseLoCo: the largest elements of an error buffer, in two bits; the buffer plays the part of outer momentum.

    e ← β e + Δ; Δ' = two bits of the largest elements of e in each chunk; e ← e − Δ'; φ ← φ − η mean Δ'; θ ← φ.

    Source: arXiv 2508.15706; the chunk of 64 × 64 with 128 elements and the two bits are those of its authors' code.
    The mean is over all learners, as in arXiv 2603.08163; the code divides by the senders of an element.

    Args:
        sync_every: ticks of a cycle.
        outer_rate, decay: η and β; 1 and 0.95 in the authors' code.
    """

    def __init__(self, learners: Learners, *, sync_every: int, outer_rate: float, decay: float) -> None:
        super().__init__(learners)
        self._sync_every = sync_every
        self._outer_rate, self._decay = np.float32(outer_rate), np.float32(decay)
        self._anchor: list[Vector] = list(self.read_all(0))
        self._errors = [[np.zeros_like(anchor_N) for anchor_N in self._anchor] for _ in range(len(learners))]

    def border(self, tick: int) -> None:
        """Exchange at the end of a cycle."""
        if tick % self._sync_every == 0:
            for fragment in range(len(self._anchor)):
                self._exchange(fragment)

    def models(self) -> list[Model]:
        """Return φ."""
        return [tuple(self._anchor)]

    def _exchange(self, fragment: int) -> None:
        anchor_N, learners = self._anchor[fragment], self.learners
        sent = []
        for learner in range(len(learners)):
            error_N = self._decay * self._errors[learner][fragment] + (anchor_N - learners.read(learner, fragment))
            sent.append(as_sparse_two_bits(error_N))
            self._errors[learner][fragment] = error_N - sent[-1]
        self._anchor[fragment] = anchor_N - self._outer_rate * weighted_mean(sent, [1.0] * len(sent))
        for learner in range(len(learners)):
            learners.write(learner, fragment, self._anchor[fragment])
        # All get the contributions of all, each with a position of twelve bits for an element of two.
        self.sent_bytes += (len(learners) - 1) * SPARSE_BYTES * len(anchor_N)


def draw_pairs(rng: random.Random, num_learners: int) -> list[list[int]]:
    """Return all learners in random pairs; the last one of an odd number makes a pair three."""
    order = list(range(num_learners))
    rng.shuffle(order)
    groups = [order[at : at + 2] for at in range(0, num_learners, 2)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        alone = groups.pop()
        groups[-1] += alone
    return groups


def as_float32(vector_N: Vector) -> Vector:
    """Return the vector unchanged."""
    return vector_N


def as_int4(vector_N: Vector) -> Vector:
    """Return the vector rounded by p2p_diloco's int4, for systems whose own four-bit format is not published."""
    codec = codec_named("int4")
    return codec.decode(codec.encode(vector_N), len(vector_N))


def as_sparse_two_bits(vector_N: Vector) -> Vector:
    """Return the 128 largest elements of each 4,096 in one of four values, and zeros.

    The four values of a chunk are the means of the elements in four bins, each a quarter of six deviations wide.

    Source: as `SparseLoCo`. Of a shorter last chunk, as many elements are taken.
    """
    padded = -len(vector_N) % _SPARSE_CHUNK
    chunks_BK = np.pad(vector_N, (0, padded)).reshape(-1, _SPARSE_CHUNK)
    largest_BT = np.argpartition(-np.abs(chunks_BK), _SPARSE_KEPT - 1, axis=1)[:, :_SPARSE_KEPT]
    values_BT = np.take_along_axis(chunks_BK, largest_BT, axis=1)
    means_B1 = values_BT.mean(axis=1, keepdims=True)
    widths_B1 = values_BT.std(axis=1, ddof=1, keepdims=True) * (_SPARSE_SIGMAS / _SPARSE_BINS)
    steps_BT = np.rint((values_BT - means_B1) / np.where(widths_B1 > 0, widths_B1, 1)) + _SPARSE_BINS // 2
    bins_BT = np.clip(steps_BT, 0, _SPARSE_BINS - 1)
    rounded_BT = np.zeros_like(values_BT)
    for index in range(_SPARSE_BINS):
        inside_BT = bins_BT == index
        counts_B1 = np.maximum(inside_BT.sum(axis=1, keepdims=True), 1)
        rounded_BT += inside_BT * (np.where(inside_BT, values_BT, 0).sum(axis=1, keepdims=True) / counts_B1)
    decoded_BK = np.zeros_like(chunks_BK)
    np.put_along_axis(decoded_BK, largest_BT, rounded_BT, axis=1)
    decoded_N: Vector = decoded_BK.reshape(-1)[: len(vector_N)]
    return decoded_N


def as_e3m0(vector_N: Vector) -> Vector:
    """Return the vector rounded to four bits: a sign and a power of two relative to the largest of each 128 elements.

    Source: Streaming DiLoCo, arXiv 2501.18512, section on low precision; its block size is not published.
    """
    padded = -len(vector_N) % _E3M0_BLOCK
    blocks_BK = np.pad(vector_N, (0, padded)).reshape(-1, _E3M0_BLOCK)
    largest_B1 = np.abs(blocks_BK).max(axis=1, keepdims=True)
    shares_BK = np.abs(blocks_BK) / np.where(largest_B1 > 0, largest_B1, 1)
    # Round to the nearest power: the border between two powers is their mean, 1.5 times the smaller one.
    exponents_BK = np.floor(np.log2(np.maximum(shares_BK, 2.0**-40) / 1.5)) + 1.0
    powers_BK = np.where(shares_BK < 2.0**-_E3M0_EXPONENTS, 0.0, np.exp2(np.maximum(exponents_BK, _E3M0_LEAST)))
    decoded_BK = np.sign(blocks_BK) * powers_BK * largest_B1
    decoded_N: Vector = decoded_BK.reshape(-1)[: len(vector_N)].astype(np.float32)
    return decoded_N
