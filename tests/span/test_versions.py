"""A version of a span is kept only while a peer is in the middle of fetching it."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.ids import ZERO_DIGEST, Digest, PeerId, SpanId, sha256
from p2p_diloco.outer.state import SpanState
from p2p_diloco.span import serve
from p2p_diloco.span.serve import MOST_VERSIONS_OF_A_PEER, Versions
from p2p_diloco.span_log import SpanHead

ASKER, OTHER = PeerId(b"a" * 32), PeerId(b"o" * 32)
SPAN = SpanId(0, 0)
ELEMENTS, WHOLE = 1000, 8000
KEEP_SECONDS = 100.0


def state_at(version: int) -> SpanState:
    head = SpanHead(
        digest=sha256(b"%d" % version), height=1, round=0, roster=sha256(b"r"), radius=0.0, median_weight=0.0
    )
    return SpanState(head=head, anchor_N=np.zeros(ELEMENTS, np.float32), momentum_N=np.zeros(ELEMENTS, np.float32))


class Donor:
    """Spans that advance with every call of `move_on`, and a clock that is set by hand."""

    def __init__(self, num_spans: int = 1) -> None:
        self.seconds = 0.0
        self.version = 0
        self.spans = [SpanId(0, index) for index in range(num_spans)]
        self.states: dict[SpanId, SpanState] = {}
        self.versions = Versions(span_state=self.states.get, now=lambda: self.seconds, keep_seconds=KEEP_SECONDS)
        self.move_on()

    def move_on(self) -> None:
        self.version += 1
        self.states.update({span: state_at(self.version) for span in self.spans})

    def begin(self, peer: PeerId = ASKER, span: SpanId = SPAN) -> Digest:
        """Serve the first piece of a span; return its version."""
        state = self.versions.take(peer, span, ZERO_DIGEST)
        assert state is not None
        return state.head.digest

    def end(self, version: Digest, peer: PeerId = ASKER, span: SpanId = SPAN) -> None:
        """Serve the last piece."""
        assert self.has(version, peer, span)
        self.versions.served_to_the_end(peer, span)

    def has(self, version: Digest, peer: PeerId = ASKER, span: SpanId = SPAN) -> bool:
        state = self.versions.take(peer, span, version)
        return state is not None and state.head.digest == version


def test_a_peer_in_the_middle_of_a_fetch_keeps_its_version() -> None:
    donor = Donor()
    began = donor.begin()
    donor.move_on()
    assert donor.has(began)


def test_a_version_kept_for_one_peer_serves_another() -> None:
    donor = Donor()
    began = donor.begin(ASKER)
    donor.move_on()
    assert donor.has(began, OTHER)
    donor.end(began, ASKER)
    assert donor.has(began, OTHER), "that the first is done takes nothing from the second"


def test_a_lost_last_piece_can_be_requested_again() -> None:
    donor = Donor()
    began = donor.begin()
    donor.move_on()
    donor.end(began)
    assert donor.has(began)


def test_versions_whose_last_piece_was_sent_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SERVED_BYTES", 3 * WHOLE)
    donor = Donor(num_spans=20)
    for span in donor.spans:
        donor.end(donor.begin(span=span), span=span)
    assert len(donor.versions) == 3
    before = donor.version
    donor.move_on()
    kept = [span for span in donor.spans if donor.has(sha256(b"%d" % before), span=span)]
    assert kept == donor.spans[-3:], "the latest"


def test_the_latest_such_version_is_kept_whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SERVED_BYTES", 0)
    donor = Donor(num_spans=2)
    began = [donor.begin(span=span) for span in donor.spans]
    for version, span in zip(began, donor.spans, strict=True):
        donor.end(version, span=span)
    assert len(donor.versions) == 1
    donor.move_on()
    assert donor.has(began[1], span=donor.spans[1])


def test_one_peer_keeps_no_more_versions_than_it_may_fetch_at_a_time() -> None:
    donor = Donor(num_spans=3 * MOST_VERSIONS_OF_A_PEER)
    other = donor.begin(OTHER)
    for span in donor.spans:
        donor.begin(span=span)
    assert len(donor.versions) == MOST_VERSIONS_OF_A_PEER + 1
    donor.move_on()
    assert donor.has(other, OTHER)


def test_all_peers_together_keep_only_a_few_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MOST_VERSIONS", 2)
    donor = Donor()
    for number in range(5):
        donor.begin(PeerId(bytes([number]) * 32))
        donor.move_on()
    assert len(donor.versions) == 2


def test_restarting_a_span_drops_the_earlier_version() -> None:
    donor = Donor()
    first = donor.begin()
    donor.move_on()
    donor.begin()
    assert len(donor.versions) == 1
    assert not donor.has(first)


def test_an_unrequested_version_is_dropped() -> None:
    donor = Donor()
    began = donor.begin()
    donor.move_on()
    for _ in range(5):
        donor.seconds += 0.9 * KEEP_SECONDS
        donor.versions.forget_old()
        assert donor.has(began)
    donor.seconds += KEEP_SECONDS
    donor.versions.forget_old()
    assert len(donor.versions) == 0
    assert not donor.has(began)


def test_a_span_that_is_not_held_is_not_kept() -> None:
    donor = Donor()
    assert donor.versions.take(ASKER, SpanId(1, 0), ZERO_DIGEST) is None
    donor.versions.served_to_the_end(ASKER, SpanId(1, 0))
    assert len(donor.versions) == 0
