"""Derive from the manifest: model shape, fragments, spans, codecs, rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from p2p_diloco.codec.codec import ROW_MEAN_CODEC, codec_named
from p2p_diloco.codec.vectors import BLOCK
from p2p_diloco.config.decoder import EMBEDDINGS, ModelShape, decoder_tensors, model_shape
from p2p_diloco.config.inner_rule import InnerRule, inner_rule
from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import SpanId, parse_peer_id
from p2p_diloco.outer.fragments import Fragment, plan_fragments, plan_spans
from p2p_diloco.outer.mean import RadialBlocks, mark_radial
from p2p_diloco.outer.outer_step import MergeRule, OuterRule
from p2p_diloco.protocol.clock import RoundClock
from p2p_diloco.protocol.rules import HEARTBEAT_SECONDS, LIMITS_OF_TOKENS, RunRules
from p2p_diloco.span.reduce import Codecs


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlace:
    """Position of a span in its fragment's flat vector."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything derived from the manifest; equal on all peers.

    Attributes:
        built_in: shape of the built-in decoder; None if the run trains the organiser's own model.
    """

    manifest: RunManifest
    built_in: ModelShape | None
    fragments: tuple[Fragment, ...]
    places: dict[SpanId, SpanPlace]
    codecs: Codecs
    inner: InnerRule
    outer: OuterRule
    merge: MergeRule
    rules: RunRules

    @property
    def shape(self) -> ModelShape:
        """Shape of the built-in decoder.

        Raises:
            ConfigError: the run trains another model.
        """
        if self.built_in is None:
            raise ConfigError(self.why_no_model())
        return self.built_in

    def why_no_model(self) -> str:
        """Return a sentence for a command that cannot build the model of the run."""
        return (
            f'"{self.manifest.name}" trains its own model, which this command cannot build; found '
            "or join it with p2p_diloco.found or p2p_diloco.join from a program that builds the same model"
        )

    @property
    def context(self) -> int:
        """Number of tokens that a training window predicts."""
        return self.manifest.model.window_tokens or 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the run trains, in model order."""
        if self.built_in is None:
            return {name: tuple(shape) for name, shape, _ in self.manifest.model.tensors}
        return decoder_tensors(self.built_in)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(fragment.elements for fragment in self.fragments)

    def spans_of(self, fragment: int) -> tuple[SpanId, ...]:
        """Return a fragment's spans in order."""
        return tuple(SpanId(fragment, index) for index in range(self.rules.num_spans[fragment]))


def plan_run(manifest: RunManifest) -> RunPlan:
    """Derive the plan of a manifest.

    Raises:
        ConfigError: its values contradict each other, such as more fragments than tensors, or a step that is no whole
            number of windows.
    """
    kind = manifest.model.kind
    if kind in ("hf", "python") and not (manifest.model.tensors and manifest.model.context):
        raise ConfigError(
            f"the run names the model {manifest.model.source} but does not describe it; make the run file with "
            f"p2p-diloco new --model {manifest.model.source}"
        )
    if manifest.model.tensors:
        listed = [(name, math.prod(shape)) for name, shape, _ in manifest.model.tensors]
        plain = frozenset(name for name, _, mean in manifest.model.tensors if mean == "plain")
        return plan_tensors(manifest, None, listed, plain)
    shape = replace(model_shape(manifest.model.size), **manifest.model.changes())
    return plan_tensors(manifest, shape, [(name, math.prod(size)) for name, size in decoder_tensors(shape).items()])


def plan_tensors(
    manifest: RunManifest,
    shape: ModelShape | None,
    parameter_sizes: Sequence[tuple[str, int]],
    plain: frozenset[str] = EMBEDDINGS,
) -> RunPlan:
    """Derive the plan for a model with the given tensors; benchmarks use tensors other than the manifest's.

    Args:
        shape: shape of the built-in decoder; None for another model.
        parameter_sizes: (name, elements) of each tensor, in model order.
        plain: names of tensors that use the plain mean in a run with radial means.
    Raises:
        ConfigError: more fragments than tensors.
    """
    fragments = plan_fragments(parameter_sizes, manifest.rounds.fragments)
    codecs = Codecs(
        contribution=codec_named(manifest.codec.contribution),
        row_mean=codec_named(ROW_MEAN_CODEC),
        entry=codec_named(manifest.codec.entry),
    )
    num_spans = manifest.rounds.spans_per_fragment
    places = {
        SpanId(fragment.index, index): SpanPlace(start=start, stop=stop)
        for fragment in fragments
        for index, (start, stop) in enumerate(plan_spans(fragment.elements, num_spans, BLOCK))
    }
    outer = manifest.outer
    if outer.mean == "radial":
        codecs = replace(codecs, radial=_radial_blocks(fragments, places, plain))
    return RunPlan(
        manifest=manifest,
        built_in=shape,
        fragments=fragments,
        places=places,
        codecs=codecs,
        inner=inner_rule(manifest),
        outer=OuterRule(
            learning_rate=outer.learning_rate,
            momentum=outer.momentum,
            final_share=outer.final_share,
            planned_entries=manifest.rounds.planned_cycles,
        ),
        merge=MergeRule(kind=outer.merge, alpha=outer.fragment_update_alpha),
        rules=_rules(manifest, places, codecs),
    )


def _radial_blocks(
    fragments: Sequence[Fragment], places: Mapping[SpanId, SpanPlace], plain: frozenset[str]
) -> dict[SpanId, RadialBlocks]:
    """Return which blocks of each span use the radial mean: those that contain no row of an embedding."""
    rows = [[(t.start, t.stop) for t in fragment.tensors if t.name in plain] for fragment in fragments]
    return {span: mark_radial(place.start, place.stop, rows[span.fragment]) for span, place in places.items()}


def _rules(manifest: RunManifest, places: dict[SpanId, SpanPlace], codecs: Codecs) -> RunRules:
    elements = {span: place.stop - place.start for span, place in places.items()}
    num_fragments, trust = manifest.rounds.fragments, manifest.trust
    return RunRules(
        run=manifest.digest(),
        organiser=parse_peer_id(manifest.organiser),
        founder=parse_peer_id(manifest.founder) if manifest.founder is not None else None,
        clock=RoundClock(
            start_seconds=manifest.rounds.clock_start,
            round_seconds=manifest.rounds.round_seconds,
            num_fragments=num_fragments,
        ),
        num_spans=tuple(sum(span.fragment == f for span in places) for f in range(num_fragments)),
        span_elements=elements,
        payload_bytes={span: codecs.contribution.encoded_bytes(n) for span, n in elements.items()},
        row_mean_bytes={span: codecs.row_mean.encoded_bytes(n) for span, n in elements.items()},
        entry_bytes={span: codecs.entry.encoded_bytes(n) for span, n in elements.items()},
        group_size=manifest.membership.group_size,
        heartbeat_seconds=min(HEARTBEAT_SECONDS, manifest.rounds.round_seconds),
        retained_cycles=manifest.rounds.retained_cycles,
        listed=frozenset(map(parse_peer_id, trust.peers)) if trust.mode == "listed" else None,
        **(LIMITS_OF_TOKENS if trust.weights == "tokens" else {}),
    )
