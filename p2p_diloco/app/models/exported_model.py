"""The files of an exported model, and the facts for its card.

A Hugging Face model is written in the layout that `from_pretrained` loads, or its LoRA adapters in peft's.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.app.models.hugging_face import LoraShape, load_folder
from p2p_diloco.app.models.run_model import build_learnt_model, build_run_model, tokenizer_of
from p2p_diloco.app.models.text_model import logits_of
from p2p_diloco.app.text.tokenizer_files import (
    GENERATION_CONFIG,
    NUM_BYTES,
    TokenizerFiles,
    exported_files,
    token_ids,
)
from p2p_diloco.config.decoder import ModelShape, llama_config, llama_names
from p2p_diloco.config.manifest import HUGGING_FACE, STANDARD_LIBRARY, DataSection
from p2p_diloco.config.run_file import exported_run
from p2p_diloco.config.run_plan import RunPlan
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.session.export_files import Provenance, model_card, own_files, tensor_bytes
from p2p_diloco.session.founding import ADAPTER
from p2p_diloco.session.learnt_model import RUN_FILE, LearntModel
from p2p_diloco.status.status_file import PeerStatus
from p2p_diloco.wording import first_line, install_line

_CHECKED_TOKENS, _MOST_DIFFERENCE = 16, 1e-4


def files_of(learnt: LearntModel, provenance: Provenance) -> dict[str, bytes]:
    """Return the files of an exported model, by name, with the run file that a new run can continue."""
    return {**_model_files(learnt, provenance), RUN_FILE: exported_run(learnt.manifest)}


def _model_files(learnt: LearntModel, provenance: Provenance) -> dict[str, bytes]:
    model, parameters, tokenizer = learnt.manifest.model, learnt.parameters, tokenizer_of(learnt)
    if learnt.plan.built_in is not None:
        return llama_files(learnt.plan.built_in, parameters, provenance, tokenizer)
    if model.kind != "hf":
        return own_files({**parameters, **learnt.buffers}, provenance, is_whole=False)
    assert model.config is not None, "plan_run has checked it"
    if model.lora_rank:
        lora = LoraShape(rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets)
        files = exported_files(tokenizer, _positions_of(json.loads(model.config)))
        return adapter_files(lora, model.source.removeprefix(HUGGING_FACE), parameters, provenance, files)
    return model_files(model.config, parameters, provenance, tokenizer)


def why_not_reloaded(plan: RunPlan, own: str | None) -> str | None:
    """Return why `check_export` cannot check an export; None if it can.

    Args:
        own: the setting `model` of this machine.
    """
    model = plan.manifest.model
    if plan.built_in is None and model.kind != "hf":
        return "only the program of the model can load this export, so it was not reloaded"
    if model.lora_rank and own is None:
        return "the adapters were not reloaded on their base model; name its folder or hub id with --model to do so"
    if importlib.util.find_spec("transformers") is None:
        return f"the export was not reloaded, because transformers is not installed: {install_line('hf')}"
    return None


def check_export(learnt: LearntModel, own: str | None, folder: Path) -> None:
    """Reload an export with transformers, if possible, and refuse it unless its logits are those of the run's model.

    The run's model uses the caller's parameters, so only the reloaded one takes more memory.

    Args:
        own: the setting `model` of this machine, for the base of a LoRA.
        folder: the export.
    Raises:
        StateError: it cannot be loaded, or differs.
        ConfigError: the run's model cannot be built here.
    """
    if why_not_reloaded(learnt.plan, own) is not None:
        return
    model = build_learnt_model(learnt, own)
    length, generator = min(model.context, _CHECKED_TOKENS), torch.Generator().manual_seed(0)
    tokens_1T = torch.randint(model.vocabulary, (1, length), generator=generator)
    expected = _logits(model.module, tokens_1T)
    del model  # only one is held at a time
    try:
        base = build_run_model(learnt.plan, own, founds=False) if learnt.manifest.model.lora_rank else None
        found = _logits(load_folder(folder, base), tokens_1T)
    except Exception as error:  # the classes of transformers raise any
        reason = first_line(error)
        raise StateError(f"transformers cannot load the export ({reason}), so it was not written") from error
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= _MOST_DIFFERENCE * max(1.0, largest):
        raise StateError(
            f"the export was not written: loaded with transformers, its logits differ from the model's by "
            f"{difference:.2g}, the largest of which is {largest:.2g}; if these are finite, please report it"
        )


def _logits(module: nn.Module, tokens_1T: Tensor) -> Tensor:
    with torch.no_grad():
        logits = logits_of(module.eval(), tokens_1T)
    if logits is None:
        raise StateError("its forward pass gives no logits")
    return logits.float()


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


def model_files(
    config: str, tensors: Mapping[str, Tensor], provenance: Provenance, tokenizer: TokenizerFiles | None
) -> dict[str, bytes]:
    """Return the files of a folder that `AutoModelForCausalLM` and `AutoTokenizer` can load, by name.

    Args:
        config: the configuration as JSON.
        tensors: parameters by the model's own names.
        tokenizer: the files of its tokenizer; None if each byte is a token.
    """
    document = json.loads(config)
    return {
        "model.safetensors": tensor_bytes(tensors, {"run": provenance.run}),
        **_config_files({**document, "dtype": "float32"}, tokenizer),
        **exported_files(tokenizer, _positions_of(document)),
        "README.md": _card(tensors, provenance, "A causal language model", f"{_LOAD}\n{_GENERATE}"),
    }


def _positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the longest input that a configuration allows; the context of the training may be shorter."""
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if isinstance(found, int) else None


