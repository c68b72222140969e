"""Export the built-in model in the layout of Hugging Face's Llama, so that other programs can load it.

The architecture is the same: RMSNorm before attention and SwiGLU, rotary positions on halves of a head, no biases, an
untied head. Only the two stacked matrices are split (query, key, value; gate, up). All values stay float32, unrounded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from p2p_diloco.app.models.config_files import config_files
from p2p_diloco.app.text.tokenizer_files import NUM_BYTES, TokenizerFiles, exported_files
from p2p_diloco.config.decoder import ModelShape, llama_config, llama_names
from p2p_diloco.errors import ConfigError
from p2p_diloco.session.export_files import Provenance, as_markdown, card_table, tensor_bytes


def llama_files(
    shape: ModelShape, parameters: Mapping[str, Tensor], provenance: Provenance, tokenizer: TokenizerFiles | None = None
) -> dict[str, bytes]:
    """Return the files, by name, of a folder that `AutoModelForCausalLM` and `AutoTokenizer` can load.

    Args:
        shape: shape of the model.
        parameters: float32 parameters by their names in the built-in model.
        provenance: for the model card.
        tokenizer: the files of its tokenizer; None for a model of bytes.
    Raises:
        ConfigError: the model has tokens other than bytes, and there is no tokenizer.
    """
    if tokenizer is None and shape.vocabulary != NUM_BYTES:
        raise ConfigError(f"the model has {shape.vocabulary} tokens; expected {NUM_BYTES}, one for each byte")
    return {
        "model.safetensors": tensor_bytes(llama_tensors(parameters), {"run": provenance.run}),
        **config_files(llama_config(shape), tokenizer),
        **exported_files(tokenizer, shape.context),
        "README.md": model_card(shape, provenance).encode(),
    }


def llama_tensors(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters under Llama's names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        names = llama_names(name)
        pieces = tensor.detach().chunk(len(names))
        tensors |= {own: piece.contiguous() for own, piece in zip(names, pieces, strict=True)}
    return tensors


def model_card(shape: ModelShape, provenance: Provenance) -> str:
    """Return `README.md`; it names no licence, which is up to the publisher."""
    is_of_bytes = shape.vocabulary == NUM_BYTES
    unit = "bytes" if is_of_bytes else "tokens"
    size = [("parameters", f"{shape.num_parameters:,}, float32"), ("context", f"{shape.context} {unit}")]
    kind = (
        "A byte-level language model, trained by the peers of a p2p_diloco run. It has the Llama architecture; each "
        "token is one\nbyte of UTF-8."
        if is_of_bytes
        else "A language model, trained by the peers of a p2p_diloco run. It has the Llama architecture."
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- p2p-diloco
---

# {as_markdown(provenance.run_name)}

{kind}

{card_table(provenance, size)}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
prompt = tokenizer("def ", return_tensors="pt").input_ids
text = model.generate(prompt, do_sample=True, max_new_tokens={max(1, shape.context - 4)})
print(tokenizer.decode(text[0]))
```

This card names no licence. Before you publish this model, choose one that its training text allows, and add
`license: …` to the lines at the top.
"""
