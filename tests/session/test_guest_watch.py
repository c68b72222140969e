"""A peer keeps its owner's limits: whole peers on a memory network in virtual time, with replaced sensors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from session_stage import Watcher
from small_run import CLOCK_START, ORGANISER, small_manifest
from test_start import SIGNED, PeerStage

from p2p_diloco.config.manifest import SignedManifest
from p2p_diloco.errors import ConfigError
from p2p_diloco.guest.owner_files import (
    Control,
    MonthTraffic,
    new_number,
    read_control,
    read_traffic,
    write_control,
    write_traffic,
)
from p2p_diloco.guest.sensors import Sensors
from p2p_diloco.ids import format_peer_id
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.peer_plan import Clocks, PeerPlan
from p2p_diloco.session.start import PeerResult, Refused, run_peer
from p2p_diloco.testing.network import MemoryTransport


def local(*parts: int) -> datetime:
    """Return a local time without a zone."""
    return datetime(*parts)  # type: ignore[arg-type, misc]  # noqa: DTZ001


ROUND_SECONDS = 8.0
THURSDAY_NOON = local(2026, 11, 26, 12)


@pytest.fixture(autouse=True)
def _addresses_of_the_memory_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def listen_addresses(self: MemoryTransport) -> tuple[str, ...]:
        return (f"/ip4/127.0.0.1/tcp/1/p2p/{format_peer_id(self.peer)}",) if self.can_be_dialled() else ()

    monkeypatch.setattr(MemoryTransport, "listen_addresses", listen_addresses)


class Machine:
    """The sensors and the wall clock of one peer's machine."""

    def __init__(self, begin: datetime) -> None:
        self.battery = False
        self.used, self.free = 0, 10**12
        self.niceness: list[int] = []
        loop_time = asyncio.get_running_loop().time
        self._begin = begin.astimezone(UTC).timestamp() - loop_time()
        self.clocks = Clocks(steady=loop_time, wall=lambda: self._begin + loop_time())
        self.sensors = Sensors(
            on_battery=lambda: self.battery,
            folder_bytes=lambda folder: self.used,
            free_bytes=lambda folder: self.free,
            lower_priority=self._lower_priority,
        )

    def _lower_priority(self, niceness: int) -> str:
        self.niceness.append(niceness)
        return ""


