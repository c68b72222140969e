"""The word to end is heard like Ctrl-C, and only while somebody asked for that."""

from __future__ import annotations

import signal

import pytest

from benchmarks.ended_politely import ended_politely


def tell(number: signal.Signals, tidied: list[int]) -> None:
    with ended_politely():
        try:
            signal.raise_signal(number)
        finally:
            tidied.append(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_word_to_end_interrupts_and_is_what_it_was_afterwards(number: signal.Signals) -> None:
    before, tidied = signal.getsignal(number), list[int]()
    with pytest.raises(KeyboardInterrupt):
        tell(number, tidied)
    assert tidied == [number]
    assert signal.getsignal(number) is before
