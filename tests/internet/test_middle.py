"""Lines delay, lose and queue packets, and routers let in what RFC 4787 says, as a pure machine."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from internet.line import QUEUE_SECONDS, LineKind, Way
from internet.middle import Middle, SitePlan
from internet.packets import TCP, packed, receiver_of, sender_of
from tests.internet.test_packets import made

LINE = LineKind(delay=0.1, up_bits=8e6, down_bits=80e6)
SERVER, HOME, SECOND_HOME = "45.10.0.1", "45.10.1.1", "45.10.2.1"
INSIDE, NEIGHBOUR = "192.168.1.2", "192.168.1.3"


class Net:
    """A server, and homes behind routers; remembers what arrived."""

    def __init__(self, **changes: object) -> None:
        self.arrived: list[tuple[str, bytes, float]] = []
        home = SitePlan(
            address=HOME, line=LINE, machines={"inside": INSIDE, "neighbour": NEIGHBOUR}, has_router=True,
            forwarded={31337: ("neighbour", 31337)},
        )  # fmt: skip
        plans = {
            "server": SitePlan(address=SERVER, line=LINE, machines={"server": SERVER}),
            "home": replace(home, **changes),  # type: ignore[arg-type]
            "other": SitePlan(address=SECOND_HOME, line=LINE, machines={"stranger": INSIDE}, has_router=True),
        }
        self.now = 0.0
        self.middle = Middle(plans, lambda machine, packet: self.arrived.append((machine, packet, self.now)), Random(1))

    def send(self, machine: str, sender: tuple[str, int], receiver: tuple[str, int]) -> list[tuple[str, bytes]]:
        """Send a packet, and return what arrives of it."""
        packet = made(TCP, (packed(sender[0]), sender[1]), (packed(receiver[0]), receiver[1]), b"hello")
        before = len(self.arrived)
        self.middle.send(machine, packet, self.now)
        while (due := self.middle.next_time()) is not None:
            self.now = due
            self.middle.move_on(due)
        return [(machine, packet) for machine, packet, _ in self.arrived[before:]]


def test_a_packet_takes_both_delays_and_the_time_of_its_bytes() -> None:
    net = Net()
    [(machine, packet)] = net.send("inside", (INSIDE, 4000), (SERVER, 31337))
    assert machine == "server"
    assert net.now == pytest.approx(2 * LINE.delay + 8 * len(packet) * (1 / LINE.up_bits + 1 / LINE.down_bits))


def test_an_answer_comes_in_only_from_where_the_machine_has_sent() -> None:
    net = Net()
    [(_, packet)] = net.send("inside", (INSIDE, 4000), (SERVER, 31337))
    outside = sender_of(packet)
    assert outside[0] == packed(HOME)
    [(machine, packet)] = net.send("server", (SERVER, 31337), (HOME, outside[1]))
    assert (machine, receiver_of(packet)) == ("inside", (packed(INSIDE), 4000))
    assert net.send("server", (SERVER, 31338), (HOME, outside[1])) == []
    assert net.send("stranger", (INSIDE, 31337), (HOME, outside[1])) == []


def test_one_port_inside_is_one_port_outside_for_all_receivers() -> None:
    net = Net()
    ports = {sender_of(net.send("inside", (INSIDE, 4000), (SERVER, port))[0][1]) for port in (1, 2, 3)}
    assert len(ports) == 1
    assert sender_of(net.send("neighbour", (NEIGHBOUR, 4000), (SERVER, 1))[0][1]) not in ports


def test_a_forwarded_port_lets_everybody_in() -> None:
    net = Net()
    [(machine, packet)] = net.send("stranger", (INSIDE, 9), (HOME, 31337))
    assert (machine, receiver_of(packet)) == ("neighbour", (packed(NEIGHBOUR), 31337))


@pytest.mark.parametrize("hairpins", [True, False])
def test_the_public_address_works_from_inside_only_with_hairpin(hairpins: bool) -> None:
    net = Net(hairpins=hairpins)
    found = net.send("inside", (INSIDE, 9), (HOME, 31337))
    assert [machine for machine, _ in found] == (["neighbour"] if hairpins else [])
    assert all(sender_of(packet)[0] == packed(HOME) for _, packet in found)


def test_neighbours_reach_each_other_directly_but_not_behind_a_telephone_company() -> None:
    assert [machine for machine, _ in Net().send("inside", (INSIDE, 9), (NEIGHBOUR, 1))] == ["neighbour"]
    assert Net(is_carrier=True).send("inside", (INSIDE, 9), (NEIGHBOUR, 1)) == []


def test_after_a_restart_of_the_router_old_answers_are_lost_and_ports_are_new() -> None:
    net = Net()
    [(_, packet)] = net.send("inside", (INSIDE, 4000), (SERVER, 1))
    before = sender_of(packet)
    net.middle.readdress("home", "45.10.9.9")
    assert net.send("server", (SERVER, 1), (HOME, before[1])) == []
    [(_, packet)] = net.send("inside", (INSIDE, 4000), (SERVER, 1))
    assert sender_of(packet)[0] == packed("45.10.9.9")
    assert sender_of(packet)[1] != before[1]
    assert net.send("server", (SERVER, 1), ("45.10.9.9", sender_of(packet)[1]))


def test_a_cut_line_carries_nothing() -> None:
    net = Net()
    net.middle.sites["home"].up.is_cut = True
    assert net.send("inside", (INSIDE, 1), (SERVER, 1)) == []


def test_a_queue_holds_what_its_time_allows_and_keeps_the_order() -> None:
    kind = LineKind(delay=0.05, up_bits=8e6, down_bits=8e6, jitter=0.05)
    way = Way(kind, kind.up_bits, Random(3))
    arrivals = [at for _ in range(2000) if (at := way.carry(1000, 0.0)) is not None]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == pytest.approx(QUEUE_SECONDS / 0.001, abs=2)
    assert way.num_overflowed == 2000 - len(arrivals)


def test_a_line_loses_its_share() -> None:
    kind = LineKind(delay=0.0, up_bits=1e9, down_bits=1e9, loss=0.02)
    way = Way(kind, kind.up_bits, Random(3))
    assert sum(way.carry(100, float(n)) is None for n in range(20_000)) == pytest.approx(400, abs=80)
