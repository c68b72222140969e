"""The queue of one lane: bounded, in order, without expired frames."""

from __future__ import annotations

from p2p_diloco.transport.link import LaneCounters
from p2p_diloco.transport.outbox import Outbox


def test_frames_leave_in_order_of_arrival() -> None:
    outbox = Outbox(100, LaneCounters())
    assert outbox.offer(b"one", 1.0)
    assert outbox.offer(b"two", 2.0)
    assert (len(outbox), outbox.waiting_bytes) == (2, 6)
    taken = [outbox.take(0.0), outbox.take(0.0)]
    assert [posted.frame for posted in taken if posted is not None] == [b"one", b"two"]
    assert outbox.take(0.0) is None
    assert (len(outbox), outbox.waiting_bytes) == (0, 0)


def test_a_full_outbox_refuses_and_an_empty_one_accepts_any_frame() -> None:
    outbox = Outbox(4, LaneCounters())
    assert outbox.offer(b"longer than four", 1.0)
    assert not outbox.offer(b"x", 1.0)
    assert outbox.take(0.0) is not None
    assert outbox.offer(b"four", 1.0)
    assert not outbox.offer(b"x", 1.0)


def test_frames_past_their_deadline_are_dropped_and_counted() -> None:
    counters = LaneCounters()
    outbox = Outbox(100, counters)
    for deadline in (1.0, 2.0, 3.0):
        outbox.offer(b"frame", deadline)
    posted = outbox.take(2.5)
    assert posted is not None
    assert posted.deadline == 3.0
    assert counters.frames_dropped == 2
    outbox.offer(b"frame", 3.0)
    assert outbox.take(3.5) is None
    assert counters.frames_dropped == 3


def test_a_frame_exactly_at_its_deadline_is_sent() -> None:
    outbox = Outbox(100, LaneCounters())
    outbox.offer(b"frame", 1.0)
    assert outbox.take(1.0) is not None


def test_clearing_counts_lost_frames() -> None:
    counters = LaneCounters()
    outbox = Outbox(100, counters)
    outbox.offer(b"one", 1.0)
    outbox.offer(b"two", 1.0)
    outbox.clear()
    assert (len(outbox), outbox.waiting_bytes, counters.frames_dropped) == (0, 0, 2)


def test_waiting_bytes_are_counted_until_they_are_taken_or_dropped() -> None:
    counters = LaneCounters()
    boxes = [Outbox(1000, counters) for _ in range(2)]
    for box in boxes:
        assert box.offer(bytes(100), 5.0)
        assert box.offer(bytes(50), 1.0)
    assert counters.bytes_waiting == 300
    assert boxes[0].take(2.0) is not None
    assert boxes[0].take(2.0) is None, "its deadline has passed"
    assert counters.bytes_waiting == 150
    boxes[1].clear()
    assert counters.bytes_waiting == 0
