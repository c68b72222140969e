"""Notes that are reported once per round."""

from __future__ import annotations

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.node.reports import RoundNotes

ANN, BEN = PeerId(sha256(b"ann")), PeerId(sha256(b"ben"))


def test_a_single_sentence_is_reported_unchanged() -> None:
    notes = RoundNotes()
    notes.note("skipped", "span 3 is skipped")
    assert notes.take() == [("skipped", "span 3 is skipped", None)]


def test_only_the_first_sentence_on_a_subject_is_reported_and_the_others_are_counted() -> None:
    notes = RoundNotes()
    for span in range(3):
        notes.note("skipped", f"span {span} is skipped")
    assert notes.take() == [("skipped", "span 0 is skipped (and 2 more like it)", None)]


def test_sentences_about_different_peers_are_reported_separately() -> None:
    notes = RoundNotes()
    for peer, name in ((ANN, "ann"), (ANN, "ann"), (BEN, "ben")):
        notes.note("contribution-dropped", f"dropped {name}", about=peer)
    assert notes.take() == [
        ("contribution-dropped", "dropped ann (and 1 more like it)", ANN),
        ("contribution-dropped", "dropped ben", BEN),
    ]


def test_counts_restart_each_round() -> None:
    notes = RoundNotes()
    notes.note("skipped", "span 0 is skipped")
    notes.take()
    assert notes.take() == []
