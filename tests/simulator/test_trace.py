"""The trace that people read after a violated invariant."""

from __future__ import annotations

from p2p_diloco.ids import ZERO_DIGEST, SpanId
from p2p_diloco.protocol.wire.messages import EntryRequest, Ping, encode_message
from simulator.trace import Trace, describe

REQUEST = EntryRequest(span=SpanId(0, 1), parent=ZERO_DIGEST)


def test_lines_are_in_order_and_concern_the_named_machines() -> None:
    trace = Trace()
    for now, name in ((1.0, "p0"), (2.0, "p1"), (3.0, "")):
        trace.add(now, name, "word", "text")
    assert [line.split()[0] for line in trace.last()] == ["1.000", "2.000", "3.000"]
    assert [line.split()[0] for line in trace.last(["p1"])] == ["2.000", "3.000"]
    assert len(trace.last(count=1)) == 1


def test_a_message_is_one_short_line_with_names() -> None:
    assert describe(REQUEST, {}) == "EntryRequest(span=0.1, parent=000000)"
    assert describe(REQUEST, {bytes(32): "p7"}) == "EntryRequest(span=0.1, parent=p7)"


def test_heartbeats_and_pings_are_not_traced_and_a_bad_frame_is_explained() -> None:
    trace = Trace()
    for frame in (encode_message(REQUEST), encode_message(Ping(nonce=1)), b"\x00"):
        trace.frame(1.0, b"one", b"other", frame)
    told = trace.last()
    assert len(told) == 2
    assert "EntryRequest(" in told[0]
    assert "a bad frame" in told[1]