def adapter_files(
    lora: LoraShape, base: str, tensors: Mapping[str, Tensor], provenance: Provenance, tokenizer: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return the files of a folder that `PeftModel.from_pretrained` can load, by name.

    Args:
        base: folder or hub id of the base model, which is not part of the files.
    """
    targets = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name})
    named = {name.replace(ADAPTER, "."): tensor for name, tensor in tensors.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }
    return {
        "adapter_model.safetensors": tensor_bytes(named, {"run": provenance.run}),
        "adapter_config.json": _json(config),
        **tokenizer,
        "README.md": _card(tensors, provenance, "LoRA adapters of a causal language model", _LOAD_ADAPTERS),
    }


_LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")"""
_GENERATE = """prompt = tokenizer("Once", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(prompt, do_sample=True, max_new_tokens=50)[0]))"""
_LOAD_ADAPTERS = """from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained(".")  # loads the base model that adapter_config.json names"""


def _card(tensors: Mapping[str, Tensor], provenance: Provenance, what: str, usage: str) -> bytes:
    size = ("parameters", f"{sum(tensor.numel() for tensor in tensors.values()):,}, float32")
    intro, allowed_by = f"{what}, trained by the peers of a p2p_diloco run.", "base model and training text allow"
    return model_card(provenance, [size], intro=intro, usage=usage, allowed_by=allowed_by, is_text_model=True)


def llama_files(
    shape: ModelShape, parameters: Mapping[str, Tensor], provenance: Provenance, tokenizer: TokenizerFiles | None = None
) -> dict[str, bytes]:
    """Return the built-in model in the layout of Hugging Face's Llama, as the files of a folder, by name.

    The architecture is the same: RMSNorm before attention and SwiGLU, rotary positions on halves of a head, no biases,
    an untied head. Only the two stacked matrices are split (query, key, value; gate, up). All values stay float32,
    unrounded.

    Args:
        parameters: float32 parameters by their names in the built-in model.
        tokenizer: the files of its tokenizer; None for a model of bytes.
    Raises:
        ConfigError: the model has tokens other than bytes, and there is no tokenizer.
    """
    is_of_bytes = shape.vocabulary == NUM_BYTES
    if tokenizer is None and not is_of_bytes:
        raise ConfigError(f"the model has {shape.vocabulary} tokens; expected {NUM_BYTES}, one for each byte")
    tensors: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        names = llama_names(name)
        pieces = tensor.detach().chunk(len(names))
        tensors |= {own: piece.contiguous() for own, piece in zip(names, pieces, strict=True)}
    unit, kind, each = (
        ("bytes", "byte-level language", "; each token is one\nbyte of UTF-8.")
        if is_of_bytes
        else ("tokens", "language", ".")
    )
    card = model_card(
        provenance,
        [("parameters", f"{shape.num_parameters:,}, float32"), ("context", f"{shape.context} {unit}")],
        intro=f"A {kind} model, trained by the peers of a p2p_diloco run. It has the Llama architecture{each}",
        usage=f"""{_LOAD}
prompt = tokenizer("def ", return_tensors="pt").input_ids
text = model.generate(prompt, do_sample=True, max_new_tokens={max(1, shape.context - 4)})
print(tokenizer.decode(text[0]))""",
        allowed_by="training text allows",
        is_text_model=True,
    )
    return {
        "model.safetensors": tensor_bytes(tensors, {"run": provenance.run}),
        **_config_files(llama_config(shape), tokenizer),
        **exported_files(tokenizer, shape.context),
        "README.md": card,
    }


def _config_files(config: Mapping[str, Any], tokenizer: TokenizerFiles | None) -> dict[str, bytes]:
    """Return `config.json` and `generation_config.json` with the tokens of the run's tokenizer.

    Args:
        config: the configuration of the model; it may lack a `vocab_size` that is its architecture's own. Its begin and
            end tokens are replaced; a padding token is kept, because some architectures count positions from it.
    """
    ids = token_ids(tokenizer, config.get("vocab_size", sys.maxsize))
    structural = {key: config[key] for key in ("pad_token_id",) if config.get(key) is not None}
    return {
        "config.json": _json({**config, **ids, **structural}),
        GENERATION_CONFIG: _json({key: one for key, one in ids.items() if one is not None}),
    }


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
