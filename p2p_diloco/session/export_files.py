"""The files of an export: tensors as bytes, where they come from, and the model card of a user's own model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

from safetensors.torch import save
from torch import Tensor

_LINE, _NO_BREAK = 120, "\N{NO-BREAK SPACE}"
_MARKDOWN = re.compile(r"([\\`*_\[\]<>&#|~])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where parameters come from; None for unknown values.

    Attributes:
        run_name: name of the run.
        run: run id in hexadecimal digits.
        text: description of the training text.
        rounds: number of rounds up to the latest whose update is included; 0: the initial model.
        cycles: the same in cycles.
        tokens: tokens trained by the exporting peer since its last start.
        training_loss: training loss of that peer's latest steps.
        held_out_loss: nats per token, last measured by that peer; of exactly these parameters if `state` is known.
        state: SHA-256 of the agreed state at the end of the last cycle, which these parameters are part of; None if
            they come from a checkpoint, whose parts may be a few rounds apart.
    """

    run_name: str
    run: str
    text: str | None
    rounds: int
    cycles: float
    tokens: int | None = None
    training_loss: float | None = None
    held_out_loss: float | None = None
    state: str | None = None


def model_card(
    provenance: Provenance,
    size: Sequence[tuple[str, str]],
    *,
    intro: str,
    usage: str,
    allowed_by: str,
    is_text_model: bool = False,
) -> bytes:
    """Return `README.md`; it names no licence, which is up to the publisher.

    Args:
        size: rows with the size of the model.
        intro: what the model is.
        usage: Python that loads it.
        allowed_by: what a licence depends on, with its verb.
        is_text_model: whether transformers loads it as a causal language model.
    """
    library = "library_name: transformers\npipeline_tag: text-generation\n" if is_text_model else ""
    licence = (
        f"This card names no licence. Before you publish this model, choose one that its {allowed_by}, and add "
        f"`license:{_NO_BREAK}…` to the lines at the top."
    )
    return f"""---
{library}tags:
- p2p-diloco
---

# {_as_markdown(provenance.run_name)}

{intro}

{_table(provenance, size)}

```python
{usage}
```

{fill(licence, _LINE).replace(_NO_BREAK, " ")}
""".encode()


def _table(provenance: Provenance, size: Sequence[tuple[str, str]]) -> str:
    facts = [("run id", f"`{provenance.run}`"), *size]
    if provenance.text is not None:
        facts.append(("trained on", _as_markdown(provenance.text)))
    facts.append(("rounds, cycles", f"{provenance.rounds:,}, {provenance.cycles:,.1f}"))
    if provenance.state is not None:
        who = "held by more than half of the members at the end of the last of these cycles"
        facts.append(("state", f"`{provenance.state}`, {who}"))
    if provenance.tokens is not None:
        facts.append(("tokens", f"{provenance.tokens:,} by the peer that exported this, since its last start"))
    if provenance.training_loss is not None:
        facts.append(("training loss", f"{provenance.training_loss:.6g}, of that peer's latest steps"))
    if provenance.held_out_loss is not None:
        when = "of these parameters" if provenance.state is not None else "when that peer measured it last"
        facts.append(("held-out loss", f"{provenance.held_out_loss:.4f} nats per token, {when}"))
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {fact} |" for what, fact in facts)])


def _as_markdown(text: str) -> str:
    """Escape `text` so that Markdown shows it literally."""
    return _MARKDOWN.sub(r"\\\1", text)


_LENGTH_BYTES = 8


def tensor_bytes(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """Return a safetensors file. Checksums of two files show whether their tensors are equal.

    safetensors writes `facts` in a random order; here they are in the order in which they are given.

    Args:
        tensors: by name; none share memory.
        facts: the file's metadata, besides its format.
    """
    facts = {"format": "pt", **facts}
    raw = save(dict(tensors), metadata=facts)
    begin = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    header = json.loads(raw[_LENGTH_BYTES:begin])
    ordered = json.dumps({**header, "__metadata__": facts}, separators=(",", ":")).encode()
    ordered += b" " * (-len(ordered) % _LENGTH_BYTES)
    return len(ordered).to_bytes(_LENGTH_BYTES, "little") + ordered + memoryview(raw)[begin:]


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
    size = ("elements", f"{sum(tensor.numel() for tensor in tensors.values()):,} in {len(tensors):,} tensors")
    held = (
        "the whole `state_dict`"
        if is_whole
        else "the trained tensors of its `state_dict` and the buffers of one peer, without frozen ones"
    )
    strict = "" if is_whole else ", strict=False"
    card = model_card(
        provenance,
        [size],
        intro=f"A PyTorch model, trained by the peers of a p2p_diloco run. `model.safetensors` holds {held}.",
        usage="from safetensors.torch import load_file\n\n"
        f'model.load_state_dict(load_file("model.safetensors"){strict})  # built as in the run',
        allowed_by="training data allows",
    )
    return {"model.safetensors": own_tensors(tensors, provenance), "README.md": card}
