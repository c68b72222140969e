"""One cell of an experiment: which algorithm, on how many islands, with which figures; and its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from p2p_diloco.codec.codec import codec_named
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.merge import MergeRule
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.outer.vector import Vector
from p2p_diloco.span.vector_work import Codecs
from p2p_diloco.training.data import Corpus, open_corpus
from p2p_diloco.training.inner_loop import InnerRule
from p2p_diloco.training.model import ModelShape
from research import baselines
from research.algorithm import Algorithm
from research.baselines import (
    CentralDiloco,
    CentralRule,
    DataParallel,
    DeltaOnlyGroups,
    GossipRule,
    NoLoCo,
)
from research.learners import EVALUATION_TOKENS, Judge, TextLearners, shape_named
from research.ours import OurRule, OurSwarm

OURS = "p2p-diloco"
SLOWNESS = 4
WARMUP_SHARE = 0.08
PARTED = frozenset({OURS, "streaming-diloco", "decoupled-diloco", "decoupled-diloco-int4"})
"""Systems that exchange the model in fragments, and train while they do."""
INT4_BYTES = 4.25 / 8
"""For each parameter, scales told. What comes down in four bits is counted so, and comes whole."""
CURVE_POINTS = 12
"""Of rows whose curve is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that determines a trial but its seed and its text.

    Attributes:
        name: of the row in the table.
        system: which algorithm, see `SYSTEMS`.
        size: of the model.
        islands: learners; data-parallel has one with the batch of all.
        ticks: inner steps of an island at full speed.
        batch: windows of a step.
        learning_rate: inner; cosine to a tenth of it, warm-up over the first twelfth.
        inner: the optimiser of the inner steps.
        beta1, beta2: of AdamW.
        sync_every: H, ticks of a cycle.
        fragments: P.
        delay: τ, ticks.
        outer_rate, momentum: η, μ.
        outer_schedule: of η, of ours: from half to whole over the first quarter, or to a half over the last.
        merge, alpha, late: how θ follows; for others than ours `alpha` is the local share.
        contribution, entry: codecs, of ours.
        rounds_stochastically: entries, where they have few bits.
        residual: where what a codec leaves of a contribution stays: in θ, in a buffer beside it, or nowhere.
        is_radial: of a server: merge directions and norms apart, tensor by tensor.
        mean: of ours: plain, or directions and lengths apart, block by block.
        weights_by_tokens: quantity times quality.
        slow: islands that make one step in `SLOWNESS` ticks.
        lost_share: contributions that never arrive.
        void_share: rounds that end without an entry.
        away_share: of the cycles that an island is away; it returns with φ, of ours.
        group: learners in a group, of those that gossip.
        by_topic: each island has a stretch of the text of its own.
        judged_tokens: of held-out text that the result is judged by.
        points: of the curve on the way.
    """

    name: str
    system: str = OURS
    size: str = "tiny"
    islands: int = 4
    ticks: int = 480
    batch: int = 4
    learning_rate: float = 2e-3
    inner: Literal["adamw", "muon"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.98
    sync_every: int = 32
    fragments: int = 4
    delay: int = 4
    outer_rate: float = 1.0
    momentum: float = 0.5
    outer_schedule: Literal["constant", "warm-up", "decay"] = "constant"
    merge: Literal["keep", "blend", "overwrite"] = "keep"
    alpha: float = 0.0
    late: Literal["drop", "shrink", "keep"] = "drop"
    contribution: str = "int4"
    entry: str = "int4"
    rounds_stochastically: bool = True
    residual: Literal["weights", "buffer", "dropped"] = "weights"
    is_radial: bool = False
    mean: Literal["plain", "radial"] = "plain"
    weights_by_tokens: bool = True
    slow: int = 0
    lost_share: float = 0.0
    void_share: float = 0.0
    away_share: float = 0.0
    group: int = 2
    by_topic: bool = False
    judged_tokens: int = EVALUATION_TOKENS
    points: int = 0

    def with_tokens_of_all(self) -> Setting:
        """Return this with so many more ticks that slow islands and absences cost no tokens."""
        speed = ((self.islands - self.slow) + self.slow / SLOWNESS) * (1.0 - self.away_share)
        cycles = round(self.ticks / self.sync_every * self.islands / speed)
        return replace(self, ticks=cycles * self.sync_every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one trial.

    Attributes:
        loss: held-out, nats per byte; the mean where replicas differ.
        tokens: trained on by all islands together.
        bytes_sent_per_parameter: in the whole run, per island.
        seconds: of CPU.
        curve: (ticks, loss) on the way, of the first replica, on a quarter of the held-out tokens; empty unless the
            setting asks for points.
    """

    name: str
    seed: int
    loss: float
    tokens: int
    bytes_sent_per_parameter: float
    seconds: float
    curve: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """The manifest of a run that a trial is compared with.

    Attributes:
        shape: instead of the one that the setting names.
        rule: of the inner steps, as it is.
        corpus: already open.
    """

    shape: ModelShape
    rule: InnerRule
    corpus: Corpus


