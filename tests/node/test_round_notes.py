"""What is said once per round."""

from __future__ import annotations

from p2p_diloco.ids import PeerId, sha256
from p2p_diloco.node.round_notes import RoundNotes

ANN, BEN = PeerId(sha256(b"ann")), PeerId(sha256(b"ben"))


def test_one_sentence_is_said_as_it_is() -> None:
    notes = RoundNotes()
    notes.note("skipped", "span 3 is skipped")
    assert notes.take() == [("skipped", "span 3 is skipped", None)]


def test_of_sentences_on_one_subject_the_first_is_said_and_the_others_counted() -> None:
    notes = RoundNotes()
    for span in range(3):
        notes.note("skipped", f"span {span} is skipped")
    assert notes.take() == [("skipped", "span 0 is skipped (and 2 more like it)", None)]


def test_nobody_hides_behind_another_culprit() -> None:
    notes = RoundNotes()
    for peer, name in ((ANN, "ann"), (ANN, "ann"), (BEN, "ben")):
        notes.note("contribution-dropped", f"dropped {name}", about=peer)
    assert notes.take() == [
        ("contribution-dropped", "dropped ann (and 1 more like it)", ANN),
        ("contribution-dropped", "dropped ben", BEN),
    ]


def test_each_round_begins_anew() -> None:
    notes = RoundNotes()
    notes.note("skipped", "span 0 is skipped")
    notes.take()
    assert notes.take() == []
