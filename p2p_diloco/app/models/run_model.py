"""Build the model of a run on this machine, and describe a model for a manifest."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from p2p_diloco.app.models.hugging_face import LoraShape, config_text, hugging_face_model, read_config
from p2p_diloco.app.models.model import build_model, model_of
from p2p_diloco.app.models.python_model import code_digest, python_model
from p2p_diloco.app.models.text_model import TextModel, check_text_model, decoder_text_model
from p2p_diloco.app.text.tokenizer_files import NUM_BYTES, TokenizerFiles, decode_tokenizer, token_ids
from p2p_diloco.codec.vectors import Vector
from p2p_diloco.config.manifest import HUGGING_FACE, ModelSection
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import ConfigError
from p2p_diloco.ids import SpanId
from p2p_diloco.island.parameters import LocalParameters, plain_name, trained
from p2p_diloco.memory.available import free_memory, total_memory
from p2p_diloco.session.founding import check_untrained, start_from
from p2p_diloco.session.learnt_model import LearntModel
from p2p_diloco.session.own_model import check_model, describe_model

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
"""Matches the id of a model on the Hugging Face hub, `owner/name`. A single word may be a folder of the organiser's."""
SHARE_OF_MEMORY, BYTES_OF_AN_ELEMENT = 0.5, 4
"""Largest share of the memory for the base model of a LoRA, whose elements may be float32."""
LONGEST_CONTEXT = 1024
"""Context of a new run's Hugging Face model, if the model allows it and the organiser sets none."""


def build_run_model(plan: RunPlan, own: str | None, *, founds: bool) -> TextModel:
    """Build the model that the run trains, with its initial values if this peer founds the run.

    Args:
        own: the setting `model` of this machine: its copy of a base model, or the Python function that the user agrees
            to run.
        founds: whether this peer needs the values at the start of the run, and may open the organiser's paths.
    Raises:
        ConfigError: the model cannot be built here, or differs from the run's.
    """
    section = plan.manifest.model
    match section.kind:
        case "built-in":
            return decoder_text_model(build_model(plan.shape, section.seed))
        case "own":
            raise ConfigError(plan.why_no_model())
        case "hf":
            model = _hugging_face(section, own, founds=founds)
        case "python":
            model = _python(section, own, founds=founds)
    check_model(model.module, section)
    return model