def run_trial(
    setting: Setting,
    seed: int,
    text: str | None = None,
    *,
    within: Circumstances | None = None,
    device: str = "cpu",
) -> Outcome:
    """Train and judge; the same on every machine that rounds alike, whatever else runs.

    Args:
        text: path of a text; None: the standard library's source.
        within: instead of what the setting and `text` say.
        device: where islands step, one after the other.
    """
    torch.set_num_threads(1)
    began = time.process_time()
    if within is None:
        within = Circumstances(shape=shape_named(setting.size), rule=_rule(setting), corpus=open_corpus(text))
    learners = _learners(setting, seed, within, device)
    algorithm = make_algorithm(setting, learners, seed)
    judge = partial(Judge, within.shape, within.corpus, _fragments(setting), device=device)
    glance = judge(num_tokens=max(1, setting.judged_tokens // 4))
    every = max(1, setting.ticks // setting.points) if setting.points else setting.ticks + 1
    curve = []
    for tick in range(1, setting.ticks + 1):
        learners.progress((tick - 1) / setting.ticks)
        for learner in range(len(learners)):
            is_its_turn = learner >= setting.slow or tick % SLOWNESS == 0
            if is_its_turn and not algorithm.is_away(learner):
                learners.step(learner)
        algorithm.border(tick)
        if tick % every == 0:
            curve.append((tick, glance.loss(algorithm.models()[0])))
    algorithm.settle(setting.ticks)
    last = judge(num_tokens=setting.judged_tokens)
    losses = [last.loss(model) for model in algorithm.models()]
    return Outcome(
        name=setting.name,
        seed=seed,
        loss=sum(losses) / len(losses),
        tokens=sum(learners.tokens(learner) for learner in range(len(learners))),
        bytes_sent_per_parameter=algorithm.sent_bytes / algorithm.num_parameters,
        seconds=time.process_time() - began,
        curve=tuple(curve),
    )


def _rule(setting: Setting) -> InnerRule:
    warmup = max(1, int(WARMUP_SHARE * setting.ticks))
    return InnerRule(
        optimizer=setting.inner,
        learning_rate=setting.learning_rate,
        beta1=setting.beta1,
        beta2=setting.beta2,
        schedule="cosine",
        warmup_steps=warmup,
    )


def _learners(setting: Setting, seed: int, within: Circumstances, device: str) -> TextLearners:
    is_one = setting.system == "data-parallel"
    return TextLearners(
        shape=within.shape,
        corpus=within.corpus,
        rule=within.rule,
        num_learners=1 if is_one else setting.islands,
        windows=setting.batch * (setting.islands if is_one else 1),
        num_fragments=_fragments(setting),
        seed=seed,
        by_topic=setting.by_topic and not is_one,
        device=device,
    )


def _fragments(setting: Setting) -> int:
    return setting.fragments if setting.system in PARTED else 1


def make_algorithm(setting: Setting, learners: TextLearners, seed: int) -> Algorithm:
    """Return the algorithm that a setting names.

    Raises:
        ConfigError: there is none of that name, or its figures do not fit together.
    """
    if setting.system not in SYSTEMS:
        raise ConfigError(f"no algorithm is called {setting.system!r}; known are {', '.join(SYSTEMS)}")
    return SYSTEMS[setting.system](setting, learners, seed)


def _ours(setting: Setting, learners: TextLearners, seed: int) -> Algorithm:
    codecs = Codecs(
        contribution=codec_named(setting.contribution),
        row_mean=codec_named("int8"),
        entry=codec_named(setting.entry),
        rounds_stochastically=setting.rounds_stochastically and setting.entry not in ("float32", "bfloat16"),
    )
    rule = OurRule(
        sync_every=setting.sync_every,
        delay=setting.delay,
        outer=OuterRule(learning_rate=setting.outer_rate, momentum=setting.momentum),
        merge=MergeRule(kind=setting.merge, alpha=setting.alpha, late=setting.late),
        codecs=codecs,
        weights_by_tokens=setting.weights_by_tokens,
        is_radial=setting.mean == "radial",
        lost_share=setting.lost_share,
        void_share=setting.void_share,
        away_share=setting.away_share,
        residual=setting.residual,
        outer_factor=OUTER_SCHEDULES[setting.outer_schedule],
        num_cycles=setting.ticks // setting.sync_every,
    )
    return OurSwarm(learners, rule, seed=seed)


def _central(
    setting: Setting, learners: TextLearners, quantise: Callable[[Vector], Vector], up: float, down: float
) -> Algorithm:
    return CentralDiloco(
        learners,
        CentralRule(
            sync_every=setting.sync_every,
            delay=setting.delay,
            local_share=setting.alpha,
            outer=OuterRule(learning_rate=setting.outer_rate, momentum=setting.momentum),
            quantise=quantise,
            bytes_up=up,
            bytes_down=down,
            weights_by_tokens=setting.weights_by_tokens,
            is_radial=setting.is_radial,
        ),
    )


def _ring(setting: Setting) -> float:
    """Return how often each parameter is sent by an island, in each of the two halves of a ring all-reduce."""
    return 1.0 - 1.0 / setting.islands


OUTER_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "warm-up": lambda progress: min(1.0, 0.5 + 2.0 * progress),
    "decay": lambda progress: min(1.0, 1.0 - 2.0 * (progress - 0.75)),
}
"""What η is multiplied by, by how far the run is, 0 to 1."""

SYSTEMS: dict[str, Callable[[Setting, TextLearners, int], Algorithm]] = {
    OURS: _ours,
    "data-parallel": lambda setting, learners, seed: DataParallel(learners, setting.islands),
    "textbook-diloco": lambda setting, learners, seed: _central(
        setting, learners, baselines.as_float32, 4 * _ring(setting), 4 * _ring(setting)
    ),
    "opendiloco": lambda setting, learners, seed: _central(
        setting, learners, baselines.as_float16, 2 * _ring(setting), 2 * _ring(setting)
    ),
    "streaming-diloco": lambda setting, learners, seed: _central(
        setting, learners, baselines.as_e3m0, 0.5 * _ring(setting), 0.5 * _ring(setting)
    ),
    "decoupled-diloco": lambda setting, learners, seed: _central(setting, learners, baselines.as_float32, 4.0, 4.0),
    "decoupled-diloco-int4": lambda setting, learners, seed: _central(
        setting, learners, baselines.as_int4, INT4_BYTES, INT4_BYTES
    ),
    "noloco": lambda setting, learners, seed: NoLoCo(
        learners,
        GossipRule(sync_every=setting.sync_every, group=2),
        seed=seed,
        alpha=setting.momentum,
        beta=setting.outer_rate,
        gamma=setting.outer_rate,
    ),
    "delta-only-groups": lambda setting, learners, seed: DeltaOnlyGroups(
        learners,
        GossipRule(sync_every=setting.sync_every, group=setting.group),
        OuterRule(learning_rate=setting.outer_rate, momentum=setting.momentum),
        seed=seed,
    ),
}
"""Algorithms by the names of their rows."""
