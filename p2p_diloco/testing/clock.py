"""A machine's two clocks: a monotonic one that only goes on, and a wall clock that can be wrong, be set, and drift."""

from __future__ import annotations


class MachineClock:
    """Maps the simulation's true seconds to what a machine reads.

    The monotonic clock counts from the boot of the machine, at the rate of its quartz, and stands still while the
    machine sleeps (not while a process is only stopped). The wall clock runs on through sleep and boot.

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
        self._asleep_at: float | None = None
        self._set_at = boot

    def monotonic(self, true: float) -> float:
        """Return what `time.monotonic` says."""
        upto = true if self._asleep_at is None else self._asleep_at
        return self._base + (upto - self._since) * (1.0 + self.drift)

    def true_at(self, local: float, true: float) -> float:
        """Return when the monotonic clock will show `local`, should the machine not sleep, or when it has."""
        return true + (local - self.monotonic(true)) / (1.0 + self.drift)

    def wall(self, true: float) -> float:
        """Return what `time.time` says."""
        return true + self.wall_offset + (true - self._set_at) * self.drift

    def set_wall(self, true: float, offset: float) -> None:
        """Set the wall clock so far ahead of true time, as a person or a time service does."""
        self.wall_offset, self._set_at = offset, true

    def jump(self, true: float, seconds: float) -> None:
        """Set both clocks forward, as nothing that a program can see: so a broken quartz would look."""
        self._base, self._since = self.monotonic(true) + seconds, true
        self.wall_offset += seconds

    def sleep(self, true: float) -> None:
        """Suspend the machine."""
        if self._asleep_at is None:
            self._asleep_at = true

    def wake(self, true: float) -> None:
        """End the suspension: the monotonic clock goes on where it stood."""
        if self._asleep_at is not None:
            self._base = self.monotonic(true)
            self._since, self._asleep_at = true, None

    def boot(self, true: float) -> None:
        """Switch the machine off and on: the monotonic clock begins at 0 again."""
        self._base, self._since, self._asleep_at = 0.0, true, None
