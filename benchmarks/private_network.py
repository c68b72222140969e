"""Network with only a loopback interface for the processes of one system, so that it counts only their bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from types import TracebackType
from typing import Self

_ENTER = {"": ("--net",), "user": ("--net", "--user", "--preserve-credentials")}
_LEAVE = {"": ("--net",), "user": ("--net", "--user", "--map-root-user")}
_READY_SECONDS = 5.0


class PrivateNetwork:
    """A network namespace if this machine lets us create one; otherwise the machine's own network.

    Args:
        within: a private network whose user may also enter this one and connect the two.
    Attributes:
        is_private: whether this is a namespace that we created.
        interface: name of the interface that connects the processes.
    """

    interface = "lo"

    def __init__(self, within: PrivateNetwork | None = None) -> None:
        self.is_private = False
        self._within = within
        self.kind = ""
        self._holder: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        tools = ("unshare", "nsenter", "ip")
        # Try as root first, then as any user if the kernel permits user namespaces.
        kinds = _LEAVE if self._within is None else [self._within.kind]
        for kind in kinds if all(map(shutil.which, tools)) else ():
            self.kind = kind
            # `cat` ends when the pipe closes, so it never outlives this process.
            self._holder = subprocess.Popen(
                [*self._leave(kind), "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            if self._has_come_about() and self._is_up():
                self.is_private = True
                return self
            self._close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def entrance(self) -> tuple[str, ...]:
        """Command prefix that runs a command in this network."""
        if self._holder is None:
            return ()
        return ("nsenter", "--target", str(self._holder.pid), *_ENTER[self.kind])

    def entrance_of(self, place: int) -> tuple[str, ...]:
        """Return the command prefix of the peer at `place`: the same for all, as they share this network."""
        return self.entrance

    @property
    def pid(self) -> int:
        """Id of a process in this network."""
        return self._holder.pid if self._holder is not None else os.getpid()

    def _leave(self, kind: str) -> tuple[str, ...]:
        if self._within is None:
            return ("unshare", *_LEAVE[kind])
        return (*self._within.entrance, "unshare", "--net")

    def _has_come_about(self) -> bool:
        assert self._holder is not None
        outside = {os.readlink(f"/proc/{pid}/ns/net") for pid in ("self", self._within.pid if self._within else "self")}
        deadline = time.monotonic() + _READY_SECONDS
        while self._holder.poll() is None and time.monotonic() < deadline:
            try:
                if os.readlink(f"/proc/{self._holder.pid}/ns/net") not in outside:
                    return True
            except OSError:
                return False
            time.sleep(0.005)
        return False

    def _is_up(self) -> bool:
        command = [*self.entrance, "ip", "link", "set", "lo", "up"]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0

    def _close(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
            assert self._holder.stdin is not None
            self._holder.stdin.close()
            self._holder = None