def describe_source(
    section: ModelSection, tokenizer: TokenizerFiles | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values that describe a Hugging Face or Python model in a new run's manifest, by key of the section.

    Also return sentences about what the run leaves out of the model.

    Args:
        tokenizer: the files of the text's tokenizer; None if each byte is a token.
    Raises:
        ConfigError: the model cannot be built here, or cannot be trained in a run.
    """
    in_text = section.vocabulary or NUM_BYTES
    values: dict[str, Any]
    notes: tuple[str, ...] = ()
    if section.kind == "hf":
        read = read_config(section.source.removeprefix(HUGGING_FACE))
        vocabulary = in_text if section.vocabulary and section.weights == "new" else read.document.get("vocab_size", 0)
        config = {**read.document, "vocab_size": vocabulary, **token_ids(tokenizer, vocabulary)}
        context = section.context or min(read.positions or LONGEST_CONTEXT, LONGEST_CONTEXT)
        values = {"config": section.config or config_text(config), "context": context}
        try:
            model = _hugging_face(section.model_copy(update=values), None, founds=True)
        except ConfigError:
            # Some architectures count positions from their padding token, and need the one that they come with.
            pad = read.document.get("pad_token_id")
            if section.config or not isinstance(pad, int) or not 0 <= pad < vocabulary:
                raise
            values["config"] = config_text({**config, "pad_token_id": pad})
            model = _hugging_face(section.model_copy(update=values), None, founds=True)
        values["vocabulary"] = model.vocabulary
        if in_text > model.vocabulary:
            raise ConfigError(
                f"the model has {model.vocabulary:,} tokens, the text {in_text:,}; tokenise the text with the model's "
                "own tokenizer"
            )
        notes = read.notes
    else:
        if section.context is None:
            raise ConfigError(f"set the context length of {section.source}, such as --model.context 256")
        values = {"code": code_digest(section.source), "vocabulary": in_text}
        model = _python(section.model_copy(update=values), None, founds=True)
    notes += check_text_model(model, section.source)
    return values | describe_model(model.module, section.ignored), notes


def _hugging_face(section: ModelSection, own: str | None, *, founds: bool) -> TextModel:
    assert section.config is not None, "plan_run has checked it"
    assert section.context is not None, "plan_run has checked it"
    source = section.source.removeprefix(HUGGING_FACE)
    lora = None
    if section.lora_rank:
        lora = LoraShape(rank=section.lora_rank, alpha=section.lora_alpha, targets=section.lora_targets)
    weights = None
    if section.weights == "loaded" and ((founds and section.start is None) or lora is not None):
        # A path of the organiser's may also name a folder here, which was never meant for this run.
        is_on_hub = HUB_ID.fullmatch(source) is not None and not Path(source).exists()
        if own is None and not founds and not is_on_hub:
            raise ConfigError(
                "this run trains LoRA adapters of a base model that is not on the Hugging Face hub; give the folder of "
                "your copy with --model PATH"
            )
        weights = (own or source).removeprefix(HUGGING_FACE)
    limits = {"most_bytes": free_memory()} if founds else {"most_elements": _most_elements(section)}
    return hugging_face_model(section.config, context=section.context, weights=weights, lora=lora, **limits)


def _most_elements(section: ModelSection) -> int:
    """Return how many elements a model of the manifest may have.

    All are in its table, but for a LoRA's base. A tied tensor counts when it is made, at its other place, and when it
    is tied.
    """
    if section.lora_rank:
        return int(SHARE_OF_MEMORY * total_memory()) // BYTES_OF_AN_ELEMENT
    return 3 * sum(math.prod(shape) for _, shape, _ in section.tensors)


def _python(section: ModelSection, own: str | None, *, founds: bool) -> TextModel:
    assert section.context is not None, "plan_run has checked it"
    assert section.vocabulary is not None, "plan_run has checked it"
    if own != section.source and not founds:
        raise ConfigError(
            f"this run trains a model of {section.source}, which would run that function on this machine; if you trust "
            f"it and have its file, start with --model {section.source}"
        )
    found = code_digest(section.source)
    if found != section.code:
        raise ConfigError(
            f"your file of {section.source} has SHA-256 {found[:16]}…, the run's has {(section.code or '')[:16]}…; get "
            "the same file as the organiser"
        )
    return python_model(section.source, context=section.context, vocabulary=section.vocabulary)


def make_start(plan: RunPlan, own: str | None = None) -> dict[SpanId, Vector]:
    """Return the initial φ of a run, from its untrained model.

    Args:
        own: as for `build_run_model`.
    Raises:
        ConfigError: the model cannot be built, or the run starts from a file.
    """
    check_untrained(plan)
    return start_from(plan, LocalParameters(build_run_model(plan, own, founds=True).module, plan.fragments))


def build_learnt_model(learnt: LearntModel, own: str | None) -> TextModel:
    """Build the model of a run with its trained values, which are not copied.

    Args:
        own: the setting `model` of this machine, as `build_run_model` takes it.
    Raises:
        ConfigError: the model cannot be built here, or differs from the run's.
    """
    if learnt.plan.built_in is not None:
        return decoder_text_model(model_of(learnt.plan.shape, learnt.parameters))
    model = build_run_model(learnt.plan, own, founds=False)
    for name, tensor in trained(model.module).items():
        tensor.data = learnt.parameters[name]  # the parameter stays, so what is tied to it gets them too
    for name, buffer in model.module.named_buffers():
        if (saved := learnt.buffers.get(plain_name(name))) is not None:
            buffer.copy_(saved)
    model.module.eval()
    return model


def tokenizer_of(learnt: LearntModel) -> TokenizerFiles | None:
    """Return the files of the tokenizer of a run's model; None if each byte is a token."""
    return decode_tokenizer(learnt.tokenizer, "the run's tokenizer") if learnt.tokenizer is not None else None
