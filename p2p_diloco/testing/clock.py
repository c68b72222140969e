"""A machine's clocks: a monotonic one that only goes on, and a wall clock that can be wrong, be set, and drift."""

from __future__ import annotations


class MachineClock:
    """Maps the simulation's true seconds to what a machine reads.

    The monotonic clock counts from the boot of the machine, at the rate of its quartz, and stands still while the
    machine sleeps (not while a process is only stopped). The boot-time clock is the same one with the sleep counted.
    The wall clock runs on through sleep and boot. In a pause, as a hypervisor pauses a virtual machine, all three
    stand still.

    Args:
        boot: true seconds at which the machine was switched on.
        drift: seconds per second by which both clocks run fast.
        wall_offset: how far the wall clock is ahead of true Unix time.
    """

    def __init__(self, boot: float, *, drift: float = 0.0, wall_offset: float = 0.0) -> None:
        self.key = boot
        """A number of its own: no two machines were switched on at one moment."""
        self.drift = drift
        self.wall_offset = wall_offset
        self._since = boot
        self._base = 0.0
        self._slept = 0.0
        self._asleep_at: float | None = None
        self._is_paused = False
        self._set_at = boot

    def monotonic(self, true: float) -> float:
        """Return what `time.monotonic` says."""
        upto = true if self._asleep_at is None else self._asleep_at
        return self._base + (upto - self._since) * (1.0 + self.drift)

    def boottime(self, true: float) -> float:
        """Return what `CLOCK_BOOTTIME` says, where a system has it."""
        asleep = true - self._asleep_at if self._asleep_at is not None and not self._is_paused else 0.0
        return self.monotonic(true) + (self._slept + asleep) * (1.0 + self.drift)

    def true_at(self, local: float, true: float) -> float:
        """Return when the monotonic clock will show `local`, should the machine not sleep, or when it has."""
        return true + (local - self.monotonic(true)) / (1.0 + self.drift)

    def wall(self, true: float) -> float:
        """Return what `time.time` says."""
        upto = self._asleep_at if self._asleep_at is not None and self._is_paused else true
        return upto + self.wall_offset + (upto - self._set_at) * self.drift

    def set_wall(self, true: float, offset: float) -> None:
        """Set the wall clock so far ahead of true time, as a person or a time service does."""
        self.wall_offset, self._set_at = offset, true

    def jump(self, true: float, seconds: float) -> None:
        """Set all clocks forward, as nothing that a program can see: so a broken quartz would look.

        Never back: no system lets a monotonic clock go back, and a program that has timers would hang if one did. A
        machine whose clocks are behind unnoticed was paused.
        """
        assert seconds >= 0.0, "a monotonic clock never goes back; pause the machine, or set its wall clock"
        self._base, self._since = self.monotonic(true) + seconds, true
        self.wall_offset += seconds

    def sleep(self, true: float) -> None:
        """Suspend the machine."""
        if self._asleep_at is None:
            self._asleep_at = true

    def pause(self, true: float) -> None:
        """Stop the machine and all its clocks, as a hypervisor does with a virtual machine."""
        if self._asleep_at is None:
            self._asleep_at, self._is_paused = true, True

    def wake(self, true: float) -> None:
        """End the suspension or the pause: the clocks that stood still go on from there."""
        if self._asleep_at is None:
            return
        seconds = true - self._asleep_at
        self._base = self.monotonic(true)
        if self._is_paused:
            self.wall_offset -= seconds
            self._set_at += seconds
        else:
            self._slept += seconds
        self._since, self._asleep_at, self._is_paused = true, None, False

    def boot(self, true: float) -> None:
        """Switch the machine off and on: the monotonic clock begins at 0 again."""
        self.wake(true)
        self._base, self._since, self._slept = 0.0, true, 0.0
