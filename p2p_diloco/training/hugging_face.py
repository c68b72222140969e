"""Models of Hugging Face transformers, built from the configuration in the manifest; no code comes with them.

Requires the extra `hf`. transformers is imported only when a run needs it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.errors import ConfigError
from p2p_diloco.training.model import token_loss
from p2p_diloco.training.text_model import TextModel
from p2p_diloco.wording import install_line

_OF_ONE_FILE = ("auto_map", "_name_or_path", "transformers_version")
"""Keys that are left out of the manifest: they name code or a folder, or differ between versions."""
_REFUSED = frozenset(
    """auto_map attn_implementation _attn_implementation _attn_implementation_internal experts_implementation
    use_kernels kernel_config quantization_config name_or_path _name_or_path""".split()
)
"""Keys of a configuration that make transformers load code, kernels or files; a joiner refuses them."""
ADAPTER = ".default."
"""peft's name of the adapter in the names of its parameters, which its files leave out."""
_MOST_LAYERS = 1 << 16
_INSTALL = f"install the extra: {install_line('hf')}"


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


def read_config(place: str) -> tuple[dict[str, Any], int | None]:
    """Read the configuration of a model, and its number of positions if that is limited.

    Args:
        place: a folder, or the id of a model on the hub.
    Raises:
        ConfigError: transformers is not installed, there is no such model, or it needs code of its own.
    """
    transformers = _transformers()
    try:
        raw, _ = transformers.PretrainedConfig.get_config_dict(place)
        if "auto_map" in raw:
            raise ConfigError(
                f"the model at {place} needs its own code (auto_map in config.json); expected an architecture of "
                "transformers, since no code is loaded with a model"
            )
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot read the model {place} ({_first_line(error)}); expected a folder with config.json or the id of a "
            "model on the Hugging Face hub"
        ) from None
    document: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    kept = {key: value for key, value in document.items() if key not in _OF_ONE_FILE}
    return kept, getattr(config, "max_position_embeddings", None)


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
) -> TextModel:
    """Build a causal language model from the configuration in a manifest.

    Args:
        config: the configuration as JSON.
        context: number of tokens that a window predicts.
        weights: folder or hub id to load the weights from; None: random weights.
        lora: adapters to train instead of all weights.
        most_elements: maximum elements of all parameters that are assigned while it is built; None: no limit.
    Raises:
        ConfigError: the configuration loads code or describes a larger model, transformers or peft is missing, or the
            model cannot be built or loaded.
    """
    transformers = _transformers()
    document = json.loads(config)
    _check_config(document)
    kind = document.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError("the run's model.config has no model_type, so its architecture is unknown")
    dtype = getattr(torch, str(document.get("dtype")), torch.float32) if lora is not None else torch.float32
    build = transformers.AutoModelForCausalLM.from_config
    try:
        parsed = transformers.AutoConfig.for_model(kind, **document)
        if most_elements is not None:
            with torch.device("meta"), _limited(most_elements):  # first without memory: one tensor may be too large
                build(parsed, dtype=dtype, trust_remote_code=False)
        with _limited(most_elements):
            if weights is None:
                module = build(parsed, dtype=dtype, trust_remote_code=False)
            else:
                module = transformers.AutoModelForCausalLM.from_pretrained(
                    weights, config=parsed, dtype=dtype, use_safetensors=True, trust_remote_code=False
                )
    except ConfigError:
        raise
    except Exception as error:  # the classes of transformers raise any
        where = f"from {weights}" if weights is not None else f"with transformers {transformers.__version__}"
        raise ConfigError(f"cannot build the run's {kind} model {where}: {_first_line(error)}") from None
    longest = getattr(parsed, "max_position_embeddings", None)
    if isinstance(longest, int) and context > longest:
        raise ConfigError(f"model.context is {context}; this {kind} model has {longest} positions")
    if lora is not None:
        module = _with_adapters(module, lora)
    module.train()
    return TextModel(module=module, loss=_loss, context=context, vocabulary=int(parsed.vocab_size))


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
    try:
        import peft
    except ImportError:
        raise ConfigError(f"LoRA needs peft; {_INSTALL}") from None
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
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"this run trains a Hugging Face model and needs transformers; {_INSTALL}") from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
