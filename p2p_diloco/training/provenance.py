"""Where parameters come from: the facts for a model card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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


def card_table(provenance: Provenance, size: Sequence[tuple[str, str]]) -> str:
    """Return the facts of a model card as rows of a Markdown table.

    Args:
        size: rows with the size of the model.
    """
    facts = [("run id", f"`{provenance.run}`"), *size]
    if provenance.text is not None:
        facts.append(("trained on", as_markdown(provenance.text)))
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


def as_markdown(text: str) -> str:
    """Escape `text` so that Markdown shows it literally."""
    return _MARKDOWN.sub(r"\\\1", text)
