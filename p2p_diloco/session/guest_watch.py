"""Keep a peer within the limits of its machine's owner: look at the clock, the traffic, the sensors and `control.json`
several times a second, and pause, resume or leave accordingly.

What follows from these is decided by `pause_rule` and `disk_rule`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from p2p_diloco.config.settings import PeerSettings
from p2p_diloco.errors import ConfigError, StateError
from p2p_diloco.guest.owner_files import (
    CONTROL_FILE,
    Control,
    MonthTraffic,
    read_control,
    read_traffic,
    write_control,
    write_traffic,
)
from p2p_diloco.guest.pause_rule import RUNS, PauseRules, Situation, judge, month_of
from p2p_diloco.ids import Digest, PeerId
from p2p_diloco.session.ending import StopRequest
from p2p_diloco.session.peer_plan import PeerPlan
from p2p_diloco.status.reporter import StatusReporter
from p2p_diloco.storage.archive import DiskRules, DiskUse, Saving, judge_disk
from p2p_diloco.transport.link import Transport
from p2p_diloco.transport.rate_limit import wire_bytes
from p2p_diloco.wording import format_bytes

LOOK_SECONDS = 0.25
SENSOR_SECONDS = 5.0
SAVE_SECONDS = 10.0
SAVED_SHARE = 0.005
"""The month's traffic is saved at this interval, or once it has grown by this share of the quota: a killed process
forgets at most that much."""
RATE_SECONDS = 10.0
LEAVE_SECONDS = 10.0
"""Time for leaving on request."""
PUBLISH_SECONDS = 1.0


class Guest(Protocol):
    """A running session, as far as limits concern it."""

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint."""

    def set_paused(self, is_paused: bool) -> None:
        """Pause, or run again."""

    def apply_limits(self, settings: PeerSettings) -> None:
        """Take over changed limits."""

    def limit_saving(self, saving: Saving) -> None:
        """Write less to the disk, or all again."""

    def go_offline(self) -> None:
        """Leave the network until the pause is over."""

    def publish(self) -> None:
        """Publish the status now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readings:
    """The latest values of the sensors."""

    on_battery: bool = False
    disk_used: int = 0
    disk_free: int = 0


class _TrafficCount:
    """Counts the month's traffic of one peer, and saves it.

    Attributes:
        month: the month's traffic so far.
        transport: counts the bytes; None while this peer is offline.
    """

    def __init__(self, folder: Path, month: MonthTraffic) -> None:
        self.month = self._saved = month
        self.transport: Transport | None = None
        self._folder = folder
        self._saved_at = asyncio.get_running_loop().time()
        self._counted = (0.0, 0.0)
        self._samples: deque[tuple[float, float]] = deque()

    def follow(self, transport: Transport | None) -> None:
        """Count the bytes of a new transport from now on; None: there is none any more."""
        self.transport, self._counted = transport, (0.0, 0.0)
        self._samples.clear()

    def count(self, month: str, now: float) -> None:
        """Add the bytes since the last call to the month."""
        if self.transport is None:
            return
        up = down = 0.0
        for lane in (self.transport.counters.control, self.transport.counters.bulk):
            up += wire_bytes(lane.bytes_sent, num_frames=lane.frames_sent)
            down += wire_bytes(lane.bytes_received, num_frames=lane.frames_received)
        before, self._counted = self._counted, (up, down)
        self.month = self.month.plus(month, up - before[0], down - before[1])
        self._samples.append((now, up + down))
        while self._samples[0][0] < now - RATE_SECONDS:
            self._samples.popleft()

    def bytes_per_second(self) -> float:
        """Return the latest rate, in both directions."""
        if len(self._samples) < 2:
            return 0.0
        (began, before), (now, moved) = self._samples[0], self._samples[-1]
        return (moved - before) / max(now - began, RATE_SECONDS)  # a burst at the start is no lasting rate

    async def save_if_due(self, now: float, quota: float | None) -> None:
        """Save the month now and then, or once a killed process would forget a noticeable share of the quota."""
        has_grown = quota is not None and self.month.total - self._saved.total >= SAVED_SHARE * quota
        if self.month != self._saved and (now - self._saved_at >= SAVE_SECONDS or has_grown):
            self._saved_at = now
            await self.save()

    async def save(self) -> None:
        self._saved = self.month
        await asyncio.to_thread(write_traffic, self._folder, self._saved)


class GuestWatch:
    """Watches the limits of one peer, online or not.

    Attributes:
        settings: the settings in force: those of the start with the changed limits.
    """

    def __init__(
        self, plan: PeerPlan, *, run: Digest, peer: PeerId, reporter: StatusReporter, stop: StopRequest
    ) -> None:
        """Read what earlier starts have left in the state directory.

        Limits that the settings name win over limits that `p2p-diloco limits` has set before this start.
        """
        self.settings = settings = plan.settings
        self._run, self._peer = run, peer
        self._reporter = reporter
        self._stop = stop
        self._clocks = plan.clocks
        self._sensors = plan.sensors
        # The priority of a user's own program is not changed.
        self._owns_process = plan.training is None or plan.training.owns_process
        self._folder = settings.state_directory
        self._guest: Guest | None = None
        self._signature: tuple[int, ...] | None = None
        self._control = Control()
        self._verdict = RUNS
        self._verdict_changed = asyncio.Event()
        self._saving = Saving.ALL
        self._readings = _Readings()
        self._judged = self._readings
        self._niceness: int | None = None
        self._published_at = float("-inf")
        self._begin()

    def _begin(self) -> None:
        traffic = read_traffic(self._folder)
        if traffic is None:
            self._reporter.report("limits", "the saved traffic of this month is broken; counting from 0")
        self._traffic = _TrafficCount(self._folder, traffic or MonthTraffic())
        try:
            control = read_control(self._folder)
            self._signature = self._file_signature()
            given = self.settings.model_fields_set
            kept = {key: text for key, text in control.limits.items() if key not in given}
            self.settings = self.settings.with_limits(kept, str(self._folder / CONTROL_FILE))
        except (StateError, ConfigError) as error:
            self._reporter.report("limits", str(error))
            return
        self._control = replace(control, limits=kept, leaves=0)
        if self._control != control:
            with contextlib.suppress(StateError):
                self._write_control()

    # -- for the peer

    @property
    def has_asked_for_quota(self) -> bool:
        """Whether the owner has set a monthly quota, or refused to."""
        return self.settings.monthly_quota is not None or "monthly_quota" in self._control.limits

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch within the block; at its end, save the month's traffic."""
        await self._read_sensors()
        await self._look()
        tasks = [asyncio.ensure_future(keep()) for keep in (self._keep_looking, self._keep_sensing)]
        for task in tasks:
            task.add_done_callback(_report_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._count()
            await self._traffic.save()

    async def wait_until_online(self) -> bool:
        """Wait until this peer may be on the network; return False if it is asked to stop before."""
        while not self._verdict.is_online and not self._stop.is_leaving:
            self._reporter.note(phase="paused")
            self._verdict_changed.clear()
            waits = [
                asyncio.ensure_future(wait) for wait in (self._verdict_changed.wait(), self._stop.wait_for_leave())
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()
        return self._verdict.is_online

    def come_online(self, transport: Transport) -> None:
        self._traffic.follow(transport)

    def go_offline(self) -> None:
        """Count the rest of the traffic; the transport has ended."""
        self._count()
        self._traffic.follow(None)

    def attach(self, guest: Guest) -> None:
        """Apply the limits to a session that is about to train, and watch it from now on."""
        self._guest = guest
        guest.apply_limits(self.settings)
        guest.set_paused(self._verdict.is_paused)
        if self._saving is not Saving.ALL:
            guest.limit_saving(self._saving)
        if not self._verdict.is_online:
            guest.go_offline()

    def detach(self) -> None:
        self._guest = None

    def keep_limit(self, key: str, text: str) -> None:
        """Store and apply a limit that the owner has just chosen.

        Raises:
            ConfigError: the text is not a value of that setting.
        """
        self.settings = self.settings.with_limits({key: text}, "the answer")
        self._control = replace(self._control, limits={**self._control.limits, key: text})
        try:
            self._write_control()
        except StateError as error:
            self._reporter.report("limits", str(error))

    # -- looking

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._look()
            await self._traffic.save_if_due(asyncio.get_running_loop().time(), self.settings.monthly_quota)

    async def _keep_sensing(self) -> None:
        while True:
            await asyncio.sleep(SENSOR_SECONDS)
            await self._read_sensors()

    async def _look(self) -> None:
        await self._obey()
        self._count()
        has_changed = self._judge()
        has_changed = self._judge_disk() or has_changed
        now = asyncio.get_running_loop().time()
        self._note_status()
        if self._guest is not None:
            if has_changed:
                self._guest.publish()
        elif has_changed or now - self._published_at >= PUBLISH_SECONDS:
            self._published_at = now
            if self._traffic.transport is None and not self._verdict.is_online:
                self._reporter.publish_offline(self._run, self._peer)

    def _local(self, unix_seconds: float) -> datetime:
        return datetime.fromtimestamp(unix_seconds, tz=UTC).astimezone().replace(tzinfo=None)

    def _judge(self) -> bool:
        settings, now = self.settings, self._local(self._clocks.wall())
        hours, days = settings.schedule
        rules = PauseRules(
            hours=hours,
            days=days,
            pauses_on_battery=settings.on_battery == "pause",
            monthly_quota=settings.monthly_quota,
        )
        control, traffic = self._control, self._traffic.month
        seen = Situation(
            now=now,
            requested=control.pauses,
            requested_until=None if control.pauses_until is None else self._local(control.pauses_until),
            on_battery=self._readings.on_battery,
            month_bytes=traffic.total if traffic.month == month_of(now) else 0.0,
            bytes_per_second=self._traffic.bytes_per_second(),
        )
        before, self._verdict = self._verdict, judge(rules, seen, self._verdict)
        if before == self._verdict:
            return self._reporter.latest.control != control.number
        self._reporter.report("pause", self._verdict.sentence(now) or "running again")
        self._verdict_changed.set()
        if self._guest is not None:
            self._guest.set_paused(self._verdict.is_paused)
            if not self._verdict.is_online:
                self._guest.go_offline()
        return True

    def _note_status(self) -> None:
        verdict, until, traffic = self._verdict, self._verdict.until, self._traffic.month
        self._reporter.note(
            paused=verdict.sentence(self._local(self._clocks.wall())),
            pause_reason=verdict.reason.value if verdict.reason is not None else "",
            paused_until=until.astimezone().timestamp() if until is not None else None,
            limits=self.settings.limit_texts(),
            month=traffic.month,
            month_sent=round(traffic.sent),
            month_received=round(traffic.received),
            disk_saving=self._saving.value,
            control=self._control.number,
        )

    def _count(self) -> None:
        month = month_of(self._local(self._clocks.wall()))
        self._traffic.count(month, asyncio.get_running_loop().time())

    # -- requests

    async def _obey(self) -> None:
        signature = await asyncio.to_thread(self._file_signature)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            control = await asyncio.to_thread(read_control, self._folder)
            before = self._control.limits
            changed = {key: text for key, text in control.limits.items() if before.get(key) != text}
            self.settings = self.settings.with_limits(changed, str(self._folder / CONTROL_FILE))
        except (StateError, ConfigError) as error:
            self._reporter.report("limits", str(error))
            return
        self._control = control
        if changed:
            self._reporter.report("limits", "limits changed: " + ", ".join(f"{k} {v}" for k, v in changed.items()))
            if self._guest is not None:
                self._guest.apply_limits(self.settings)
            await self._set_priority()
        if control.leaves == os.getpid() and not self._stop.is_leaving:
            self._reporter.report("pause", "leaving, as this machine's owner has asked")
            self._stop.leave(within_seconds=LEAVE_SECONDS)

    def _write_control(self) -> None:
        """Write `control.json`, which is then no request."""
        write_control(self._folder, self._control)
        self._signature = self._file_signature()

    def _file_signature(self) -> tuple[int, ...] | None:
        return file_signature(self._folder / CONTROL_FILE)

    # -- the machine

    async def _read_sensors(self) -> None:
        settings, sensors = self.settings, self._sensors
        await self._set_priority()
        battery = await asyncio.to_thread(sensors.on_battery) if settings.on_battery == "pause" else False
        used = free = 0
        if settings.disk_cap is not None or settings.disk_free is not None:
            used = await asyncio.to_thread(sensors.folder_bytes, self._folder)
            free = await asyncio.to_thread(sensors.free_bytes, self._folder)
        self._readings = _Readings(on_battery=battery, disk_used=used, disk_free=free)

    async def _set_priority(self) -> None:
        niceness = self.settings.nice
        if niceness is None or niceness == self._niceness or not self._owns_process:
            return
        self._niceness = niceness
        wrong = await asyncio.to_thread(self._sensors.lower_priority, niceness)
        if wrong:
            self._reporter.report("limits", wrong)

    def _judge_disk(self) -> bool:
        """Decide once per reading what may be written."""
        readings, guest = self._readings, self._guest
        if guest is None or readings is self._judged:
            return False
        self._judged = readings
        rules = DiskRules(cap=self.settings.disk_cap, free=self.settings.disk_free)
        use = DiskUse(
            used=readings.disk_used,
            free=readings.disk_free,
            checkpoint=guest.checkpoint_bytes,
            num_checkpoints=self.settings.keep_checkpoints,
        )
        before, self._saving = self._saving, judge_disk(rules, use, self._saving)
        if before is self._saving:
            return False
        self._reporter.report("disk", _disk_sentence(self._saving, readings))
        guest.limit_saving(self._saving)
        return True


def _report_failure(task: asyncio.Future[None]) -> None:
    """Never fail unseen: without the watch, no limit would be kept."""
    if not task.cancelled() and (error := task.exception()) is not None:
        message = "the watch over the owner's limits has failed"
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


def _disk_sentence(saving: Saving, readings: _Readings) -> str:
    use = f"the state directory takes {format_bytes(readings.disk_used)}, {format_bytes(readings.disk_free)} are free"
    if saving is Saving.ALL:
        return f"writing all checkpoints and entries again; {use}"
    if saving is Saving.NEWEST:
        return f"a limit of the disk is reached: keeping only the newest checkpoint and the entries after it; {use}"
    return (
        f"a limit of the disk is reached: writing no checkpoints and entries; what is on the disk stays, and the run "
        f"continues from memory; {use}; free some space, or raise --disk-cap or lower --disk-free"
    )


def file_signature(path: Path) -> tuple[int, ...] | None:
    """Return what differs after a file was replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
