"""The lab's trace, for frames: what arrived, and where an error came from."""

from __future__ import annotations

import traceback

from p2p_diloco.errors import FrameError
from p2p_diloco.lab.trace import LINES_KEPT, describe
from p2p_diloco.lab.trace import Trace as LabTrace
from p2p_diloco.protocol.heartbeat import Heartbeat
from p2p_diloco.protocol.messages import Message, Ping, Pong, decode_message

__all__ = ["LINES_KEPT", "Trace", "describe"]


class Trace(LabTrace):
    """The last lines of a simulation, each with its second, its machine and a word for what happened."""

    def frame(self, now: float, sender: bytes, to: bytes, frame: bytes) -> None:
        """Write a line about a message that arrives; heartbeats and pings would drown all others."""
        whom, who = self.names.get(to, "?"), self.names.get(sender, "?")
        try:
            message: Message = decode_message(frame)
        except FrameError as error:
            self.add(now, whom, "from", f"{who}: a bad frame: {error}")
            return
        if not isinstance(message, Heartbeat | Ping | Pong):
            self.add(now, whom, "from", f"{who}: {describe(message, self.names)}")

    def error(self, now: float, error: BaseException) -> None:
        """Write down where an error came from."""
        for line in traceback.format_exception(error):
            self.add(now, "", "error", line.rstrip())
