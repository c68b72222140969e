"""The kernel's counters match the resources that processes used."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from benchmarks.meters import (
    cpu_seconds,
    family_of,
    forget_peaks,
    loopback_bytes,
    peak_rss_bytes,
    rss_bytes,
    sent_bytes,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")

MIB = 1024 * 1024
SLEEPER = (sys.executable, "-c", "import time; time.sleep(60)")


def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_processor_time_is_finer_than_ticks_and_a_process_that_is_gone_counts_nothing() -> None:
    before, began = cpu_seconds([os.getpid()]), time.process_time()
    while time.process_time() - began < 0.003:
        pass
    assert cpu_seconds([os.getpid(), gone_pid()]) - before == pytest.approx(0.003, abs=0.002)


def test_a_family_is_a_process_and_all_its_descendants() -> None:
    child = subprocess.Popen(SLEEPER)
    try:
        assert {process.pid for process in family_of(os.getpid())} >= {os.getpid(), child.pid}
    finally:
        child.kill()
        child.wait()
    assert family_of(child.pid) == []


def test_a_peak_is_kept_until_it_is_reset() -> None:
    me = [os.getpid()]
    forget_peaks(me)
    before = peak_rss_bytes(me)
    block = bytearray(os.urandom(1)) * (64 * MIB)
    del block
    assert peak_rss_bytes([*me, gone_pid()]) - before > 48 * MIB
    assert 0 < rss_bytes([*me, gone_pid()]) < peak_rss_bytes(me) - 32 * MIB
    forget_peaks(me)
    assert peak_rss_bytes(me) - before < 48 * MIB


def test_loopback_counts_sent_bytes() -> None:
    before = loopback_bytes(os.getpid())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver, socket.socket(type=socket.SOCK_DGRAM) as sender:
        receiver.bind(("127.0.0.1", 0))
        for _ in range(100):
            sender.sendto(bytes(1000), receiver.getsockname())
    assert loopback_bytes(os.getpid()) - before >= 100 * 1000


def test_sent_bytes_are_the_ninth_figure() -> None:
    assert sent_bytes("  10  1 0 0 0 0 0 0  20 2 0 0 0 0 0 0") == 20
