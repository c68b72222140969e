"""A machine's clocks: a monotonic clock, and a wall clock that can be wrong, be set, and drift."""

from __future__ import annotations


class MachineClock:
    """Maps the simulation's true time to the readings of a machine's clocks.

    The monotonic clock counts from boot, at the rate of the machine's quartz. It stops while the machine sleeps, but
    not while only a process is stopped. The boot-time clock is the same clock with sleep counted. The wall clock keeps
    running through sleep and reboot. A pause, as when a hypervisor pauses a virtual machine, stops all three.

    Args:
        boot: true time at which the machine was switched on, in seconds.
        drift: seconds per second by which both clocks run fast.
        wall_offset: seconds by which the wall clock is ahead of true Unix time.
    """

    def __init__(self, boot: float, *, drift: float = 0.0, wall_offset: float = 0.0) -> None:
        self.key = boot
        """Number that identifies the machine: no two machines are switched on at the same moment."""
        self.drift = drift
        self.wall_offset = wall_offset
        self._since = boot
        self._base = 0.0
        self._slept = 0.0
        self._asleep_at: float | None = None
        self._is_paused = False
        self._set_at = boot

    def monotonic(self, true: float) -> float:
        """Return what `time.monotonic` would return."""
        upto = true if self._asleep_at is None else self._asleep_at
        return self._base + (upto - self._since) * (1.0 + self.drift)

    def boottime(self, true: float) -> float:
        """Return what `CLOCK_BOOTTIME` would show, on systems that have it."""
        asleep = true - self._asleep_at if self._asleep_at is not None and not self._is_paused else 0.0
        return self.monotonic(true) + (self._slept + asleep) * (1.0 + self.drift)

    def true_at(self, local: float, true: float) -> float:
        """Return the true time at which the monotonic clock shows `local`, past or future, assuming no sleep."""
        return true + (local - self.monotonic(true)) / (1.0 + self.drift)

    def wall(self, true: float) -> float:
        """Return what `time.time` would return."""
        upto = self._asleep_at if self._asleep_at is not None and self._is_paused else true
        return upto + self.wall_offset + (upto - self._set_at) * self.drift

    def set_wall(self, true: float, offset: float) -> None:
        """Set the wall clock `offset` seconds ahead of true time, as a person or a time service does."""
        self.wall_offset, self._set_at = offset, true

    def jump(self, true: float, seconds: float) -> None:
        """Set all clocks forward without any sign that a program could notice, as a broken quartz would.

        Clocks never jump back: no system lets a monotonic clock go back, and a program with timers would hang if one
        did. To put clocks behind unnoticed, pause the machine.
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
        """End the suspension or pause; stopped clocks continue from where they stopped."""
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
        """Switch the machine off and on: the monotonic clock restarts at 0."""
        self.wake(true)
        self._base, self._since, self._slept = 0.0, true, 0.0
