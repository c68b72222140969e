"""The middle of the internet, which carries packets from one machine to another over both of their lines."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from internet.line import LineKind, Way
from internet.packets import Endpoint, is_readable, packed, receiver_address
from internet.router import HomeRouter

LAN_SECONDS = 0.0003
Deliver = Callable[[str, bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """One line, and the machines that share it.

    Attributes:
        address: its public address.
        machines: per machine, its own address: the public one if there is no router, else one of the LAN.
        has_router: whether a home router stands between the line and the machines.
        hairpins: whether that router turns packets to its public address back inside.
        forwarded: per public TCP port of the router, the machine and its port.
        is_carrier: whether the router is a telephone company's: its machines are homes that do not reach each other.
    """

    address: str
    line: LineKind
    machines: dict[str, str]
    has_router: bool = False
    hairpins: bool = True
    forwarded: dict[int, tuple[str, int]] = field(default_factory=dict)
    is_carrier: bool = False


class _Site:
    def __init__(self, plan: SitePlan, random: Random) -> None:
        self.plan = plan
        self.up, self.down = Way(plan.line, plan.line.up_bits, random), Way(plan.line, plan.line.down_bits, random)
        self.inside = {packed(address): name for name, address in plan.machines.items()}
        forwarded: dict[int, Endpoint] = {
            public: (packed(plan.machines[name]), port) for public, (name, port) in plan.forwarded.items()
        }
        self.router = (
            HomeRouter(packed(plan.address), hairpins=plan.hairpins, forwarded=forwarded, random=random)
            if plan.has_router
            else None
        )

    @property
    def address(self) -> bytes:
        return self.router.address if self.router is not None else packed(self.plan.address)


class Middle:
    """All sites, and the packets under way between them. A state machine without I/O.

    Args:
        deliver: called with a machine and each packet that reaches it.
    """

    def __init__(self, plans: dict[str, SitePlan], deliver: Deliver, random: Random) -> None:
        self.sites = {name: _Site(plan, random) for name, plan in plans.items()}
        self._site_of = {machine: site for site in self.sites.values() for machine in site.plan.machines}
        self._by_address = {site.address: site for site in self.sites.values()}
        self._deliver = deliver
        self._under_way: list[tuple[float, int, Callable[[bytes, float], None], bytes]] = []
        self._order = itertools.count()

    def send(self, machine: str, packet: bytes, now: float) -> None:
        """Take a packet from a machine."""
        if not is_readable(packet):
            return
        site, to = self._site_of[machine], receiver_address(packet)
        if site.router is None:
            self._go_out(site, packet, now)
        elif to in site.inside:
            if not site.plan.is_carrier:
                self._arrive(site, packet, now + LAN_SECONDS)
        elif to == site.address:
            back = site.router.turn_back(packet, now)
            if back is not None:
                self._arrive(site, back, now + LAN_SECONDS)
        else:
            self._go_out(site, site.router.outbound(packet, now), now)

    def next_time(self) -> float | None:
        """Return when the next packet moves on; None if none is under way."""
        return self._under_way[0][0] if self._under_way else None

    def move_on(self, now: float) -> float:
        """Move on all packets that are due; return by how many seconds the latest of them was late."""
        late = 0.0
        while self._under_way and self._under_way[0][0] <= now:
            at, _, step, packet = heapq.heappop(self._under_way)
            late = max(late, now - at)
            step(packet, at)
        return late

    def readdress(self, name: str, address: str) -> None:
        """Restart a site's router, with another public address."""
        site = self.sites[name]
        assert site.router is not None, "only a router changes its address"
        del self._by_address[site.address]
        site.router.restart(packed(address))
        self._by_address[site.address] = site

    def _go_out(self, site: _Site, packet: bytes, now: float) -> None:
        at = site.up.carry(len(packet), now)
        if at is not None:
            self._later(at, self._pass_on, packet)

    def _pass_on(self, packet: bytes, now: float) -> None:
        site = self._by_address.get(receiver_address(packet))
        at = site.down.carry(len(packet), now) if site is not None else None
        if site is not None and at is not None:
            self._later(at, lambda packet, now: self._come_in(site, packet, now), packet)

    def _come_in(self, site: _Site, packet: bytes, now: float) -> None:
        inside = packet if site.router is None else site.router.inbound(packet, now)
        if inside is not None:
            self._hand_over(site, inside, now)

    def _arrive(self, site: _Site, packet: bytes, at: float) -> None:
        self._later(at, lambda packet, now: self._hand_over(site, packet, now), packet)

    def _hand_over(self, site: _Site, packet: bytes, now: float) -> None:
        machine = site.inside.get(receiver_address(packet))
        if machine is not None:
            self._deliver(machine, packet)

    def _later(self, at: float, step: Callable[[bytes, float], None], packet: bytes) -> None:
        heapq.heappush(self._under_way, (at, next(self._order), step, packet))