class Guest:
    """A peer that trains on a machine with limits."""

    def __init__(self, plan: PeerPlan, machine: Machine, **limits: Any) -> None:
        self.machine = machine
        self.watcher, self.stop = Watcher(), StopRequest()
        self.folder = plan.settings.state_directory
        # Settings that are named count as given by the owner, as flags do.
        settings = type(plan.settings).model_validate({**plan.settings.model_dump(exclude_unset=True), **limits})
        self._plan = replace(plan, settings=settings, clocks=machine.clocks, sensors=machine.sensors)
        self.task: asyncio.Task[PeerResult] = asyncio.ensure_future(run_peer(self._plan, self.watcher, self.stop))

    @property
    def steps(self) -> int:
        """Number of steps at this moment; the status shows it up to two seconds later."""
        training = self._plan.training
        return training.state.progress().steps if training is not None and training.state is not None else 0

    async def until(self, what: Callable[[], bool], seconds: float = 60.0) -> float:
        """Wait until something is so; return how long it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not what():
            assert loop.time() - began < seconds, f"{self.watcher.last} {self.watcher.events}"
            assert not self.task.done(), self.task.result()
            await asyncio.sleep(0.05)
        return loop.time() - began

    async def until_training(self) -> None:
        await self.until(lambda: bool(self.watcher.statuses) and self.watcher.last.phase == "training")
        await self.until(lambda: self.steps > 0)

    def ask(self, **asked: Any) -> str:
        """Write `control.json` as the commands do."""
        number = new_number()
        write_control(self.folder, replace(read_control(self.folder), number=number, **asked))
        return number


@asynccontextmanager
async def guests(
    stage: PeerStage, begin: datetime = THURSDAY_NOON, *, signed: SignedManifest = SIGNED, **limits: Any
) -> AsyncIterator[tuple[Guest, Guest, Watcher]]:
    """Run a bootstrap peer, a guest with these limits and one without any."""
    boot, stop = Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(signed=signed), boot, stop))
    invite = await stage.invite(boot)
    free = Guest(stage.joiner("bob", invite, until_round=None), Machine(begin))
    guest = Guest(stage.joiner("ada", invite, until_round=None), Machine(begin), **limits)
    try:
        yield guest, free, boot
    finally:
        for each in (guest, free):
            each.stop.stop_now()
        await asyncio.gather(guest.task, free.task, return_exceptions=True)
        stop.stop_now()
        await founder


@pytest.fixture
def stage(runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PeerStage:
    return PeerStage(tmp_path, monkeypatch, runner.get_loop())


@pytest.mark.long
async def test_a_paused_peer_makes_no_step_within_two_seconds_and_follows_the_run(stage: PeerStage) -> None:
    async with guests(stage) as (guest, free, _):
        await guest.until_training()
        await free.until_training()
        await asyncio.sleep(6 * ROUND_SECONDS)
        number = guest.ask(pauses=True, pauses_until=None)
        assert await guest.until(lambda: guest.watcher.last.control == number) < 2.0
        last = guest.watcher.last
        assert (last.paused, last.pause_reason) == ("paused until resume (asked)", "asked")
        steps, sent = guest.steps, last.bytes_sent
        await asyncio.sleep(10 * ROUND_SECONDS)
        paused = guest.watcher.last
        assert (paused.inner_steps, paused.phase, paused.trouble) == (steps, "paused", "")
        assert paused.entries_absorbed > last.entries_absorbed + 8, "it follows"
        assert paused.log_digest == free.watcher.last.log_digest
        sent_by_other = free.watcher.last.bytes_sent.vectors
        assert paused.bytes_sent.transfer == sent.transfer
        seen = next(line for line in free.watcher.last.peers if line.peer == paused.peer)
        assert (seen.ready, seen.tokens_per_second, seen.reachable) == (False, 0.0, False)
        assert not [text for text in free.watcher.texts("missing") if paused.peer[-4:] in text][1:]
        # What it had promised to average is finished; then it sends next to nothing.
        await asyncio.sleep(4 * ROUND_SECONDS)
        later = guest.watcher.last.bytes_sent.vectors - paused.bytes_sent.vectors
        by_other = free.watcher.last.bytes_sent.vectors - sent_by_other
        assert later < by_other / 4, (later, by_other)
        guest.ask(pauses=False)
        assert await guest.until(lambda: guest.steps > steps) < 2.0
        await guest.until(lambda: guest.watcher.last.phase == "training")
        await asyncio.sleep(6 * ROUND_SECONDS)
        assert guest.watcher.last.trouble == ""
        seen = next(line for line in free.watcher.last.peers if line.peer == paused.peer)
        assert seen.ready
        assert guest.watcher.texts("pause") == ["paused until resume (asked)", "running again"]


async def test_a_pause_ends_by_itself_and_survives_a_restart(stage: PeerStage) -> None:
    folder = stage.settings("ada").state_directory
    folder.mkdir()
    end = (THURSDAY_NOON + timedelta(seconds=60)).astimezone(UTC).timestamp()
    write_control(folder, Control(number="1", pauses=True, pauses_until=end, leaves=1))
    async with guests(stage) as (guest, _, _):
        await guest.until(lambda: bool(guest.watcher.statuses) and guest.watcher.last.ready, 50.0)
        assert (guest.watcher.last.pause_reason, guest.watcher.last.paused_until, guest.steps) == ("asked", end, 0)
        await guest.until(lambda: guest.steps > 0, 62.0)
        assert guest.machine.clocks.wall() >= end
        assert read_control(folder).leaves == 0


async def test_hours_pause_and_resume_a_peer(stage: PeerStage) -> None:
    begin = THURSDAY_NOON.replace(minute=59)
    async with guests(stage, begin, hours="09:00-13:00") as (guest, _, _):
        await guest.until_training()
        await guest.until(lambda: guest.watcher.last.phase == "paused", 80.0)
        assert guest.machine.clocks.wall() == pytest.approx(
            begin.replace(hour=13, minute=0).astimezone(UTC).timestamp(), abs=1.5
        )
        assert guest.watcher.last.paused == "paused until fri 09:00 (hours)"
        guest.ask(limits={"hours": "none"})
        assert await guest.until(lambda: guest.watcher.last.phase == "training") < 2.5


async def test_a_battery_pauses_a_peer_whose_owner_wants_it(stage: PeerStage) -> None:
    async with guests(stage, on_battery="pause") as (guest, free, _):
        await guest.until_training()
        guest.machine.battery = free.machine.battery = True
        assert await guest.until(lambda: guest.watcher.last.paused == "paused (battery)") < 6.0
        guest.machine.battery = False
        assert await guest.until(lambda: guest.watcher.last.paused == "") < 6.0
        assert free.watcher.texts("pause") == []


def used(guest: Guest) -> float:
    traffic = read_traffic(guest.folder)
    assert traffic is not None
    return traffic.total


@pytest.mark.long
async def test_a_quota_is_kept_over_a_month_and_the_peer_returns_in_the_next(stage: PeerStage) -> None:
    """The month that ends here is minutes long: it begins with a nearly spent quota."""
    folder = stage.settings("ada").state_directory
    folder.mkdir()
    quota = 3e6
    before = MonthTraffic(month="2026-11", sent=quota - 400e3, received=0.0)
    write_traffic(folder, before)
    begin = local(2026, 11, 30, 23, 56)
    async with guests(stage, begin, monthly_quota="3MB") as (guest, free, _):
        await guest.until_training()
        await guest.until(lambda: guest.watcher.last.pause_reason == "monthly quota", 200.0)
        await guest.until(lambda: not guest.watcher.last.peers, 30.0)
        offline = guest.watcher.last
        assert offline.paused == "paused until 00:00 (monthly quota)"
        assert offline.state_digest == "", "it goes on later, with other bytes"
        spent = used(guest)
        assert 0.95 * quota <= offline.month_sent + offline.month_received <= quota
        await guest.until(lambda: guest.machine.clocks.wall() > begin.astimezone(UTC).timestamp() + 235.0, 235.0)
        assert used(guest) == pytest.approx(offline.month_sent + offline.month_received, rel=1e-3)
        assert used(guest) >= spent
        assert guest.watcher.last.paused == offline.paused
        assert offline.peer not in [line.peer for line in free.watcher.last.peers if line.row is not None]
        await guest.until(lambda: guest.watcher.last.phase == "training", 300.0)
        assert guest.watcher.last.month == "2026-12"
        assert used(guest) < 0.2 * quota
        await asyncio.sleep(4 * ROUND_SECONDS)
        assert guest.watcher.last.log_digest == free.watcher.last.log_digest
        assert guest.watcher.last.incarnation > offline.incarnation


async def test_a_peer_that_starts_with_a_spent_quota_contacts_nobody(stage: PeerStage) -> None:
    folder = stage.settings("ada").state_directory
    folder.mkdir()
    write_traffic(folder, MonthTraffic(month="2026-11", sent=600e6, received=500e6))
    async with guests(stage, monthly_quota="1GB") as (guest, _, _):
        await asyncio.sleep(30.0)
        assert (guest.watcher.last.phase, guest.watcher.last.incarnation) == ("paused", 0)
        assert guest.watcher.last.paused == "paused until tue 00:00 (monthly quota)"
        assert len(stage.asked) == 2, "it opened no transport"
        guest.ask(limits={"monthly_quota": "none"})
        await guest.until_training()


async def test_limits_change_while_a_peer_runs(stage: PeerStage) -> None:
    async with guests(stage, max_upload="20mbit") as (guest, _, _):
        await guest.until_training()
        assert guest.watcher.last.limits == {"max_upload": "20000kbit"}
        number = guest.ask(limits={"max_upload": "5mbit", "max_download": "10mbit", "nice": "7"})
        await guest.until(lambda: guest.watcher.last.control == number, 2.0)
        await guest.until(lambda: guest.watcher.last.max_upload == 5e6, 2.0)
        last = guest.watcher.last
        assert (last.max_download, last.limits["nice"]) == (10e6, "7")
        assert guest.machine.niceness == [7]
        assert "upload is now capped at 5 Mbit/s" in guest.watcher.texts("cap")
        number = guest.ask(limits={"max_upload": "none", "max_download": "10mbit", "nice": "7"})
        await guest.until(lambda: guest.watcher.last.control == number, 2.0)
        await guest.until(lambda: guest.watcher.last.max_upload is None, 2.0)
        guest.ask(limits={"hours": "never"})
        await asyncio.sleep(1.0)
        assert "it is 'never'; expected two different times" in guest.watcher.texts("limits")[-1]
        assert guest.watcher.last.limits.get("hours") is None


async def test_kept_limits_hold_at_the_next_start_unless_a_flag_names_them(stage: PeerStage) -> None:
    folder = stage.settings("ada").state_directory
    folder.mkdir()
    write_control(folder, Control(number="1", limits={"max_upload": "5mbit", "max_download": "10mbit"}))
    async with guests(stage, max_upload="20mbit") as (guest, _, _):
        await guest.until_training()
        assert guest.watcher.last.limits == {"max_upload": "20000kbit", "max_download": "10000kbit"}
        assert stage.asked[-1]["limits"].download_bytes_per_second == 10e6 / 8
        assert read_control(folder).limits == {"max_download": "10mbit"}, "the flag replaces what was kept"


async def test_a_broken_control_file_is_reported_and_changes_nothing(stage: PeerStage) -> None:
    async with guests(stage) as (guest, _, _):
        await guest.until_training()
        (guest.folder / "control.json").write_text("{")
        await asyncio.sleep(2.0)
        assert len([text for text in guest.watcher.texts("limits") if "control.json is broken" in text]) == 1
        assert guest.watcher.last.phase == "training"


async def test_the_owner_is_asked_once_for_a_quota_and_the_answer_is_kept(stage: PeerStage) -> None:
    asked: list[tuple[str, float]] = []

    def answer(sentence: str, month_bytes: float) -> str:
        asked.append((sentence, month_bytes))
        return "77GB"

    boot, stop = Watcher(), StopRequest()
    founder = asyncio.ensure_future(run_peer(stage.founder(), boot, stop))
    invite = await stage.invite(boot)
    for until_round in (1, 4):
        ada = Watcher()
        plan = replace(stage.joiner("ada", invite, until_round), ask_quota=answer)
        await run_peer(plan, ada, StopRequest())
        assert ada.last.limits == {"monthly_quota": "77000MB"}
    assert read_control(stage.settings("ada").state_directory).limits == {"monthly_quota": "77GB"}
    stop.stop_now()
    await founder
    ((sentence, month_bytes),) = asked
    assert sentence.startswith("at full rate this run sends up to ")
    assert sentence.endswith(" in 30 days")
    assert month_bytes > 0


def checkpoints(guest: Guest) -> list[str]:
    return sorted(path.name for path in guest.folder.glob("*/checkpoint-*.safetensors"))


async def test_a_peer_writes_less_at_a_limit_of_the_disk_and_loses_nothing(stage: PeerStage) -> None:
    often = small_manifest({"rounds.retained_cycles": 4}).sign(ORGANISER)
    limits = {"disk_cap": "1GB", "disk_free": "1GB", "keep_checkpoints": 2}
    async with guests(stage, signed=often, **limits) as (guest, free, _):
        await guest.until_training()
        await guest.until(lambda: len(checkpoints(guest)) == 2, 100.0)
        guest.machine.used = 10**9
        assert await guest.until(lambda: guest.watcher.last.disk_saving == "only the newest checkpoint") < 7.0
        newest = checkpoints(guest)[-1:]
        assert await guest.until(lambda: guest.watcher.last.disk_saving == "nothing") < 7.0
        assert checkpoints(guest) == newest
        entries = sorted((path, path.stat().st_size) for path in guest.folder.glob("*/entries/*"))
        await asyncio.sleep(60.0)
        assert checkpoints(guest) == newest
        assert sorted((path, path.stat().st_size) for path in guest.folder.glob("*/entries/*")) == entries
        assert guest.watcher.last.log_digest == free.watcher.last.log_digest, "the run goes on from memory"
        guest.machine.used = 0
        assert await guest.until(lambda: guest.watcher.last.disk_saving == "all") < 7.0
        await guest.until(lambda: checkpoints(guest) > newest, 20.0)
        assert len(guest.watcher.texts("disk")) == 3


async def test_a_request_to_leave_ends_the_peer_within_ten_seconds_of_a_long_round(stage: PeerStage) -> None:
    minutes = small_manifest({"rounds.round_seconds": 60.0})
    async with guests(stage, signed=minutes.sign(ORGANISER)) as (guest, _, _):
        await guest.until_training()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(60.0 - (loop.time() - CLOCK_START) % 60.0)
        began = loop.time()
        guest.ask(leaves=os.getpid())
        result = await guest.task
        assert loop.time() - began < 10.0
        assert guest.watcher.last.phase == "finished"
        assert result.state_digest != ""


@pytest.mark.long
async def test_a_peer_that_cannot_return_after_a_spent_quota_is_not_refused_like_a_new_one(
    stage: PeerStage, tmp_path: Path
) -> None:
    """A command that is `Refused` removes the identity and the manifest, because nothing was started."""
    copy = tmp_path / "copy.txt"
    copy.write_bytes(stage.text.read_bytes())
    folder = stage.settings("ada").state_directory
    folder.mkdir()
    write_traffic(folder, MonthTraffic(month="2026-11", sent=2.6e6, received=0.0))
    begin = local(2026, 11, 30, 23, 56)
    async with guests(stage, begin, monthly_quota="3MB", data=str(copy)) as (guest, _, _):
        await guest.until_training()
        await guest.until(lambda: guest.watcher.last.pause_reason == "monthly quota", 200.0)
        copy.unlink()
        await asyncio.wait({guest.task}, timeout=600.0)
        error = guest.task.exception()
        assert isinstance(error, ConfigError)
        assert not isinstance(error, Refused)
        assert "copy.txt does not exist" in str(error)
