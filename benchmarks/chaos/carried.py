"""The tokens that each included contribution carries, from the trace of its island.

A contribution carries the tokens since the one before. One whose round had no entry for its span stays in the island's
parameters: the contribution after the next entry carries its tokens too. One that its round's entry leaves out is lost,
like those in flight when a span is replaced or a process ends. This mirrors `p2p_diloco/outer/state.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.ids import Digest, SpanId
from p2p_diloco.outer.state import MAX_IN_FLIGHT
from research.trace import chosen_spans


@dataclass(slots=True)
class _Span:
    """Tokens of a span that no entry includes yet: steps at the last contribution, in flight by round, returned."""

    sent_steps: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    returned: int = 0


def carried_tokens(
    lines: Iterable[Mapping[str, Any]],
    *,
    rounds: Mapping[Digest, int],
    spans_of: Sequence[Sequence[SpanId]],
    step_tokens: int,
) -> dict[Digest, int]:
    """Return for each entry that includes this island the tokens that its contribution carried.

    Args:
        lines: the trace.
        rounds: the round of each entry, by its digest.
        spans_of: the spans of each fragment.
        step_tokens: tokens of an inner step.
    """
    carried: dict[Digest, int] = {}
    spans: dict[SpanId, _Span] = defaultdict(_Span)
    for line in lines:
        match line["what"]:
            case "began" | "loaded":
                spans.clear()
            case "contributed":
                chosen = chosen_spans(line)
                for span in spans_of[line["fragment"]] if chosen is None else chosen:
                    _contribute(spans[span], line["round"], line["steps"], step_tokens)
            case "absorbed":
                entry = Digest(bytes.fromhex(line["entry"]))
                tokens = _resolve(spans[SpanId(*line["span"])], rounds.get(entry))
                if line["own"] and tokens:
                    carried[entry] = tokens
            case "took":
                spans[SpanId(*line["span"])].in_flight.clear()
    return carried


def _contribute(span: _Span, round_index: int, steps: int, step_tokens: int) -> None:
    span.in_flight[round_index] = (steps - span.sent_steps) * step_tokens + span.returned
    span.sent_steps, span.returned = steps, 0
    if len(span.in_flight) > MAX_IN_FLIGHT:
        del span.in_flight[min(span.in_flight)]


def _resolve(span: _Span, entry_round: int | None) -> int:
    """Resolve what is in flight up to the entry of a round; return the tokens of that round's contribution.

    Without a round, which means an entry that no disk has, everything in flight is lost.
    """
    if entry_round is None:
        span.in_flight.clear()
        return 0
    tokens = span.in_flight.pop(entry_round, 0)
    for earlier in [one for one in span.in_flight if one < entry_round]:
        span.returned += span.in_flight.pop(earlier)
    return tokens
