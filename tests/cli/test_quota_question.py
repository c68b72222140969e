"""The owner is asked once about the traffic of a month, at a terminal, with an answer that limits only surprises."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from p2p_diloco.app.cli.peer_output import QuotaQuestion, suggest_quota
from p2p_diloco.rate import parse_bytes

SENTENCE = "at full rate this run sends up to 3.0 GB and receives up to 3.0 GB a day, 180.0 GB in 30 days"


def asked(lines: Sequence[str | None], *, stops_after: int = 99) -> tuple[str, list[str]]:
    """Return the answer to these lines of input, and what was shown."""
    shown: list[str] = []
    waiting = list(lines)
    looks = 0

    def has_stopped() -> bool:
        nonlocal looks
        looks += 1
        return looks > stops_after

    question = QuotaQuestion(shown.append, has_stopped, lambda: waiting.pop(0) if waiting else None)
    return question.ask(SENTENCE, 180e9), shown


def test_enter_takes_the_suggestion() -> None:
    answer, shown = asked([None, None, "\n"])
    assert answer == "200GB"
    assert shown[0].startswith(SENTENCE)
    assert "Enter for 200GB" in shown[1]


@pytest.mark.parametrize("line", ["500GB\n", " 1.5 TB \n", "none\n"])
def test_an_amount_or_none_is_taken_as_typed(line: str) -> None:
    assert asked([line])[0] == line.strip()


def test_a_mistake_is_explained_and_asked_again() -> None:
    answer, shown = asked(["500\n", "lots\n", "500GB\n"])
    assert answer == "500GB"
    assert len([line for line in shown if re.search(r"expected an amount with its unit.*such as 500GB:$", line)]) == 2


def test_a_peer_that_is_asked_to_leave_waits_for_no_answer() -> None:
    assert asked([], stops_after=3)[0] == ""


def test_without_a_terminal_the_sentence_names_the_flag() -> None:
    shown: list[str] = []
    assert QuotaQuestion(shown.append, lambda: False, None).ask(SENTENCE, 180e9) == ""
    assert shown == [f"{SENTENCE}; limit a month with --monthly-quota 500GB"]


@pytest.mark.parametrize(("need", "text"), [(1e3, "1GB"), (5.2e9, "6GB"), (180e9, "200GB")])
def test_the_suggestion_is_round_and_above_a_modest_need(need: float, text: str) -> None:
    assert suggest_quota(need) == text
    assert need < parse_bytes(text, "it") < max(1.25 * need, 2e9)


def test_enter_grants_at_most_what_a_home_can_spare_and_the_question_says_how_long_that_lasts() -> None:
    shown: list[str] = []
    waiting = ["\n"]
    answer = QuotaQuestion(shown.append, lambda: False, lambda: waiting.pop(0)).ask(SENTENCE, 2.6e12)
    assert answer == "500GB"
    assert "Enter for 500GB, which lasts 6 days; then it pauses until the next month:" in shown[1]
