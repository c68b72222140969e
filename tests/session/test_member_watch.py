"""Peers remember the members of a run, and count the same tokens for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from session_stage import SessionStage, Watcher
from small_run import peer_key

from p2p_diloco.protocol.round import credit
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.storage import member_files
from p2p_diloco.storage.member_files import CREDIT_FILE, MEMBERS_FILE, read_credit, read_members

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: Patch) -> None:
    for module in (credit, member_files):
        monkeypatch.setattr(module, "BLOCK_CYCLES", 3)


async def play(stage: SessionStage, *names: str, until_round: int, **choices: Any) -> dict[str, Watcher]:
    watchers = {name: Watcher() for name in names}
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            founds = {"founds": True, "trains": False} if name == "boot" else {}
            playing = stage.play(name, watchers[name], StopRequest(), until_round=until_round, **founds, **choices)
            tasks.create_task(playing, name=name)
    return watchers


def complete_sums(saved: credit.SavedCredit) -> dict[int, dict[Any, int]]:
    return {number: block.sums for number, block in saved.blocks.items() if saved.is_complete(number)}


@pytest.mark.slow
async def test_all_peers_count_the_same_tokens_in_every_block(tmp_path: Path) -> None:
    stage = SessionStage(tmp_path)
    await play(stage, "boot", "ada", "ben", until_round=24)
    counted = {name: complete_sums(read_credit(stage.run_folder(name).path)) for name in ("boot", "ada", "ben")}
    assert set(counted["ada"]) == {0, 1, 2}
    assert counted["ada"] == counted["ben"] == counted["boot"]
    tokens = [sum(block.values()) for block in counted["ada"].values()]
    assert min(tokens) > 0
    assert set(counted["ada"][1]) == {peer_key("ada").peer, peer_key("ben").peer}


@pytest.mark.slow
async def test_a_newcomer_counts_the_same_from_its_first_whole_block_on_and_says_what_it_lacks(tmp_path: Path) -> None:
    stage = SessionStage(tmp_path)

    async def join_late() -> None:
        await stage.sleep_to(9)
        await play(stage, "cleo", until_round=36)

    joining = asyncio.ensure_future(join_late())
    await play(stage, "boot", "ada", "ben", until_round=36)
    await joining
    early, late = (read_credit(stage.run_folder(name).path) for name in ("ada", "cleo"))
    assert min(late.blocks) == 1
    assert late.blocks[1].missing
    assert not late.is_complete(1)
    both = complete_sums(early).keys() & complete_sums(late).keys()
    assert len(both) >= 2
    assert {number: complete_sums(early)[number] for number in both} == {
        number: complete_sums(late)[number] for number in both
    }
    assert peer_key("cleo").peer in complete_sums(late)[max(both)]


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_restarted_peer_goes_on_counting_as_if_it_had_not_ended(tmp_path: Path, is_killed: bool) -> None:
    stage = SessionStage(tmp_path)

    async def end_and_return() -> None:
        stop, watcher = StopRequest(), Watcher()
        playing = asyncio.ensure_future(stage.play("ada", watcher, stop))
        await stage.sleep_to(9)
        kept = (stage.run_folder("ada").path / CREDIT_FILE).read_bytes()
        await stage.sleep_to(14, 4.0)
        stop.leave()
        await playing
        if is_killed:  # then it has saved nothing since
            (stage.run_folder("ada").path / CREDIT_FILE).write_bytes(kept)
        await play(stage, "ada", until_round=40)

    returning = asyncio.ensure_future(end_and_return())
    await play(stage, "boot", "ben", "cleo", until_round=40)
    await returning
    ada, ben = (complete_sums(read_credit(stage.run_folder(name).path)) for name in ("ada", "ben"))
    assert set(ben) == {0, 1, 2, 3, 4, 5}
    assert ada == ben


@pytest.mark.slow
async def test_members_are_remembered_with_what_became_of_them(tmp_path: Path) -> None:
    stage, stop = SessionStage(tmp_path), StopRequest()

    async def leave_early() -> None:
        await stage.sleep_to(12)
        stop.leave()

    leaving = asyncio.ensure_future(leave_early())
    playing = asyncio.ensure_future(stage.play("cleo", Watcher(), stop))
    watchers = await play(stage, "boot", "ada", "ben", until_round=30)
    await asyncio.gather(leaving, playing)
    members = read_members(stage.run_folder("ben").path)
    found = {record.peer: record for record in members.records}
    ada, ben, cleo, boot = (found[peer_key(name).peer] for name in ("ada", "ben", "cleo", "boot"))
    assert cleo.state == "left"
    assert ben.state in ("member", "left"), "it ends itself"
    assert boot.since <= ada.since <= stage.begin(12)
    assert ada.tokens == watchers["ada"].last.tokens
    assert 0.0 < cleo.hours < ben.hours < (stage.begin(31) - stage.begin(0)) / 3600
    assert cleo.last_seen is not None
    assert ben.last_seen is not None
    assert cleo.last_seen < ben.last_seen - 60.0


@pytest.mark.parametrize("name", [CREDIT_FILE, MEMBERS_FILE])
async def test_a_broken_file_is_reported_and_written_anew(tmp_path: Path, name: str) -> None:
    stage = SessionStage(tmp_path)
    (stage.run_folder("ada").path / name).write_text('{"blocks": 3')
    watcher = Watcher()
    await stage.play("ada", watcher, StopRequest(), founds=True, until_round=3)
    (text,) = watcher.texts("members")
    assert name in text
    assert "is broken" in text
    assert read_members(stage.run_folder("ada").path).records
    assert read_credit(stage.run_folder("ada").path).blocks
