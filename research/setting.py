"""Setting of a trial (algorithm, number of islands, hyperparameters), and the trial itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

import torch

from p2p_diloco.app.text.data import Corpus
from p2p_diloco.codec.codec import codec_named
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.decoder import ModelShape
from p2p_diloco.config.inner_rule import InnerRule, Schedule
from p2p_diloco.errors import ConfigError
from p2p_diloco.outer.outer_step import OuterRule
from p2p_diloco.span.reduce import Codecs
from p2p_diloco.span_log import MAX_NORM_RATIO, MAX_WEIGHT_RATIO
from p2p_diloco.storage.corpus_files import list_corpus_files
from research import baselines
from research.algorithm import Algorithm
from research.baselines import (
    BFLOAT16_BYTES,
    CentralDiloco,
    CentralRule,
    DataParallel,
    NoLoCo,
    SparseLoCo,
)
from research.learners import Judge, Learners, LoadedFiles, TextLearners, shape_named, streams_of
from research.ours import OurRule, OurSwarm
from research.pace import Pace, pace_of
from research.stack import Crew, Stack
from research.stages import JUDGED_TOKENS, Stage, check_seed, held_out_blocks

OURS = "p2p-diloco"
SLOWNESS = 4
WARMUP_SHARE = 0.08
PARTED = frozenset({OURS, "streaming-diloco", "decoupled-diloco", "decoupled-diloco-int4"})
"""Systems that exchange the model in fragments, and train while they do."""
ALONE = frozenset({"data-parallel", "data-parallel-int4", "one-island"})
"""Systems with a single learner, which has the batch of all islands."""
INT4_BYTES = 4.25 / 8
"""Bytes per parameter in int4, including scales. Downloads in int4 are counted at this size, but are not rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that determines a trial, except for its seed and text.

    Attributes:
        name: name of the row in the table.
        system: algorithm, see `SYSTEMS`.
        size: size of the model.
        islands: number of learners; data-parallel has one with the batch of all.
        ticks: inner steps of an island at full speed.
        batch: windows per step.
        learning_rate: peak inner rate; warm-up over the first twelfth.
        inner_schedule: the inner rate after warm-up: a cosine down to a tenth, or constant.
        inner: inner optimiser.
        sync_every: ticks of a cycle, H.
        fragments: number of fragments, P.
        delay: ticks from a contribution to its entry, τ.
        outer_rate, momentum: η and μ.
        outer_final_share: share of η that is left at the end of a trial; it falls over the last quarter.
        alpha: local share of θ when an entry arrives, for systems with a server.
        contribution, entry: codecs, for p2p_diloco only.
        norm_ratio: largest norm of a contribution, as a multiple of the last median, for p2p_diloco only.
        is_radial: for systems with a server: average directions and norms separately, for each tensor.
        mean: for p2p_diloco only: plain, or radial (directions and lengths separately, for each block).
        weights_by_tokens: weigh contributions by tokens, or for systems with a server by quantity times quality.
        weight_ratio: largest weight, as a multiple of the last median, for p2p_diloco only.
        has_strangers: no weight is above the median, for p2p_diloco only.
        lie: what the last island sends in place of its contributions (research/lies.py), for p2p_diloco only.
        claimed_norm: norm that the first island claims for each contribution, for p2p_diloco only; 0: the true one.
        slow: number of islands that make one step in `SLOWNESS` ticks.
        speeds: windows that each island trains on in a tick, relative to the planned ones; empty: all as planned.
        largest_batch, smallest_batch: limits of an island's batch, relative to the planned one; 1 and 1: all take the
            planned batch, and their speed is in the number of steps (research/pace.py).
        rows: rows of islands whose means are averaged once more, for p2p_diloco only.
        lost_share: share of contributions that never arrive, for p2p_diloco and for systems with a server.
        away_share: share of cycles in which an island is away, for p2p_diloco only; it returns with φ.
        gamma: pull towards the mean anchor, for NoLoCo; None: the outer rate.
        accumulate: ticks per step of data-parallel, with the batch of as many ticks.
        averaging: decay of the running mean of data-parallel's parameters, which is then the result; 0: none.
        judged_tokens: number of held-out tokens for the final loss.
        stage: stage of evidence, which owns the seeds and the held-out text (research/stages.py).
    """

    name: str
    system: str = OURS
    size: str = "tiny"
    islands: int = 4
    ticks: int = 480
    batch: int = 4
    learning_rate: float = 2e-3
    inner_schedule: Schedule = "cosine"
    inner: Literal["adamw", "muon"] = "adamw"
    sync_every: int = 32
    fragments: int = 4
    delay: int = 4
    outer_rate: float = 1.0
    momentum: float = 0.5
    outer_final_share: float = 1.0
    alpha: float = 0.0
    contribution: str = "int4"
    entry: str = "int4"
    norm_ratio: float = MAX_NORM_RATIO
    is_radial: bool = False
    mean: Literal["plain", "radial"] = "plain"
    weights_by_tokens: bool = True
    weight_ratio: float = MAX_WEIGHT_RATIO
    has_strangers: bool = False
    lie: str = ""
    claimed_norm: float = 0.0
    slow: int = 0
    speeds: tuple[float, ...] = ()
    largest_batch: float = 1.0
    smallest_batch: float = 1.0
    rows: int = 1
    lost_share: float = 0.0
    away_share: float = 0.0
    gamma: float | None = None
    accumulate: int = 1
    averaging: float = 0.0
    judged_tokens: int = JUDGED_TOKENS["explore"]
    stage: Stage = "explore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one trial.

    Attributes:
        loss: held-out loss in nats per byte; the mean if replicas differ.
        tokens: tokens trained on by all islands together.
        bytes_sent_per_parameter: bytes sent per island in the whole run.
        seconds: CPU time; of trials that made their steps together, that of all.
        device: kind of device of the inner steps.
        blocks: loss of each piece of the held-out text, whose mean is `loss`; empty if there is only one.
        sent_shares: for each learner, the length it sent as a share of what it learnt; empty if it is not counted.
    """

    name: str
    seed: int
    loss: float
    tokens: int
    bytes_sent_per_parameter: float
    seconds: float
    device: str = "cpu"
    blocks: tuple[float, ...] = ()
    sent_shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Model, inner optimiser and text of a recorded run, which replace those of a setting.

    Attributes:
        shape: shape of the model.
        rule: rule of the inner steps, used unchanged.
        corpus: the text.
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
    settles: bool = True,
) -> Outcome:
    """Train and evaluate. The outcome is the same on all machines that round alike, whatever their load.

    Args:
        text: path of a text; None: the standard library's source.
        within: replaces what the setting and `text` specify.
        device: device on which islands step, one after the other.
        settles: whether what is under way after the last step still arrives.
    Raises:
        ConfigError: the seed belongs to another stage, or the setting is inconsistent.
    """
    torch.set_num_threads(1)
    within = within or _circumstances(setting, text)
    trial = _Trial(setting, seed, within, _learners(setting, seed, within, device), device)
    for tick in range(1, setting.ticks + 1):
        trial.steps(tick)
        trial.border(tick)
    return trial.outcome(settles=settles)


