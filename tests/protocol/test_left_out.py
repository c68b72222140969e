"""A peer that fetches parts of some spans leaves only those out of its contribution."""

from __future__ import annotations

from fetching import B, catch_up
from made import SPAN, head_of


def test_a_peer_that_fetches_an_entry_contributes_only_its_other_spans() -> None:
    fetch, chains = catch_up()
    assert fetch.differences.left_out() is None, "without a head there is nothing to build on"
    chains.set_head(SPAN, head_of())
    assert fetch.differences.left_out() == frozenset()
    fetch.fetcher.want_entry(SPAN, B)
    assert fetch.differences.left_out() == frozenset({SPAN})
    fetch.differences.want_span(SPAN, B)
    assert fetch.differences.left_out() == frozenset({SPAN})
    fetch.adopt()
    assert fetch.differences.left_out() is None, "what is here is of a branch that is given up"
    fetch.differences.adopted(0)
    assert fetch.differences.left_out() == frozenset()
