"""Found a run: the initial φ, identical on every machine, and roster 0, signed by the organiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState, genesis_state
from p2p_diloco.outer.vector import Vector
from p2p_diloco.peer.run_model import build_run_model
from p2p_diloco.peer.run_plan import RunPlan
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, founding_roster, founding_statement
from p2p_diloco.signing import SigningKey
from p2p_diloco.training.parameters import LocalParameters


def make_start(
    plan: RunPlan, parameters: LocalParameters | None = None, own: str | None = None
) -> dict[SpanId, Vector]:
    """Return the initial φ, span by span, from the manifest's model; read-only.

    Args:
        own: as for `build_run_model`.
        parameters: parameters of an untrained model built that way, if there is one. The result may share its memory,
            so copy it (`genesis_states` does) before the first step.
    """
    if parameters is None:
        parameters = LocalParameters(build_run_model(plan, own, founds=True).module, plan.fragments)
    return {span: parameters.view(span.fragment, place.start, place.stop) for span, place in plan.places.items()}


def read_start(plan: RunPlan, path: Path) -> dict[SpanId, Vector]:
    """Read the initial φ from a safetensors file with the run's tensors by name; other tensors are ignored.

    Raises:
        ConfigError: the file cannot be read, or a tensor is missing, has another shape or is not finite.
    """
    shapes = plan.shapes
    fragments = [np.empty(fragment.elements, np.float32) for fragment in plan.fragments]
    try:
        with path.open("rb"), safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for fragment in plan.fragments:
                for slot in fragment.tensors:
                    if slot.name not in names:
                        raise ConfigError(f"{path} has no tensor {slot.name}, which the run trains; {_EXPORT}")
                    values = _checked(file.get_tensor(slot.name), slot.name, shapes[slot.name], path)
                    fragments[fragment.index][slot.start : slot.stop] = values
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(f"{path} is not a safetensors file ({error}); {_EXPORT}") from None
    return {span: fragments[span.fragment][place.start : place.stop] for span, place in plan.places.items()}


_EXPORT = "write it with safetensors.torch.save_model, from the model that `new_run` described"


def _checked(tensor: Any, name: str, shape: tuple[int, ...], path: Path) -> Vector:
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"tensor {name} has shape {tuple(tensor.shape)} in {path} and {shape} in the run")
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"tensor {name} in {path} holds values other than finite floating-point numbers")
    values: Vector = tensor.float().flatten().numpy()
    return values


def genesis_digest(start: dict[SpanId, Vector]) -> Digest:
    """Return the digest over the content digests of all initial spans."""
    return sha256(*(genesis_state(start[span], ZERO_DIGEST).head.digest for span in sorted(start)))


def found_roster(plan: RunPlan, founder: Member, organiser: SigningKey, genesis: Digest, cycle: int) -> CertifiedRoster:
    """Return roster 0, which lists only the founder, signed with the organiser's key."""
    roster = founding_roster(plan.rules.run, genesis, founder, cycle)
    signature = organiser.sign(founding_statement(roster.digest()))
    return CertifiedRoster(roster=roster, ballot=0, votes=((PeerId(organiser.peer), signature),))


def genesis_states(start: dict[SpanId, Vector], roster: Roster) -> dict[SpanId, SpanState]:
    """Return the initial states of all spans."""
    return {span: genesis_state(anchor_N, roster.digest()) for span, anchor_N in start.items()}