def run_together(trials: Sequence[tuple[Setting, int]], text: str | None = None, *, device: str) -> list[Outcome]:
    """Train and evaluate several trials in one stack of models; see `together_with`.

    Args:
        text: as for `run_trial`.
        device: device of the inner steps.
    Raises:
        ConfigError: as `run_trial`.
    """
    torch.set_num_threads(1)
    within = _circumstances(trials[0][0], text)
    crews = [
        Crew(
            rule=_rule(setting),
            seed=seed,
            streams=streams_of(within.corpus, within.shape, seed, [_windows(setting)] * _num_learners(setting)),
        )
        for setting, seed in trials
    ]
    stack = Stack(within.shape, _fragments(trials[0][0]), crews, device)
    under_way = [
        _Trial(setting, seed, within, learners, device)
        for (setting, seed), learners in zip(trials, stack.crews, strict=True)
    ]
    for tick in range(1, trials[0][0].ticks + 1):
        for trial in under_way:
            trial.steps(tick)
        stack.step()
        for trial in under_way:
            trial.border(tick)
    return [trial.outcome() for trial in under_way]


def together_with(setting: Setting) -> Setting | None:
    """Return what trials in one stack have in common; None if a trial of this setting cannot be in one.

    Their learners have models of one shape, and batches of one size. They may differ in the inner rate, and in all that
    happens between steps.
    """
    if setting.system == "data-parallel-int4" or setting.speeds:  # gradients are rounded, or batches differ
        return None
    return Setting(
        name="",
        system=OURS,
        size=setting.size,
        ticks=setting.ticks,
        batch=_windows(setting),
        islands=1,
        inner=setting.inner,
        inner_schedule=setting.inner_schedule,
        fragments=_fragments(setting),
        accumulate=setting.accumulate,
    )


