"""Founding a run: the start φ, the same on whatever machine founds it, and roster 0, signed by the organiser."""

from __future__ import annotations

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, sha256
from p2p_diloco.island.model import build_model
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.outer.state import SpanState, genesis_state
from p2p_diloco.outer.vector import Vector
from p2p_diloco.protocol.member import Member
from p2p_diloco.protocol.roster import CertifiedRoster, Roster, founding_roster, founding_statement
from p2p_diloco.signing import SigningKey
from p2p_diloco.trainer.run_plan import RunPlan


def make_start(plan: RunPlan, parameters: LocalParameters | None = None) -> dict[SpanId, Vector]:
    """Return φ at the start, span by span, from the manifest's model and seed; not to be written to.

    Args:
        parameters: of a model that was built so and has not been trained, for whoever has one: what is returned may be
            its very memory, so make states of it (`genesis_states` copies) before a step is made.
    """
    if parameters is None:
        parameters = LocalParameters(build_model(plan.shape, plan.manifest.model.seed), plan.fragments)
    return {span: parameters.view(span.fragment, place.start, place.stop) for span, place in plan.places.items()}


def genesis_digest(start: dict[SpanId, Vector]) -> Digest:
    """Return the digest over the content digests of all spans at the start."""
    return sha256(*(genesis_state(start[span], ZERO_DIGEST).head.digest for span in sorted(start)))


def found_roster(plan: RunPlan, founder: Member, organiser: SigningKey, genesis: Digest, cycle: int) -> CertifiedRoster:
    """Return roster 0, the founder alone, signed with the organiser's key."""
    roster = founding_roster(plan.rules.run, genesis, founder, cycle)
    signature = organiser.sign(founding_statement(roster.digest()))
    return CertifiedRoster(roster=roster, ballot=0, votes=((PeerId(organiser.peer), signature),))


def genesis_states(start: dict[SpanId, Vector], roster: Roster) -> dict[SpanId, SpanState]:
    """Return all spans as they stand at the founding."""
    return {span: genesis_state(anchor_N, roster.digest()) for span, anchor_N in start.items()}
