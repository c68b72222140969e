"""The scenes: who stands where, on which line, and behind which router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from internet.line import LineKind
from internet.middle import SitePlan

BOOTSTRAP = "bootstrap"
BOOTSTRAP_PORT, SECOND_PORT = 31337, 31338
MBIT = 1e6
DATA_CENTRE = LineKind(delay=0.001, up_bits=1000 * MBIT, down_bits=1000 * MBIT)
NEAR = LineKind(delay=0.001, up_bits=100 * MBIT, down_bits=100 * MBIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A process that trains: on which machine, and the port that it is given if README says so."""

    machine: str
    port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One bootstrap peer and several trainers on an internet.

    Attributes:
        told: one line about it.
        sites: per site, its line and machines.
        bootstrap: the machine of the bootstrap peer.
        trainers: by name, in the order in which they start.
        uplink: the slowest upload rate, as the organiser would say it.
    """

    told: str
    sites: dict[str, SitePlan]
    trainers: dict[str, Trainer]
    uplink: str
    bootstrap: str = BOOTSTRAP
    bootstrap_address: str = "45.10.0.1"


def _public(address: str, line: LineKind, machine: str) -> SitePlan:
    return SitePlan(address=address, line=line, machines={machine: address})


def _home(number: int, line: LineKind, machine: str) -> SitePlan:
    """Return a home with one machine behind a router."""
    return SitePlan(address=f"45.10.{number}.1", line=line, machines={machine: "192.168.1.2"}, has_router=True)


def _volunteers(told: str, lines: list[LineKind], uplink: str, *, num_public: int = 1) -> Scene:
    """Return a bootstrap peer in a data centre, and a volunteer for each line; the first ones have no router."""
    sites = {BOOTSTRAP: _public("45.10.0.1", DATA_CENTRE, BOOTSTRAP)}
    for number, line in enumerate(lines, start=1):
        name = f"home-{number}"
        is_public = number <= num_public
        sites[name] = _public(f"45.10.{number}.1", line, name) if is_public else _home(number, line, name)
    trainers = {f"home-{number}": Trainer(machine=f"home-{number}") for number in range(1, len(lines) + 1)}
    return Scene(told=told, sites=sites, trainers=trainers, uplink=uplink)


def _line(delay_ms: float, up: float, down: float, *, loss: float = 0.0, jitter_ms: float = 0.0) -> LineKind:
    return LineKind(
        delay=delay_ms / 1000.0, up_bits=up * MBIT, down_bits=down * MBIT, loss=loss, jitter=jitter_ms / 1000.0
    )


def _near() -> Scene:
    return _volunteers("lines of 1 ms, 100 Mbit/s, no routers", [NEAR] * 4, "100mbit", num_public=4)


def _good() -> Scene:
    lines = [_line(delay, 50, 200) for delay in (10, 12, 15, 20)]
    return _volunteers("lines of 10 to 20 ms, 50 Mbit/s up", lines, "50mbit")


def _mixed() -> Scene:
    lines = [
        _line(15, 50, 200),
        _line(40, 20, 100, loss=0.0005),
        _line(75, 20, 100, loss=0.001),
        _line(100, 10, 50, loss=0.002),
    ]
    return _volunteers("lines of 15 to 100 ms, 50 to 10 Mbit/s up, 0 to 0.2 % loss", lines, "10mbit")


def _far() -> Scene:
    lines = [_line(delay, 100, 200) for delay in (100, 105, 110, 120)]
    return _volunteers("lines of 100 to 120 ms, 100 Mbit/s up", lines, "100mbit")


def _bad() -> Scene:
    lines = [
        _line(100, 10, 50, loss=0.01, jitter_ms=50),
        _line(130, 8, 40, loss=0.012, jitter_ms=50),
        _line(160, 6, 30, loss=0.015, jitter_ms=50),
        _line(200, 5, 25, loss=0.02, jitter_ms=50),
    ]
    return _volunteers("lines of 100 to 200 ms, jitter 50 ms, 1 to 2 % loss, 10 to 5 Mbit/s up", lines, "5mbit")


def _one_lan(*, hairpins: bool) -> Scene:
    """Return a bootstrap and two trainers on one LAN, its port forwarded, and two friends behind their own routers."""
    home = SitePlan(
        address="45.10.0.1", line=_line(15, 20, 100), has_router=True, hairpins=hairpins,
        machines={BOOTSTRAP: "192.168.1.10", "lan-1": "192.168.1.11", "lan-2": "192.168.1.12"},
        forwarded={BOOTSTRAP_PORT: (BOOTSTRAP, BOOTSTRAP_PORT)},
    )  # fmt: skip
    friends = {f"friend-{n}": _home(n, _line(20 * n, 20, 100), f"friend-{n}") for n in (1, 2)}
    names = ["lan-1", "lan-2", "friend-1", "friend-2"]
    return Scene(
        told=f"bootstrap and two trainers on one LAN, two friends outside; {_how(hairpins)}",
        sites={"home": home, **friends},
        trainers={name: Trainer(machine=name) for name in names},
        uplink="20mbit",
    )


def _both_homes(*, hairpins: bool) -> Scene:
    """Return the two machines of README: A with a bootstrap and a trainer, and B, both behind routers."""
    home = SitePlan(
        address="45.10.0.1", line=_line(15, 20, 100), machines={BOOTSTRAP: "192.168.1.10"}, has_router=True,
        hairpins=hairpins, forwarded={BOOTSTRAP_PORT: (BOOTSTRAP, BOOTSTRAP_PORT)},
    )  # fmt: skip
    return Scene(
        told=f"A runs bootstrap and a trainer, B a trainer, each behind a router; {_how(hairpins)}",
        sites={"home": home, "friend": _home(1, _line(25, 20, 100), "b")},
        trainers={"a": Trainer(machine=BOOTSTRAP, port=SECOND_PORT), "b": Trainer(machine="b")},
        uplink="20mbit",
    )


def _carrier_nat() -> Scene:
    """Return eight volunteers, of whom six are behind one telephone company's router."""
    names = [f"mobile-{number}" for number in range(1, 7)]
    others = _volunteers("", [_line(15, 50, 200), _line(40, 20, 100)], "20mbit")
    mobiles = SitePlan(
        address="45.10.9.1", line=_line(40, 100, 300, loss=0.001), has_router=True, hairpins=False, is_carrier=True,
        machines={name: f"100.64.0.{number}" for number, name in enumerate(names, start=2)},
    )  # fmt: skip
    return Scene(
        told="eight volunteers, six of them behind one telephone company's router",
        sites={**others.sites, "carrier": mobiles},
        trainers={**others.trainers, **{name: Trainer(machine=name) for name in names}},
        uplink="10mbit",
    )


def _how(hairpins: bool) -> str:
    return "a router with hairpin" if hairpins else "a router without hairpin"


SCENES: dict[str, Callable[[], Scene]] = {
    "near": _near,
    "good": _good,
    "mixed": _mixed,
    "far": _far,
    "bad": _bad,
    "one-lan": lambda: _one_lan(hairpins=False),
    "one-lan-hairpin": lambda: _one_lan(hairpins=True),
    "both-homes": lambda: _both_homes(hairpins=False),
    "both-homes-hairpin": lambda: _both_homes(hairpins=True),
    "carrier-nat": _carrier_nat,
}