class _Trial:
    """A trial under way."""

    def __init__(self, setting: Setting, seed: int, within: Circumstances, learners: Learners, device: str) -> None:
        check_seed(setting.stage, seed)
        self._setting, self._seed, self._learners = setting, seed, learners
        self._device = torch.device(device).type
        self._began = time.process_time()
        self._algorithm = make_algorithm(setting, learners, seed)
        pieces = held_out_blocks(within.corpus, setting.stage)
        self._judge = partial(Judge, within.shape, pieces, _fragments(setting), setting.judged_tokens, device)
        self._paces = _paces(setting)

    def steps(self, tick: int) -> None:
        """Have each learner make its steps, or mark it for the step of its stack."""
        setting, learners = self._setting, self._learners
        learners.progress((tick - 1) / setting.ticks)
        for learner in range(len(learners)):
            if not self._algorithm.is_away(learner):
                for _ in range(self._due(learner, tick)):
                    learners.step(learner)

    def _due(self, learner: int, tick: int) -> int:
        """Return the number of steps that a learner makes in a tick."""
        if self._paces:
            steps = self._paces[learner].steps
            return int(steps * tick) - int(steps * (tick - 1))
        return int(tick % (SLOWNESS if learner < self._setting.slow else self._setting.accumulate) == 0)

    def border(self, tick: int) -> None:
        """Do what is due after the steps of a tick."""
        self._algorithm.border(tick)

    def outcome(self, *, settles: bool = True) -> Outcome:
        """Return the result after the last tick."""
        setting, algorithm, learners = self._setting, self._algorithm, self._learners
        if settles:
            algorithm.settle(setting.ticks)
        last = self._judge()
        blocks = tuple(map(fmean, zip(*(last.losses(model) for model in algorithm.models()), strict=True)))
        return Outcome(
            name=setting.name,
            seed=self._seed,
            loss=fmean(blocks),
            tokens=sum(learners.tokens(learner) for learner in range(len(learners))),
            bytes_sent_per_parameter=algorithm.sent_bytes / algorithm.num_parameters,
            seconds=time.process_time() - self._began,
            device=self._device,
            blocks=blocks if len(blocks) > 1 else (),
            sent_shares=algorithm.sent_shares(),
        )


def _circumstances(setting: Setting, text: str | None) -> Circumstances:
    corpus = Corpus(LoadedFiles(list_corpus_files(text)))
    return Circumstances(shape=shape_named(setting.size), rule=_rule(setting), corpus=corpus)


def _paces(setting: Setting) -> tuple[Pace, ...]:
    """Return the pace of each learner; none if all have the planned one."""
    return tuple(
        pace_of(
            speed,
            _windows(setting),
            largest=setting.largest_batch,
            smallest=setting.smallest_batch,
        )
        for speed in setting.speeds
    )


def _rule(setting: Setting) -> InnerRule:
    warmup = max(1, int(WARMUP_SHARE * setting.ticks / setting.accumulate))
    return InnerRule(
        optimizer=setting.inner,
        learning_rate=setting.learning_rate,
        schedule=setting.inner_schedule,
        warmup_steps=warmup,
    )


def _learners(setting: Setting, seed: int, within: Circumstances, device: str) -> TextLearners:
    return TextLearners(
        shape=within.shape,
        corpus=within.corpus,
        rule=within.rule,
        num_learners=_num_learners(setting),
        windows=_windows(setting),
        num_fragments=_fragments(setting),
        seed=seed,
        device=device,
        gradients=(setting.islands, baselines.as_int4) if setting.system == "data-parallel-int4" else None,
        paces=_paces(setting),
    )


def _num_learners(setting: Setting) -> int:
    return 1 if setting.system in ALONE else setting.islands


def _windows(setting: Setting) -> int:
    """Return the windows of each learner's step."""
    return setting.batch * setting.accumulate * (setting.islands if setting.system in ALONE else 1)


def _fragments(setting: Setting) -> int:
    return setting.fragments if setting.system in PARTED else 1


