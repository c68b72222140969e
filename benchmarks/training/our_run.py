"""Run of the training benchmark: a real model on real text, with a cycle four times as long as its transmission."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.config.run_plan import RunPlan, plan_run
from p2p_diloco.ids import SpanId

MODEL = "small"
BATCH, CONTEXT = 1, 64
"""Tokens per step: few, so that a step on a shared core takes only a fraction of the shortest round."""
CYCLE_TRANSMISSIONS = 4.0
TRIAL_CYCLE_SECONDS = 60.0
"""Cycle length of the run that times the exchange alone, if no rate determines its duration. Rounds are not waited
for."""
_NEVER = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """A run of the benchmark, without its clock.

    Attributes:
        model: name of a built-in size.
        fragments: parts of the model, exchanged in turn.
        spans_per_fragment: pieces of each part.
    """

    codec: str
    fragments: int
    spans_per_fragment: int
    model: str = MODEL


def run_values(shape: RunShape, cycle_seconds: float) -> dict[str, Any]:
    """Return the manifest values of the run."""
    return {
        "model": {"size": shape.model, "context": CONTEXT},
        # AdamW as in torchft; with so few tokens, Muon's orthogonalisation would be most of a step.
        "inner": {"step_tokens": BATCH * CONTEXT, "optimizer": "adamw", "learning_rate": 1e-3},
        "codec": {"contribution": shape.codec, "entry": shape.codec},
        "rounds": {
            "round_seconds": cycle_seconds / shape.fragments,
            "fragments": shape.fragments,
            "spans_per_fragment": shape.spans_per_fragment,
        },
    }


def plan_of(manifest: RunManifest) -> RunPlan:
    """Return the plan of a run: without entries between turns it is not stalled.

    A fragment that changes in every round cannot be compared: peers would hash it repeatedly.
    """
    plan = plan_run(manifest)
    scrub_cycles = _NEVER if manifest.rounds.fragments == 1 else plan.rules.scrub_cycles
    return replace(plan, rules=replace(plan.rules, least_stalled_cycles=_NEVER, scrub_cycles=scrub_cycles))


def plan_shape(shape: RunShape, cycle_seconds: float) -> RunPlan:
    """Return the plan of a run.

    Raises:
        ConfigError: the codec is unknown, or there are too many fragments.
    """
    return plan_of(draft_manifest(now_seconds=0.0, values=run_values(shape, cycle_seconds)))


def sent_bytes(plan: RunPlan, num_islands: int) -> float:
    """Return the average number of bytes that a peer sends in a cycle, without headers: contributions and entries.

    For each span, every other member sends a contribution to the owner, and the owner sends the entry to each of them.
    """

    def both_ways(span: SpanId) -> int:
        return plan.rules.payload_bytes[span] + plan.rules.entry_bytes[span]

    return sum(map(both_ways, plan.places)) * (num_islands - 1) / num_islands
