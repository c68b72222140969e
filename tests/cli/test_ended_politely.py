"""The word to end is heard like Ctrl-C, and only while somebody asked for that."""

from __future__ import annotations

import signal

import pytest

from p2p_diloco.app.cli.ended_politely import ended_politely


def tell(number: signal.Signals, tidied: list[int]) -> None:
    with ended_politely():
        try:
            signal.raise_signal(number)
        finally:
            tidied.append(number)


def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        tell(signal.SIGHUP, tidied := [])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert tidied == [signal.SIGHUP]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_word_to_end_interrupts_and_is_what_it_was_afterwards(number: signal.Signals) -> None:
    before, tidied = signal.getsignal(number), list[int]()
    with pytest.raises(KeyboardInterrupt):
        tell(number, tidied)
    assert tidied == [number]
    assert signal.getsignal(number) is before
