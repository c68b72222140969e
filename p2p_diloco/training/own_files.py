"""Export a user's own model: safetensors with the names of its `state_dict`, and a model card."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from p2p_diloco.training.provenance import Provenance, as_markdown, card_table
from p2p_diloco.training.tensor_bytes import tensor_bytes


def own_tensors(tensors: Mapping[str, Tensor], provenance: Provenance) -> bytes:
    """Return a safetensors file whose metadata has the run, its rounds, and tokens and loss if known."""
    facts = {
        "run": provenance.run,
        "rounds": provenance.rounds,
        "tokens": provenance.tokens,
        "training_loss": provenance.training_loss,
    }
    return tensor_bytes(tensors, {name: str(fact) for name, fact in facts.items() if fact is not None})


def own_files(tensors: Mapping[str, Tensor], provenance: Provenance, *, is_whole: bool) -> dict[str, bytes]:
    """Return the files of an export folder, by name.

    Args:
        tensors: tensors by their names in the model's `state_dict`; none share memory.
        provenance: for the model card.
        is_whole: whether this is the whole `state_dict`, or only the trained tensors and buffers.
    """
    return {
        "model.safetensors": own_tensors(tensors, provenance),
        "README.md": _model_card(tensors, provenance, is_whole=is_whole).encode(),
    }


def _model_card(tensors: Mapping[str, Tensor], provenance: Provenance, *, is_whole: bool) -> str:
    size = ("elements", f"{sum(tensor.numel() for tensor in tensors.values()):,} in {len(tensors):,} tensors")
    held = (
        "the whole `state_dict`"
        if is_whole
        else "the trained tensors of its `state_dict` and the buffers of one peer, without frozen ones"
    )
    strict = "" if is_whole else ", strict=False"
    return f"""---
tags:
- p2p-diloco
---

# {as_markdown(provenance.run_name)}

A PyTorch model, trained by the peers of a p2p_diloco run. `model.safetensors` holds {held}.

{card_table(provenance, [size])}

```python
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"){strict})  # built as in the run
```

This card names no licence. Before you publish this model, choose one that its training data allows, and add
`license: …` to the lines at the top.
"""
