"""Advancing the tip of a log by an entry."""

from __future__ import annotations

from dataclasses import replace

from p2p_diloco.ids import ZERO_DIGEST, sha256
from p2p_diloco.span_log import GENESIS_ROUND, AbsorbedEntry, SpanHead, advance_head

FOUNDED = SpanHead(
    digest=sha256(b"start"), height=0, round=GENESIS_ROUND, roster=ZERO_DIGEST, radius=1.0, median_weight=2.0
)
ENTRY = AbsorbedEntry(digest=sha256(b"entry"), round=7, roster=sha256(b"roster"), radius=3.0, median_weight=4.0)


def test_a_tip_gets_its_digest_from_all_entries_and_the_rest_from_the_last() -> None:
    head = advance_head(FOUNDED, ENTRY)
    assert head.digest == sha256(FOUNDED.digest, ENTRY.digest)
    assert (head.height, head.round, head.roster, head.radius, head.median_weight) == (1, 7, ENTRY.roster, 3.0, 4.0)


def test_logs_with_the_same_entries_in_another_order_differ() -> None:
    other = replace(ENTRY, digest=sha256(b"other"))
    one, two = (advance_head(advance_head(FOUNDED, a), b) for a, b in ((ENTRY, other), (other, ENTRY)))
    assert one.digest != two.digest