def make_algorithm(setting: Setting, learners: Learners, seed: int) -> Algorithm:
    """Return the algorithm of a setting.

    Raises:
        ConfigError: the algorithm is unknown, or the setting is inconsistent.
    """
    if setting.system not in SYSTEMS:
        raise ConfigError(f"unknown algorithm {setting.system!r}; expected one of {', '.join(SYSTEMS)}")
    return SYSTEMS[setting.system](setting, learners, seed)


def _ours(setting: Setting, learners: Learners, seed: int) -> Algorithm:
    codecs = Codecs(
        contribution=codec_named(setting.contribution),
        row_mean=codec_named("int8"),
        entry=codec_named(setting.entry),
        rounds_stochastically=setting.entry not in ("float32", "bfloat16"),
    )
    rule = OurRule(
        sync_every=setting.sync_every,
        delay=setting.delay,
        outer=_outer(setting),
        codecs=codecs,
        weights_by_tokens=setting.weights_by_tokens,
        weight_clip=setting.weight_ratio,
        has_strangers=setting.has_strangers,
        lie=setting.lie,
        is_radial=setting.mean == "radial",
        rows=setting.rows,
        lost_share=setting.lost_share,
        away_share=setting.away_share,
        radius_factor=setting.norm_ratio,
        claimed_norm=setting.claimed_norm,
    )
    return OurSwarm(learners, rule, seed=seed)


def _central(
    setting: Setting, learners: Learners, seed: int, quantise: Callable[[Vector], Vector], up: float, down: float
) -> Algorithm:
    rule = CentralRule(
        sync_every=setting.sync_every,
        delay=setting.delay,
        local_share=setting.alpha,
        outer=_outer(setting),
        quantise=quantise,
        bytes_up=up,
        bytes_down=down,
        weights_by_tokens=setting.weights_by_tokens,
        is_radial=setting.is_radial,
        lost_share=setting.lost_share,
    )
    return CentralDiloco(learners, rule, seed=seed)


def _outer(setting: Setting) -> OuterRule:
    return OuterRule(
        learning_rate=setting.outer_rate,
        momentum=setting.momentum,
        final_share=setting.outer_final_share,
        planned_entries=setting.ticks // setting.sync_every,
    )


def _ring(setting: Setting) -> float:
    """Return how often an island sends each parameter in each of the two halves of a ring all-reduce."""
    return 1.0 - 1.0 / setting.islands


SYSTEMS: dict[str, Callable[[Setting, Learners, int], Algorithm]] = {
    OURS: _ours,
    "data-parallel": lambda setting, learners, seed: DataParallel(
        learners, setting.islands, accumulate=setting.accumulate, averaging=setting.averaging
    ),
    "data-parallel-int4": lambda setting, learners, seed: DataParallel(
        learners, setting.islands, bytes_each=INT4_BYTES
    ),
    "one-island": lambda setting, learners, seed: _central(
        setting, learners, seed, baselines.as_float32, *[BFLOAT16_BYTES * _ring(setting) * setting.sync_every] * 2
    ),
    "textbook-diloco": lambda setting, learners, seed: _central(
        setting, learners, seed, baselines.as_float32, 4 * _ring(setting), 4 * _ring(setting)
    ),
    "textbook-diloco-int4": lambda setting, learners, seed: _central(
        setting, learners, seed, baselines.as_int4, INT4_BYTES * _ring(setting), INT4_BYTES * _ring(setting)
    ),
    "streaming-diloco": lambda setting, learners, seed: _central(
        setting, learners, seed, baselines.as_e3m0, 0.5 * _ring(setting), 0.5 * _ring(setting)
    ),
    "decoupled-diloco": lambda setting, learners, seed: _central(
        setting, learners, seed, baselines.as_float32, 4.0, 4.0
    ),
    "decoupled-diloco-int4": lambda setting, learners, seed: _central(
        setting, learners, seed, baselines.as_int4, INT4_BYTES, INT4_BYTES
    ),
    "sparseloco": lambda setting, learners, seed: SparseLoCo(
        learners, sync_every=setting.sync_every, outer_rate=setting.outer_rate, decay=setting.momentum
    ),
    "noloco": lambda setting, learners, seed: NoLoCo(
        learners,
        sync_every=setting.sync_every,
        seed=seed,
        alpha=setting.momentum,
        beta=setting.outer_rate,
        gamma=setting.gamma if setting.gamma is not None else setting.outer_rate,
    ),
}
"""Algorithms by name."""
