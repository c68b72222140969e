"""The files of an exported model, and the facts for its card."""

from __future__ import annotations

from p2p_diloco.config.manifest import HUGGING_FACE, STANDARD_LIBRARY, DataSection
from p2p_diloco.peer.learnt_model import LearntModel
from p2p_diloco.status.status_file import PeerStatus
from p2p_diloco.training.hugging_face import LoraShape
from p2p_diloco.training.hugging_face_files import adapter_files, model_files
from p2p_diloco.training.llama import llama_files
from p2p_diloco.training.own_files import own_files
from p2p_diloco.training.provenance import Provenance
from p2p_diloco.training.tokenizer_files import tokenizer_files


def files_of(learnt: LearntModel, provenance: Provenance) -> dict[str, bytes]:
    """Return the files of an exported model, by name."""
    model, parameters = learnt.manifest.model, learnt.parameters
    if learnt.plan.built_in is not None:
        return llama_files(learnt.plan.built_in, parameters, provenance, learnt.tokenizer)
    if model.kind != "hf":
        return own_files(parameters, provenance, is_whole=False)
    assert model.config is not None, "plan_run has checked it"
    tokenizer = tokenizer_files(learnt.tokenizer, learnt.plan.context)
    if model.lora_rank:
        lora = LoraShape(rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets)
        return adapter_files(lora, model.source.removeprefix(HUGGING_FACE), parameters, provenance, tokenizer)
    return model_files(model.config, parameters, provenance, tokenizer)


def provenance_of(learnt: LearntModel, status: PeerStatus | None) -> Provenance:
    """Return the facts for the model card; tokens and loss only from a status of the same run."""
    run = learnt.manifest.digest().hex()
    own = status if status is not None and status.run == run else None
    is_own = learnt.manifest.model.is_own_loop
    return Provenance(
        run_name=learnt.manifest.name,
        run=run,
        text=None if is_own else _describe(learnt.manifest.data),
        rounds=learnt.rounds,
        cycles=learnt.cycles,
        tokens=own.tokens if own is not None and own.tokens else None,
        training_loss=own.loss if own is not None and is_own else None,
        held_out_loss=own.anchor_loss if own is not None else None,
    )


def _describe(data: DataSection) -> str:
    """Describe the text without its path, which is private to the organiser."""
    if data.path == STANDARD_LIBRARY:
        return "the source text of Python's standard library"
    if data.fingerprint is not None:
        return f"a text with the fingerprint {data.fingerprint}"
    return "a text provided by the run's organiser"
