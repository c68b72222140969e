"""A text that is fetched over lines that averaging fills delays no averaging, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from session_stage import Watcher, run_stage
from test_start import PeerStage, addresses_of_the_memory_network, shared_by  # noqa: F401  # a fixture

from p2p_diloco.app.training.built_in import BuiltInTraining
from p2p_diloco.ids import PeerId
from p2p_diloco.node.text_exchange import TextUpload
from p2p_diloco.protocol.files.fetch import Fetch
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.start import run_peer

CAP_BITS = 300e3
"""The run needs 207 kbit/s of each line."""
ROUND_SECONDS = 4.0
BEFORE, DURING = range(34, 46), range(46, 58)
WIDE = {"model.width": 96, "model.feed_forward": 256, "rounds.round_seconds": ROUND_SECONDS}


def participation(watcher: Watcher, rounds: range) -> float:
    """Return the share of contributions of ready members that were included in these rounds, as a peer closed them."""
    closed = [event.figures for event in watcher.events if event.topic == "round"]
    counted = [figures for figures in closed if int(figures["round"]) in rounds]
    assert len(counted) == len(rounds)
    possible = sum(int(figures["num_ready"]) * int(figures["num_spans"]) for figures in counted)
    return sum(int(figures["num_included"]) for figures in counted) / possible


@pytest.mark.long
def test_a_text_that_is_fetched_over_full_lines_delays_no_averaging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fetch = [False]
    honest = Fetch.asks
    monkeypatch.setattr(Fetch, "asks", lambda self, now: honest(self, now) if may_fetch[0] else [])
    sent_bytes: list[int] = []
    count = TextUpload.sent

    def sent(self: TextUpload, peer: PeerId, num_bytes: int, now: float, rate: float) -> None:
        sent_bytes.append(num_bytes)
        count(self, peer, num_bytes, now, rate)

    monkeypatch.setattr(TextUpload, "sent", sent)

    async def scene(stage: PeerStage) -> None:
        stage.text.write_bytes(stage.text.read_bytes() * 16)
        signed = shared_by(stage.text, **WIDE)
        watchers = {name: Watcher() for name in ("boot", "ada", "ben")}
        last = DURING.stop
        plan = stage.founder(signed=signed, until_round=last, training=BuiltInTraining(evaluate_seconds=0.0))
        plan = replace(plan, settings=stage.settings("boot", max_upload=CAP_BITS))
        running = [asyncio.ensure_future(run_peer(plan, watchers["boot"], StopRequest()))]
        invite = await stage.invite(watchers["boot"])
        for name, copy in (("ada", {"data": None}), ("ben", {})):
            plan = stage.joiner(name, invite, until_round=last)
            plan = replace(plan, settings=stage.settings(name, max_upload=CAP_BITS, **copy))
            running.append(asyncio.ensure_future(run_peer(plan, watchers[name], StopRequest())))
        begin = signed.manifest.rounds.clock_start + DURING.start * ROUND_SECONDS
        await asyncio.sleep(begin - asyncio.get_running_loop().time())
        assert watchers["ada"].last.phase == "not stepping"
        may_fetch[0] = True
        await asyncio.gather(*running)
        before, during = (participation(watchers["boot"], rounds) for rounds in (BEFORE, DURING))
        assert before == pytest.approx(2 / 3), "two of three have steps to contribute, and all of theirs is included"
        assert during >= before
        share = sum(sent_bytes) / (2 * len(DURING) * ROUND_SECONDS * CAP_BITS / 8)
        print(f"participation {before:.3f} before, {during:.3f} while {share:.0%} of two lines carries the text")
        assert share > 0.1
        assert watchers["ada"].texts("text")[0].startswith("fetching 630.0 kB of the run's text")

    async def staged() -> None:
        await scene(PeerStage(tmp_path, monkeypatch, asyncio.get_running_loop()))

    run_stage(monkeypatch, staged)
