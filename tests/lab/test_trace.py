"""What people read when a promise was broken."""

from __future__ import annotations

from made_messages import MESSAGES

from p2p_diloco.lab.trace import Trace, describe


def test_lines_come_in_order_and_of_those_concerned() -> None:
    trace = Trace()
    for now, name in ((1.0, "p0"), (2.0, "p1"), (3.0, "")):
        trace.add(now, name, "word", "text")
    assert [line.split()[0] for line in trace.last()] == ["1.000", "2.000", "3.000"]
    assert [line.split()[0] for line in trace.last(["p1"])] == ["2.000", "3.000"]
    assert len(trace.last(count=1)) == 1


def test_a_message_is_one_short_line_with_names() -> None:
    request, beat = MESSAGES
    assert describe(request, {}) == "EntryRequest(span=0.1, parent=000000)"
    assert describe(request, {bytes(32): "p7"}) == "EntryRequest(span=0.1, parent=p7)"
    trace = Trace()
    trace.message(1.0, "p0", "from", "p1", request)
    trace.message(1.0, "p0", "from", "p1", beat)
    assert len(trace.last()) == 1
