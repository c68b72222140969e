"""Short plays of two scenes, with real processes on true packets: everybody gets in and stays in.

`make internet` plays all scenes, for longer. The claims leave room for a busy machine.
"""

from __future__ import annotations

import pytest

from internet.places import NoInternetError
from internet.play import How, Play, played
from internet.report import Row, lines_of, report
from internet.scenes import SCENES

pytestmark = [pytest.mark.wall_clock, pytest.mark.timeout(400)]

SECONDS = 90.0
READY_SECONDS = 60.0
LEAST_IN_ENTRIES = 0.8


def play(name: str, how: How) -> Row:
    try:
        with played(SCENES[name](), Play(how=how, seconds=SECONDS)) as result:
            row = report(name, result)
    except NoInternetError as error:
        pytest.skip(str(error))
    print("\n".join((*lines_of(row), *row.rosters)))
    return row


@pytest.mark.parametrize("name", ["mixed", "one-lan"])
def test_everybody_gets_in_and_stays_in(name: str) -> None:
    row = play(name, How.LOOP)
    for line in row.lines:
        assert line.ready is not None, line
        assert line.ready <= READY_SECONDS, line
        assert line.in_entries >= LEAST_IN_ENTRIES, line
        assert line.num_dropped == 0, line
    assert row.rosters_per_minute <= 4.0, row.rosters
