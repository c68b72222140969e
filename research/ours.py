"""p2p_diloco in experiments: contributions, entries and merges by the code of real peers.

There is one span per fragment, and reducers are trusted. Islands are in one row, or in several as in a large swarm:
then each row is averaged by itself, and the means of the rows once more. Rounds are counted in ticks. The experiment
determines which contributions are lost and which islands are slow or away.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.errors import ConfigError, NonFiniteUpdate, RoundError
from p2p_diloco.ids import ZERO_DIGEST, PeerId, SpanId, sha256
from p2p_diloco.outer.mean import RadialBlocks, mark_radial
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.outer.state import (
    InFlight,
    IslandSpan,
    Lengths,
    SpanState,
    Unsent,
    absorb,
    follow_entry,
    genesis_state,
    prepare_contribution,
    pull_back,
    record_contribution,
)
from p2p_diloco.protocol.actions import Part, ReduceSpan, Stage
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.round.round import ROW_MEAN_SLACK, rounding_seed
from p2p_diloco.protocol.wire.entry import Entry, Inclusion, build_entry
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import Roster
from p2p_diloco.span.fused import encode_contribution
from p2p_diloco.span.reduce import Codecs, EncodedMean, reduce_parts
from p2p_diloco.span_log import (
    MAX_NORM_RATIO,
    MAX_WEIGHT_RATIO,
    contribution_weight,
    counted_norm,
    levelled,
    weight_limit,
)
from research.algorithm import Algorithm, Model
from research.learners import Learners
from research.lies import Liar

RUN = sha256(b"a run on the bench of learning")


@dataclass(frozen=True, slots=True, kw_only=True)
class OurRule:
    """Exchange rule of the swarm.

    Attributes:
        sync_every: ticks of a cycle.
        delay: ticks from the start of a round to the border at which its entry is absorbed.
        outer, codecs: as in a manifest.
        rows: rows of islands, as even as possible.
        weights_by_tokens: weigh by tokens; False: equal weights.
        is_radial: use radial means, except for embeddings.
        lost_share: share of contributions that never reach their reducer. Their learners still count as present.
        away_share: share of cycles in which a learner is away.
        radius_factor: largest norm of a contribution, as a multiple of the radius (κ).
        weight_clip: largest weight, as a multiple of the last median.
        has_strangers: no weight is above the median.
        lie: what the last learner sends in place of its contributions (research/lies.py); empty: nobody lies.
        claimed_norm: norm that the first learner claims for each contribution; 0: the true one.
    """

    sync_every: int
    delay: int
    outer: OuterRule
    codecs: Codecs
    rows: int = 1
    weights_by_tokens: bool = True
    is_radial: bool = False
    lost_share: float = 0.0
    away_share: float = 0.0
    radius_factor: float = MAX_NORM_RATIO
    weight_clip: float = MAX_WEIGHT_RATIO
    has_strangers: bool = False
    lie: str = ""
    claimed_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sent:
    """A learner's contribution to one round."""

    payload: bytes
    norm: float
    tokens: int
    steps: int
    is_lost: bool


