"""A text that only one peer has, with real processes: peers with nothing but the invite fetch it and train."""

from __future__ import annotations

import random
import time

import pytest

from p2p_diloco.protocol.wire.file_list import FILE_PIECE_BYTES
from p2p_diloco.storage.text_copy import PIECES_FILE, text_folder
from tests.swarm.process_swarm import ProcessSwarm, drawn_text

pytestmark = [pytest.mark.wall_clock, pytest.mark.timeout(420)]

TEXT_BYTES = 8_000_000
CAP_BITS = 20e6
MOST_SECONDS = 180.0
LEAST_WITH_ENTRIES = 0.9
"""A joiner that is ready counts before it has the text for its first step."""


def long_text(num_bytes: int = TEXT_BYTES) -> bytes:
    """Return a text in which no two pieces are equal."""
    words, letters = drawn_text().split(), random.Random(11)
    return b" ".join(letters.choices(words, k=num_bytes // 5))[:num_bytes]


def pieces_of(swarm: ProcessSwarm, name: str) -> int:
    """Return how many pieces a peer has written."""
    data = swarm.manifest.data
    assert data.files is not None
    folder = text_folder(swarm.peers[name].folder, bytes.fromhex(data.files))  # type: ignore[arg-type]  # a digest
    file = folder / PIECES_FILE
    return file.read_bytes().count(1) if file.exists() else 0


def has_all(swarm: ProcessSwarm, name: str) -> bool:
    return any("all of the run's text is here" in event.text for event in swarm.peers[name].events("text"))


@pytest.mark.long
def test_two_peers_with_only_the_invite_fetch_the_text_and_train() -> None:
    with ProcessSwarm(text=long_text(), shares_text=True, patience_seconds=MOST_SECONDS) as swarm:
        swarm.start("founder", founds=True, max_upload=f"{CAP_BITS:.0f}bit")
        swarm.start("liar", flips_text=True)
        swarm.wait_for_whole_round(["founder", "liar"], 2, time.time())
        began = time.time()
        swarm.start("ada", has_text=False)
        swarm.start("ben", has_text=False)
        swarm.wait("a part of the text at ada", lambda: pieces_of(swarm, "ada") >= 3)
        swarm.kill("ada")
        kept = pieces_of(swarm, "ada")
        assert kept < TEXT_BYTES // FILE_PIECE_BYTES, "it was killed half-way"
        swarm.start("ada", has_text=False)
        swarm.wait("the whole text", lambda: has_all(swarm, "ada") and has_all(swarm, "ben"))
        ended = time.time()
        resumed = [event.text for event in swarm.peers["ada"].events("text") if event.text.startswith("fetching")]
        rounds = list(swarm.rounds_between("founder", began, ended))
        share = sum(closed.num_entries for closed in rounds) / sum(closed.num_spans for closed in rounds)
        print(f"text of {TEXT_BYTES / 1e6:.0f} MB at both after {ended - began:.1f} s; kept {kept}; {resumed}")
        print(f"share of spans with entries meanwhile {share:.3f}, over {len(rounds)} rounds")
        assert len(resumed) == 2, "it began twice, and the second time with what it had"
        assert share >= LEAST_WITH_ENTRIES

        names = ["founder", "liar", "ada", "ben"]
        swarm.wait_for_whole_round(names, 4, time.time())
        liar = swarm.peers["liar"].status.peer
        for name in ("ada", "ben"):
            named = [event.text for event in swarm.peers[name].events("text") if "other bytes" in event.text]
            short = f"{liar[:4]}..{liar[-8:]}"
            assert named, swarm.story()
            assert all(text.startswith(short) for text in named)
        digests = swarm.end_all_after(swarm.round_at(time.time()) + 4)
        assert len(set(digests.values())) == 1, digests
        assert set(digests) == set(names)


@pytest.mark.long
@pytest.mark.parametrize("cap_bits", [None, CAP_BITS], ids=["no cap", "20 Mbit/s"])
def test_the_rate_at_which_one_peer_sends_the_text(cap_bits: float | None) -> None:
    num_bytes = 3 * TEXT_BYTES
    with ProcessSwarm(text=long_text(num_bytes), shares_text=True, patience_seconds=MOST_SECONDS) as swarm:
        swarm.start("founder", founds=True, max_upload=None if cap_bits is None else f"{cap_bits:.0f}bit")
        swarm.wait("the founder to train", lambda: swarm.peers["founder"].status.phase == "training")
        swarm.start("ada", has_text=False)
        swarm.wait("the whole text", lambda: has_all(swarm, "ada"))
        events = swarm.peers["ada"].events("text")
        seconds = events[-1].time - next(event.time for event in events if event.text.startswith("fetching"))
        rate = num_bytes / seconds
        share = "" if cap_bits is None else f", {8 * rate / cap_bits:.0%} of the line"
        print(f"{num_bytes / 1e6:.0f} MB in {seconds:.1f} s: {rate / 1e6:.2f} MB/s{share}")
        if cap_bits is not None:
            assert 8 * rate < 0.6 * cap_bits
