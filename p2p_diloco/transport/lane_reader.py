"""Read one stream of a link, frame by frame, no faster than the bandwidth cap and the lane's limit allow.

Unread bytes stay in the daemon, then in TCP, then at the sender: this is the only back-pressure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2p_diloco.ids import PeerId
from p2p_diloco.transport.framing import read_frame
from p2p_diloco.transport.link import FRAME_PREFIX_BYTES, Lane, TransportLimits
from p2p_diloco.transport.pace import Pace
from p2p_diloco.transport.rate_limit import WIRE_BYTES_PER_FRAME, TokenBucket
from p2p_diloco.transport.stream_link import LaneStream

CONTROL_BURST_SECONDS = 8.0
MOST_CONTROL_SHARE = 0.25
"""Maximum share of a download cap for the control frames of one peer; more would leave too little for the others."""


class LaneReader:
    """The reader of one stream.

    Args:
        pace: bandwidth cap, if there is one: bulk frames wait for it, control frames are only counted.
        was_read: called with the total bytes of bulk frames that the sender acknowledges.
    """

    def __init__(
        self,
        sender: PeerId,
        stream: LaneStream,
        *,
        limits: TransportLimits,
        pace: Pace | None,
        was_read: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self._sender, self._stream, self._limits, self._pace = sender, stream, limits, pace
        self._was_read = was_read
        rate, cap = limits.control_bytes_per_second, limits.download_bytes_per_second
        if cap is not None:
            rate = min(rate, MOST_CONTROL_SHARE * cap)
        self._control = TokenBucket(per_second=rate, burst=CONTROL_BURST_SECONDS * rate)

    async def next_frame(self) -> bytes | bytearray | memoryview | None:
        """Return the next frame, or None at the end of the stream; see `read_frame` for the errors."""
        is_bulk = self._stream.lane is Lane.BULK
        while True:
            frame = await read_frame(
                self._stream.reader,
                sender=self._sender,
                lane=self._stream.lane,
                limits=self._limits,
                pace=self._pace if is_bulk else None,
            )
            if isinstance(frame, int):
                self._was_read(frame)
                await self._slow_down(WIRE_BYTES_PER_FRAME)
                continue
            if frame is not None and not is_bulk:
                await self._slow_down(len(frame) + FRAME_PREFIX_BYTES)
            return frame

    async def _slow_down(self, num_bytes: int) -> None:
        """Count a control frame; wait only if the sender floods this lane."""
        if self._pace is not None:
            self._pace.count(num_bytes)
        now = asyncio.get_running_loop().time()
        at = self._control.spend(num_bytes, now)
        if at > now:
            await asyncio.sleep(at - now)