class OurSwarm(Algorithm):
    """All peers of one run. They hold the same bytes, so φ and m are stored once.

    Attributes:
        lengths: of all contributions of each learner.
    """

    def __init__(self, learners: Learners, rule: OurRule, *, seed: int) -> None:
        super().__init__(learners)
        num_fragments = len(learners.fragments)
        if rule.sync_every % num_fragments:
            raise ConfigError(f"a cycle of {rule.sync_every} steps does not divide into {num_fragments} rounds")
        self._rule = rule
        self._codecs = replace(rule.codecs, radial=self._radial_blocks() if rule.is_radial else {})
        self._ticks = rule.sync_every // num_fragments
        if not 1 <= rule.rows <= len(learners):
            raise ConfigError(f"{rule.rows} rows do not fit {len(learners)} islands; each needs one at least")
        if not 0 <= rule.delay < rule.sync_every:
            raise ConfigError(f"a delay of {rule.delay} steps does not fit into a cycle of {rule.sync_every}")
        self._clock = RoundClock(start_seconds=0.0, round_seconds=float(self._ticks), num_fragments=num_fragments)
        self._rng = random.Random(seed)
        self._places = tuple(range(len(learners)))
        self._roster = _roster(self._places)
        start = [genesis_state(learners.read(0, f), self._roster.digest()) for f in range(num_fragments)]
        self._states: list[SpanState] = start
        self._in_flight = [[InFlight()] * num_fragments for _ in range(len(learners))]
        self._unsent = [[Unsent()] * num_fragments for _ in range(len(learners))]
        self.lengths = [Lengths()] * len(learners)
        self._away: frozenset[int] = frozenset()
        self._honest: dict[int, list[Vector]] = {}
        self._liar = Liar(rule.lie, self._honest)
        self._told = [[(0, 0)] * num_fragments for _ in range(len(learners))]
        self._under_way: list[tuple[int, Entry]] = []
        self.entries: list[Entry] = []

    def border(self, tick: int) -> None:
        """Absorb entries that are due, then contribute if a round starts."""
        self._absorb_due(tick)
        if tick % self._ticks == 0:
            self._begin_round(tick // self._ticks, tick)
            self._absorb_due(tick)
        if tick % self._rule.sync_every == 0 and self._rule.away_share:
            self._come_and_go(self._rule.away_share)

    def is_away(self, learner: int) -> bool:
        """Return whether a learner is away for this cycle."""
        return learner in self._away

    def settle(self, tick: int) -> None:
        """Run one more cycle of rounds without steps."""
        if self._away:
            self._come_and_go(0.0)
        self._rule = replace(self._rule, away_share=0.0)
        for later in range(tick + 1, tick + self._rule.sync_every + self._rule.delay + 1):
            self.border(later)

    def models(self) -> list[Model]:
        """Return φ."""
        return [tuple(state.anchor_N for state in self._states)]

    def sent_shares(self) -> tuple[float, ...]:
        """Return, for each learner, the norms it sent as a share of those it newly learnt (`Lengths`)."""
        return tuple(one.sent / one.learnt if one.learnt else 1.0 for one in self.lengths)

    def _come_and_go(self, away_share: float) -> None:
        """Draw the learners that are away, and off the roster, in the next cycle.

        Returning learners get φ and keep their inner optimiser.
        """
        before, everybody = self._away, range(len(self.learners))
        self._away = frozenset(learner for learner in everybody if self._rng.random() < away_share)
        if len(self._away) == len(everybody):
            self._away = frozenset(everybody[1:])
        self._places = tuple(learner for learner in everybody if learner not in self._away)
        self._roster = _roster(self._places)
        for learner in before - self._away:
            for fragment, state in enumerate(self._states):
                self._in_flight[learner][fragment] = InFlight()
                self._unsent[learner][fragment] = Unsent()
                self.learners.write(learner, fragment, state.anchor_N)

    # -- a round

    def _begin_round(self, round_index: int, tick: int) -> None:
        fragment = self._clock.fragment(round_index)
        self._honest[fragment] = []
        sent = {}
        for learner in range(len(self.learners)):
            contribution = None if self.is_away(learner) else self._contribute(learner, fragment, round_index)
            if contribution is not None:
                sent[learner] = contribution
        arrived = {learner: one for learner, one in sent.items() if not one.is_lost}
        self._rng.random()  # not used any more; without it, trials with losses would draw others than those kept
        entry = self._reduce(fragment, round_index, arrived)
        if entry is None:
            return
        self.entries.append(entry)
        self._under_way.append((tick + self._rule.delay, entry))
        sent_bytes = sum(len(one.payload) for one in sent.values()) / len(self.learners)
        mean = self._codecs.row_mean.encoded_bytes(self.elements(fragment))
        self.sent_bytes += exchanged_bytes(len(self._places), self._rule.rows, sent_bytes, mean, len(entry.payload))

    def _contribute(self, learner: int, fragment: int, round_index: int) -> _Sent | None:
        rule, learners, state = self._rule, self.learners, self._states[fragment]
        tokens, steps = learners.tokens(learner), learners.steps(learner)
        told_tokens, told_steps = self._told[learner][fragment]
        if steps == told_steps:
            return None
        local_N = learners.read(learner, fragment)
        span = IslandSpan(state, self._in_flight[learner][fragment], local_N)
        codec = rule.codecs.contribution
        try:
            prepared = prepare_contribution(span, round_index=round_index, max_norm_ratio=rule.radius_factor)
        except (RoundError, NonFiniteUpdate):
            return None
        unsent = self._unsent[learner][fragment]
        if unsent.pulls_back(prepared.limit):
            span = pull_back(span, prepared)
        self._unsent[learner][fragment], lengths = unsent.after(prepared.norm, prepared.limit)
        self.lengths[learner] = self.lengths[learner].plus(lengths)
        prepared, payload = encode_contribution(codec, prepared)
        decoded_N = codec.decode(payload, len(local_N))
        norm, claims = prepared.norm, 1
        advance = record_contribution(span, round_index=round_index, sent=decoded_N)
        self._in_flight[learner][fragment] = advance.in_flight
        if advance.local_N is not local_N:
            learners.write(learner, fragment, advance.local_N)
        self._told[learner][fragment] = (tokens, steps)
        if rule.lie and learner == len(learners) - 1:
            lying_N = self._liar.instead_of(decoded_N, fragment, state.head.norm_limit(rule.radius_factor))
            payload, norm, claims = codec.encode(lying_N), 0.0, self._liar.claims
        if rule.claimed_norm and not learner:
            norm = rule.claimed_norm
        self._honest.setdefault(fragment, []).append(decoded_N)
        return _Sent(
            payload=payload,
            norm=counted_norm(norm, codec.norm(payload, len(local_N))),
            tokens=claims * (tokens - told_tokens),
            steps=steps - told_steps,
            is_lost=self._rng.random() < rule.lost_share,
        )

    def _reduce(self, fragment: int, round_index: int, arrived: dict[int, _Sent]) -> Entry | None:
        head, span, num_rows = self._states[fragment].head, SpanId(fragment, 0), self._rule.rows
        weights: dict[int, float] = {}
        means = []
        for row in range(num_rows):
            here = {learner: one for learner, one in arrived.items() if self._places.index(learner) % num_rows == row}
            parts = tuple(
                Part(peer=_peer(learner), payload=one.payload, weight=self._weigh(one, fragment), norm=one.norm)
                for learner, one in here.items()
            )
            stage = Stage.WHOLE if num_rows == 1 else Stage.ROW
            mean = self._average(parts, stage, fragment, round_index) if parts else None
            if mean is not None:
                sound = [learner for learner in here if _peer(learner) in mean.sound]
                own = [part.weight for part in parts if part.peer in mean.sound]
                weights |= dict(zip(sound, levelled(own) if self._rule.has_strangers else own, strict=True))
                weight = sum(weights[learner] for learner in sound)
                means.append(Part(peer=_peer(min(sound)), payload=mean.payload, weight=weight, norm=0.0))
        if not means:
            return None
        weights = dict(sorted(weights.items()))
        payload = means[0].payload
        if num_rows > 1:
            finished = self._average(tuple(means), Stage.FINISH, fragment, round_index)
            if finished is None:
                return None
            payload = finished.payload
        inclusion = Inclusion(
            present=tuple(range(len(self._places))),  # present even if its vectors are lost
            places=tuple(self._places.index(learner) for learner in weights),
            weights=tuple(weights.values()),
            norms=tuple(arrived[learner].norm for learner in weights),
            tokens=sum(arrived[learner].tokens for learner in weights),
        )
        owner = self._clock.cycle(round_index) % len(self._places)  # owners take turns
        entry = build_entry(
            self._roster, self._roster.digest(), round_index, span, head, inclusion, payload, owner=owner
        )
        return entry if isinstance(entry, Entry) else None

    def _average(self, parts: tuple[Part, ...], stage: Stage, fragment: int, round_index: int) -> EncodedMean | None:
        """Return the mean of parts, as a reducer or an owner computes it; None if there is none."""
        span, slack = SpanId(fragment, 0), ROW_MEAN_SLACK if stage is Stage.FINISH else 1.0
        action = ReduceSpan(
            round=round_index,
            span=span,
            stage=stage,
            parts=parts,
            norm_limit=slack * self._rule.radius_factor * self._states[fragment].head.radius,
            rounding_seed=rounding_seed(RUN, round_index, span),
            levels=self._rule.has_strangers,
        )
        reduced = reduce_parts(action, self._codecs, self.elements(fragment), action.rounding_seed)
        return None if isinstance(reduced, str) else reduced

    def _radial_blocks(self) -> dict[SpanId, RadialBlocks]:
        rows = [
            [(tensor.start, tensor.stop) for tensor in self.tensors_of(fragment) if tensor.is_embedding]
            for fragment in range(len(self.learners.fragments))
        ]
        return {SpanId(f, 0): mark_radial(0, self.elements(f), plain) for f, plain in enumerate(rows)}

    def _weigh(self, sent: _Sent, fragment: int) -> float:
        if not self._rule.weights_by_tokens:
            return 1.0
        most = weight_limit(self._states[fragment].head.median_weight, self._rule.weight_clip)
        return contribution_weight(sent.tokens, most)

    def _absorb_due(self, tick: int) -> None:
        while self._under_way and self._under_way[0][0] <= tick:
            _, entry = self._under_way.pop(0)
            self._absorb(entry)

    def _absorb(self, entry: Entry) -> None:
        fragment, rule = entry.span.fragment, self._rule
        before = self._states[fragment]
        update_N: Vector = rule.codecs.entry.decode(entry.payload, before.elements)
        after = absorb(before, entry=entry.absorbed(), update_N=update_N, rule=rule.outer)
        self._states[fragment] = after
        for learner in range(len(self.learners)):
            span = IslandSpan(before, self._in_flight[learner][fragment], self.learners.read(learner, fragment))
            advance = follow_entry(span, advanced=after, merge_rule=MergeRule())
            self._in_flight[learner][fragment] = advance.in_flight
            self.learners.write(learner, fragment, advance.local_N)


def exchanged_bytes(islands: int, rows: int, contribution: float, row_mean: float, entry: float) -> float:
    """Return the bytes that an island sends on average in one round of a fragment, without headers.

    Contributions go to the reducers of the own row, means of rows to the owners, and entries back the same way.

    Args:
        contribution, row_mean, entry: bytes of one encoded fragment.
    """
    across = islands / rows
    up = contribution * (1.0 - 1.0 / across) + row_mean * (1.0 - 1.0 / rows) / across
    return up + entry * ((1.0 - 1.0 / across) + (1.0 - 1.0 / rows) / across)


def _peer(learner: int) -> PeerId:
    return PeerId(sha256(b"learner", learner.to_bytes(4, "little")))


def _roster(learners: Sequence[int]) -> Roster:
    """Return a roster of these learners, without a vote."""
    members = tuple(Member(peer=_peer(learner), incarnation=1, counts=True) for learner in learners)
    return Roster(
        run=RUN,
        genesis=ZERO_DIGEST,
        parent=ZERO_DIGEST,
        k=1,
        cycle=0,
        degraded=False,
        members=members,
        height=0,
    )
