"""Models of Hugging Face transformers, built from the configuration in the manifest; no code comes with them.

Requires the extra `hf`. transformers is imported only when a run needs it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.app.extra import import_extra
from p2p_diloco.app.models.model import token_loss
from p2p_diloco.app.models.text_model import TextModel
from p2p_diloco.errors import ConfigError

_OF_ONE_FILE = ("auto_map", "_name_or_path", "transformers_version")
"""Keys that are left out of the manifest: they name code or a folder, or differ between versions."""
_REFUSED = frozenset(
    """auto_map attn_implementation _attn_implementation _attn_implementation_internal experts_implementation
    use_kernels kernel_config quantization_config name_or_path _name_or_path""".split()
)
"""Keys of a configuration that make transformers load code, kernels or files; a joiner refuses them."""
_OF_TEXT_PART = {
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?!lm_head)": "model.",
    r"^(?:model\.)?language_model\.lm_head": "lm_head",
}
"""Names of the text part in the weights of a model that also sees or hears, and its names as a model of its own."""
_MOST_LAYERS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """LoRA adapters: low-rank matrices that are added to frozen ones.

    Attributes:
        rank: inner width of an adapter.
        alpha: adapters are scaled by alpha / rank.
        targets: names of modules with an adapter; none: those that peft chooses for the architecture.
    Source: Hu et al., arXiv 2106.09685.
    """

    rank: int
    alpha: float
    targets: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """The configuration of a causal language model, as a manifest can hold it.

    Attributes:
        document: its values; without those that name code or files.
        positions: longest input in tokens; None: not limited, or not known.
        notes: sentences about what is left out of the model.
    """

    document: dict[str, Any]
    positions: int | None
    notes: tuple[str, ...]


def read_config(place: str) -> ReadConfig:
    """Read the configuration of a model. Of one that also sees or hears, only the text part is taken.

    Args:
        place: a folder, or the id of a model on the hub.
    Raises:
        ConfigError: transformers is not installed, there is no such model, or it cannot be trained as a causal language
            model: it needs code of its own, is quantised, or is an encoder-decoder.
    """
    transformers = _transformers()
    try:
        raw, _ = transformers.PretrainedConfig.get_config_dict(place)
        if "auto_map" in raw:
            raise ConfigError(
                f"the model at {place} needs its own code (auto_map in config.json); expected an architecture of "
                "transformers, since no code is loaded with a model"
            )
        if raw.get("quantization_config"):
            raise ConfigError(
                f"the model at {place} is quantised (quantization_config in config.json), and a run trains float32; "
                "name the model that it was made from"
            )
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        text = config.get_text_config()
        document: dict[str, Any] = json.loads(text.to_json_string(use_diff=True))
    except ConfigError:
        raise
    except Exception as error:  # the classes of transformers raise any
        raise ConfigError(
            f"cannot read the model {place} ({_first_line(error)}); expected a folder with config.json or the id of a "
            "model on the Hugging Face hub"
        ) from None
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{config.model_type} is an encoder-decoder and cannot be trained as a causal language model; name a "
            "decoder-only model, such as one of the families gpt2, llama or qwen3"
        )
    positions = getattr(text, "max_position_embeddings", None)
    return ReadConfig(
        document=_without_places(document),
        positions=positions if isinstance(positions, int) and positions > 0 else None,
        notes=()
        if text is config
        else (f"the run trains only the text part of {config.model_type}, {text.model_type}",),
    )


def config_text(config: dict[str, Any]) -> str:
    """Return a configuration on one line, as manifests have it."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def hugging_face_model(
    config: str,
    *,
    context: int,
    weights: str | None = None,
    lora: LoraShape | None = None,
    most_elements: int | None = None,
    most_bytes: int | None = None,
) -> TextModel:
    """Build a causal language model from the configuration in a manifest.

    Args:
        config: the configuration as JSON.
        context: number of tokens that a window predicts.
        weights: folder or hub id to load the weights from; None: random weights.
        lora: adapters to train instead of all weights.
        most_elements: maximum elements of all parameters that are assigned while it is built; None: no limit.
        most_bytes: maximum size of all parameters; None: no limit.
    Raises:
        ConfigError: the configuration loads code or describes a larger model, transformers or peft is missing, or the
            model cannot be built or loaded.
    """
    transformers = _transformers()
    document = json.loads(config, object_hook=_special_float)
    _check_config(document)
    kind = document.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError("the run's model.config has no model_type, so its architecture is unknown")
    dtype = getattr(torch, str(document.get("dtype")), torch.float32) if lora is not None else torch.float32
    build = transformers.AutoModelForCausalLM.from_config
    try:
        parsed = transformers.AutoConfig.for_model(kind, **document)
        if kind == "rwkv":
            parsed.rescale_every = 0  # would change the weights in place for float16, when evaluated
        with torch.device("meta"), _limited(most_elements):  # first without memory: one tensor may be too large
            _check_size(build(parsed, dtype=dtype, trust_remote_code=False), most_bytes)
        with _limited(most_elements):
            if weights is None:
                module = build(parsed, dtype=dtype, trust_remote_code=False)
            else:
                module, report = transformers.AutoModelForCausalLM.from_pretrained(
                    weights,
                    config=parsed,
                    dtype=dtype,
                    use_safetensors=True,
                    trust_remote_code=False,
                    key_mapping=_OF_TEXT_PART,
                    output_loading_info=True,
                )
                _check_loaded(weights, report)
    except ConfigError:
        raise
    except Exception as error:  # the classes of transformers raise any
        if str(error).startswith("Unrecognized configuration class"):
            raise ConfigError(
                f"{kind} is no causal language model of transformers {transformers.__version__}; name a decoder-only "
                "model, such as one of the families gpt2, llama or qwen3"
            ) from None
        where = f"from {weights}" if weights is not None else f"with transformers {transformers.__version__}"
        raise ConfigError(f"cannot build the run's {kind} model {where}: {_first_line(error)}") from None
    longest = getattr(parsed, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < context:
        raise ConfigError(f"model.context is {context}; this {kind} model has {longest} positions")
    for each in module.modules():
        if isinstance(each, nn.Embedding):
            each.padding_idx = None  # that row would get no gradient, and the token may occur in the text
    if lora is not None:
        module = _with_adapters(module, lora)
    module.train()
    return TextModel(module=module, loss=_loss, context=context, vocabulary=int(parsed.vocab_size))


def load_folder(folder: Path, base: TextModel | None) -> nn.Module:
    """Load an exported model as other programs do; its values are float32 on the processor.

    Args:
        base: a model with new LoRA adapters, if the folder holds others for the same base; it is changed.
    """
    loaded: nn.Module
    if base is None:
        loaded = _transformers().AutoModelForCausalLM.from_pretrained(folder)
    else:
        import peft

        adapted: Any = base.module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # as in _with_adapters
            loaded = peft.PeftModel.from_pretrained(adapted.unload(), folder)
    return loaded


def _without_places(value: Any) -> Any:
    """Return a configuration without the keys that name code or a folder, also in its parts."""
    if not isinstance(value, dict):
        return value
    return {key: _without_places(inner) for key, inner in value.items() if key not in _OF_ONE_FILE}


def _special_float(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object, because JSON has no infinity."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _check_size(module: nn.Module, most_bytes: int | None) -> None:
    elements = sum(parameter.numel() for parameter in module.parameters())
    needed = sum(parameter.nbytes for parameter in module.parameters())
    if most_bytes is not None and needed > most_bytes:
        raise ConfigError(
            f"the model has {elements:,} parameters, which take {needed / 1e9:.3g} GB, and {most_bytes / 1e9:.3g} GB "
            "of this machine's memory are free; choose a smaller model, or a machine with more memory"
        )


def _check_loaded(weights: str, report: Mapping[str, Any]) -> None:
    missing = sorted(map(str, report["missing_keys"]))
    if missing:
        raise ConfigError(
            f"the weights at {weights} lack {len(missing)} tensors of the model, such as {missing[0]}; name weights of "
            "the same model, or start from random weights with --model.weights new"
        )


def _check_config(value: Any, key: str = "") -> None:
    """Refuse a configuration of a manifest that loads code or files, or lists layers without end."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _REFUSED:
                raise ConfigError(f"model.config has {name}, which loads code or files; expected none")
            _check_config(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_config(inner, key)
    elif isinstance(value, int) and value > _MOST_LAYERS and ("layer" in key or "expert" in key or "depth" in key):
        raise ConfigError(f"model.config has {key} = {value}; expected at most {_MOST_LAYERS}")


@contextmanager
def _limited(most_elements: int | None) -> Iterator[None]:
    """Refuse to create more elements of parameters than that inside the block."""
    left = [most_elements or 0]

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        left[0] -= parameter.numel() if parameter is not None else 0
        if left[0] < 0:
            raise ConfigError(
                f"the run's model.config describes a model of more than {most_elements:,} elements, which this machine "
                "cannot hold or the run does not train; do not join it"
            )

    if most_elements is None:
        yield
        return
    hook = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _with_adapters(module: Any, lora: LoraShape) -> nn.Module:
    peft = import_extra("peft", "LoRA")
    adapters = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets) or None,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses names that transformers is about to change
            adapted: nn.Module = peft.get_peft_model(module, adapters)
    except ValueError as error:
        raise ConfigError(
            f"cannot add the LoRA adapters ({_first_line(error)}); name the modules with model.lora_targets, such as "
            "q_proj,v_proj"
        ) from None
    return adapted


def _loss(module: nn.Module, windows_BT: Tensor) -> Tensor:
    output = module(input_ids=windows_BT[:, :-1], use_cache=False)
    loss = token_loss(output.logits, windows_BT)
    balance = getattr(output, "aux_loss", None)
    if isinstance(balance, Tensor):  # a mixture of experts that is configured to balance them
        loss = loss + float(module.config.router_aux_loss_coef) * balance.to(loss.device)  # type: ignore[union-attr, arg-type]
    return loss


def _transformers() -> Any:
    transformers = import_extra("transformers", "this run trains a Hugging Face model and")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its warnings are for those who call it
    return transformers


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
