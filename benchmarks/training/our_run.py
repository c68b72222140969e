"""The run in which islands train: a real model on real text, a cycle of four times its own transmission."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from p2p_diloco.config.manifest import RunManifest
from p2p_diloco.config.run_file import draft_manifest
from p2p_diloco.ids import SpanId
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.signing import SigningKey

MODEL = "small"
BATCH, CONTEXT = 1, 64
"""So few tokens that a step takes a fraction of the shortest round, on a core that it shares."""
CYCLE_TRANSMISSIONS = 4.0
TRIAL_CYCLE_SECONDS = 60.0
"""Of the run in which the exchange is timed by itself, where no rate says how long it takes; nobody waits for its
rounds to end."""
_NEVER = 2**20
_MAX_HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """A run of the bench, but for its clock.

    Attributes:
        model: built-in size.
        fragments: parts of the model, exchanged in turn.
        spans_per_fragment: pieces of each.
    """

    codec: str
    fragments: int
    spans_per_fragment: int
    model: str = MODEL


def draft_run(shape: RunShape, *, cycle_seconds: float, organiser: SigningKey, now_seconds: float) -> RunManifest:
    """Return the manifest.

    Raises:
        ConfigError: no such codec, or parts that the model has not.
    """
    round_seconds = cycle_seconds / shape.fragments
    # A fragment that moves in every round cannot be compared: peers would hash it again and again.
    scrub = {"scrub_cycles": _NEVER} if shape.fragments == 1 else {}
    return draft_manifest(
        organiser=organiser.peer,
        now_seconds=now_seconds,
        name="bench",
        values={
            "model": {"size": shape.model, "context": CONTEXT},
            # As torchft has it, and so few tokens that making matrices orthogonal would be most of a step.
            "inner": {"batch": BATCH, "optimizer": "adamw", "learning_rate": 1e-3},
            "codec": {"contribution": shape.codec, "entry": "int4" if shape.codec == "topk2" else shape.codec},
            "rounds": {
                "round_seconds": round_seconds,
                "fragments": shape.fragments,
                "spans_per_fragment": shape.spans_per_fragment,
            },
            "membership": {"heartbeat_seconds": min(cycle_seconds, _MAX_HEARTBEAT_SECONDS), "stalled_cycles": _NEVER},
            "limits": scrub,
        },
    )


def run_order(shape: RunShape, *, cycle_seconds: float) -> dict[str, Any]:
    """Return what each peer is told of a new run: the signed manifest and the organiser's key, in hexadecimal."""
    organiser = SigningKey(secrets.token_bytes(32))
    manifest = draft_run(shape, cycle_seconds=cycle_seconds, organiser=organiser, now_seconds=time.time())
    return {"manifest": manifest.sign(organiser).encode().hex(), "organiser": organiser.private_bytes().hex()}


def sent_bytes(plan: RunPlan, num_islands: int) -> float:
    """Return what a peer sends in a cycle on average, without headers: contributions to others, and own entries.

    Of a span each of the other members sends a contribution to its owner, who sends the entry to each of them.
    """

    def both_ways(span: SpanId) -> int:
        return plan.rules.payload_bytes[span] + plan.rules.entry_bytes[span]

    return sum(map(both_ways, plan.places)) * (num_islands - 1) / num_islands
