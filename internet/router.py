"""A home router: one public address for all machines behind it.

A machine that sends from a port gets a port outside, the same for all receivers (endpoint-independent mapping in RFC
4787). What comes back is let in only from addresses and ports that the machine has sent to (address and port-dependent
filtering), or to a port that is forwarded. A packet from inside to the router's own public address is turned back
inside if the router can do that (hairpinning), otherwise it is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from internet.packets import TCP, Endpoint, protocol_of, readdressed, receiver_of, sender_of

_Inside = tuple[int, bytes, int]
IDLE_SECONDS = {True: 7200.0, False: 120.0}
"""Time without packets after which a remote address is no longer let in, for TCP and for UDP."""
FIRST_PORT, LAST_PORT = 20_000, 60_000


class HomeRouter:
    """The table of a router. A state machine without I/O.

    Args:
        address: its public address.
        hairpins: whether machines inside reach each other at the public address.
        forwarded: per public TCP port, the machine inside to which it leads, and its port.
    """

    def __init__(
        self, address: bytes, *, hairpins: bool = True, forwarded: Mapping[int, Endpoint] | None = None, random: Random
    ) -> None:
        self.address = address
        self.hairpins = hairpins
        self._forwarded = dict(forwarded or {})
        self._random = random
        self._outside: dict[_Inside, int] = {}
        self._inside: dict[tuple[int, int], Endpoint] = {}
        self._sent_to: dict[tuple[int, int], dict[Endpoint, float]] = {}
        self._keeps_ports = True
        self.num_refused = 0

    def restart(self, address: bytes | None = None) -> None:
        """Forget all that was sent, and choose other ports from now on; perhaps with another public address."""
        self.address = self.address if address is None else address
        self._outside, self._inside, self._sent_to = {}, {}, {}
        self._keeps_ports = False

    def outbound(self, packet: bytes, now: float) -> bytes:
        """Return a packet from inside as it leaves, and remember to whom it goes."""
        protocol, (address, port) = protocol_of(packet), sender_of(packet)
        outside = self._port_of(protocol, address, port)
        self._sent_to.setdefault((protocol, outside), {})[receiver_of(packet)] = now
        return readdressed(packet, sender=(self.address, outside))

    def inbound(self, packet: bytes, now: float) -> bytes | None:
        """Return a packet from outside as it goes on inside; None if it is not let in."""
        protocol, sender, (_, port) = protocol_of(packet), sender_of(packet), receiver_of(packet)
        if protocol == TCP and port in self._forwarded:
            return readdressed(packet, receiver=self._forwarded[port])
        inside, sent_to = self._inside.get((protocol, port)), self._sent_to.get((protocol, port), {})
        if inside is None or now - sent_to.get(sender, -IDLE_SECONDS[True]) >= IDLE_SECONDS[protocol == TCP]:
            self.num_refused += 1
            return None
        sent_to[sender] = now
        return readdressed(packet, receiver=inside)

    def turn_back(self, packet: bytes, now: float) -> bytes | None:
        """Return a packet from inside to the public address as it goes on inside; None if it is lost."""
        return self.inbound(self.outbound(packet, now), now) if self.hairpins else None

    def _port_of(self, protocol: int, address: bytes, port: int) -> int:
        known = self._outside.get((protocol, address, port))
        if known is not None:
            return known
        for public, inside in self._forwarded.items():
            if protocol == TCP and inside == (address, port):
                outside = public
                break
        else:
            outside = port if self._keeps_ports else self._random.randrange(FIRST_PORT, LAST_PORT)
            while (protocol, outside) in self._inside or outside in self._forwarded:
                outside = self._random.randrange(FIRST_PORT, LAST_PORT)
        self._outside[protocol, address, port] = outside
        self._inside[protocol, outside] = (address, port)
        return outside
