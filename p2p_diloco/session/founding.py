"""Found a run: the initial φ, identical on every machine, and roster 0, signed by the organiser."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.decoder import llama_config, llama_names
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, sha256
from p2p_diloco.island.parameters import LocalParameters
from p2p_diloco.outer.state import SpanState, genesis_state
from p2p_diloco.protocol.wire.member import Member
from p2p_diloco.protocol.wire.roster import CertifiedRoster, Roster, founding_roster, founding_statement
from p2p_diloco.signing import SigningKey


def start_from(plan: RunPlan, parameters: LocalParameters) -> dict[SpanId, Vector]:
    """Return the initial φ, span by span, from the parameters of an untrained model; read-only.

    The result may share their memory, so copy it (`genesis_states` does) before the first step.

    Raises:
        ConfigError: the run starts from a file.
    """
    check_untrained(plan)
    return {span: parameters.view(span.fragment, place.start, place.stop) for span, place in plan.places.items()}


def check_untrained(plan: RunPlan) -> None:
    """Refuse to begin with an untrained model in a run that starts from a file.

    Raises:
        ConfigError: the run starts from a file.
    """
    if plan.manifest.model.start is not None:
        raise ConfigError(
            f'"{plan.manifest.name}" starts from a file, and neither that nor a sound checkpoint is here, {_RESTORE}'
        )


def read_start(plan: RunPlan, path: Path) -> dict[SpanId, Vector]:
    """Read the initial φ from an export or a safetensors file.

    Raises:
        ConfigError: as `read_tensors`, or the file is not the one that the manifest names.
    """
    if (wanted := plan.manifest.model.start) is not None:
        try:
            with _tensors_file(path).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; the run starts from it, {_RESTORE}") from None
        if found != wanted:
            raise ConfigError(f"{path} has SHA-256 {found[:16]}…, but the run starts from {wanted[:16]}…, {_RESTORE}")
    places = {slot.name: (fragment.index, slot) for fragment in plan.fragments for slot in fragment.tensors}
    fragments = [np.empty(fragment.elements, np.float32) for fragment in plan.fragments]
    for name, tensor in read_tensors(plan, path):
        fragment, slot = places[name]
        fragments[fragment][slot.start : slot.stop] = tensor.flatten().numpy()
    return {span: fragments[span.fragment][place.start : place.stop] for span, place in plan.places.items()}


def read_buffers(plan: RunPlan, path: Path) -> dict[str, Tensor]:
    """Return what a file that `read_tensors` has read holds besides the run's tensors: buffers, and frozen tensors."""
    with safe_open(_tensors_file(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in sorted(set(file.keys()) - plan.shapes.keys())}


def read_tensors(plan: RunPlan, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the run's tensors by name, float32, from a safetensors file or the folder of an export.

    They may have the names of the run, of Llama for the built-in model, or of peft for adapters; other tensors are
    ignored. Tensors of equal shapes can mean different functions, so an export's configuration is compared too.

    Raises:
        ConfigError: the file cannot be read, a tensor is missing, has another shape or is not finite, or the
            configuration is another one.
    """
    file_path = _tensors_file(path)
    try:
        with file_path.open("rb"), safe_open(file_path, framework="pt") as file:
            names = set(file.keys())
            for name, shape in plan.shapes.items():
                parts = (name,) if name in names else _stored_names(plan, name)
                if len(parts) > 1:
                    shape = (shape[0] // len(parts), *shape[1:])
                missing = next((part for part in parts if part not in names), None)
                if missing is not None:
                    raise ConfigError(f"{file_path} has no tensor {missing}, which the run trains; {_EXPORT}")
                tensors = [_checked(file.get_tensor(part), part, shape, file_path) for part in parts]
                yield name, tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    except OSError as error:
        raise ConfigError(f"cannot read {file_path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(f"{file_path} is not a safetensors file ({error}); {_EXPORT}") from None
    if path.is_dir():
        _check_configuration(plan, path)


ADAPTER = ".default."
"""peft's name of the adapter in the names of its parameters, which its files leave out."""
EXPORTED_TENSORS = ("model.safetensors", "adapter_model.safetensors")
_EXPORT = "name an export of a run of the same model, or a file that safetensors.torch.save_model wrote of it"
_RESTORE = "so restore it next to the run file, or name it with bootstrap --start"
_NOT_OF_THE_FUNCTION = frozenset(
    """architectures dtype torch_dtype transformers_version _name_or_path use_cache max_position_embeddings bos_token_id
    eos_token_id pad_token_id""".split()
)
"""Keys of a configuration in which models of the same function may differ."""


def _tensors_file(path: Path) -> Path:
    """Return the file of tensors in the folder of an export, or `path` if it is no folder."""
    if not path.is_dir():
        return path
    for name in EXPORTED_TENSORS:
        if (path / name).is_file():
            return path / name
    raise ConfigError(f"{path} has no {' or '.join(EXPORTED_TENSORS)}; {_EXPORT}")


def _stored_names(plan: RunPlan, name: str) -> tuple[str, ...]:
    return llama_names(name) if plan.built_in is not None else (name.replace(ADAPTER, "."),)


def _check_configuration(plan: RunPlan, folder: Path) -> None:
    model, file = plan.manifest.model, "config.json"
    wanted: dict[str, Any] = {}
    if plan.built_in is not None:
        wanted = llama_config(plan.built_in)
    elif model.lora_rank:
        file, wanted = "adapter_config.json", {"r": model.lora_rank, "lora_alpha": model.lora_alpha}
    elif model.config is not None:
        wanted = json.loads(model.config)
    try:
        found = dict(json.loads((folder / file).read_bytes()))
    except FileNotFoundError:
        return  # weights without a configuration
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot read {folder / file} ({error}); {_EXPORT}") from None
    for key in wanted:
        if key not in _NOT_OF_THE_FUNCTION and key in found and found[key] != wanted[key]:
            raise ConfigError(f"{key} is {found[key]} in {folder / file} and {wanted[key]} in the run; {_EXPORT}")


def _checked(tensor: Tensor, name: str, shape: tuple[int, ...], path: Path) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"tensor {name} has shape {tuple(tensor.shape)} in {path} and {shape} in the run; {_EXPORT}")
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"tensor {name} in {path} holds values other than finite floating-point numbers; {_EXPORT}")
    return tensor.float()


def genesis_digest(start: dict[SpanId, Vector]) -> Digest:
    """Return the digest over the content digests of all initial spans."""
    return sha256(*(genesis_state(start[span], ZERO_DIGEST).head.digest for span in sorted(start)))


def found_roster(plan: RunPlan, founder: Member, organiser: SigningKey, genesis: Digest, cycle: int) -> CertifiedRoster:
    """Return roster 0, which lists only the founder, signed with the organiser's key."""
    roster = founding_roster(plan.rules.run, genesis, founder, cycle)
    signature = organiser.sign(founding_statement(roster.digest()))
    return CertifiedRoster(roster=roster, ballot=0, votes=((PeerId(organiser.peer), signature),))


def genesis_states(start: dict[SpanId, Vector], roster: Roster) -> dict[SpanId, SpanState]:
    return {span: genesis_state(anchor_N, roster.digest()) for span, anchor_N in start.items()}
