"""The process that carries the packets: it reads them from the machines' TUN devices and writes them to others'.

`python -m internet.carrier FILE` reads the sites and the devices' descriptors from a JSON file, obeys one JSON command
for each line of its input, and ends with that input. To `look` it answers with what it has carried.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from internet.line import LineKind
from internet.middle import Middle, SitePlan

MOST_AT_ONCE = 32
MOST_PACKET_BYTES = 65_535
NICENESS = -15
LATE_SECONDS = 0.005
"""A packet that moves on later than this is counted: the machine was too busy to carry it in time."""


class Carrier:
    """Moves packets between the devices and the middle."""

    def __init__(self, plans: dict[str, SitePlan], devices: dict[str, int], seed: int) -> None:
        self._devices = devices
        self._machines = {device: machine for machine, device in devices.items()}
        self.middle = Middle(plans, self._write, Random(seed))
        self.num_late = self.num_moves = 0
        self.latest = 0.0

    def run(self, commands: int) -> None:
        """Carry packets until `commands`, a descriptor, is at its end."""
        unread = b""
        while True:
            ready, _, _ = select.select([commands, *self._machines], [], [], self._pause())
            for device in ready:
                if device != commands:
                    self._read(device)
                    continue
                some = os.read(commands, MOST_PACKET_BYTES)
                if not some:
                    return
                *lines, unread = (unread + some).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            late = self.middle.move_on(time.monotonic())
            self.num_moves += 1
            self.num_late += late > LATE_SECONDS
            self.latest = max(self.latest, late)

    def _pause(self) -> float | None:
        due = self.middle.next_time()
        return None if due is None else max(due - time.monotonic(), 0.0)

    def _read(self, device: int) -> None:
        machine = self._machines[device]
        for _ in range(MOST_AT_ONCE):
            try:
                packet = os.read(device, MOST_PACKET_BYTES)
            except BlockingIOError:
                return
            self.middle.send(machine, packet, time.monotonic())

    def _write(self, machine: str, packet: bytes) -> None:
        with suppress(OSError):  # a full device loses packets, as any does
            os.write(self._devices[machine], packet)

    def _obey(self, command: dict[str, Any]) -> None:
        if command.get("look"):
            print(json.dumps(self.told()), flush=True)
            return
        site = self.middle.sites[command["site"]]
        for way in (site.up, site.down):
            way.is_cut = command.get("is_cut", way.is_cut)
            way.extra_loss = command.get("loss", way.extra_loss)
        if "address" in command:
            self.middle.readdress(command["site"], command["address"])
        elif command.get("restart") and site.router is not None:
            site.router.restart()

    def told(self) -> dict[str, Any]:
        """Return what was carried, by site."""
        return {
            "late_share": self.num_late / max(self.num_moves, 1),
            "latest_seconds": self.latest,
            "sites": {
                name: {
                    way: {
                        "bytes": each.num_bytes,
                        "packets": each.num_packets,
                        "lost": each.num_lost,
                        "overflowed": each.num_overflowed,
                    }
                    for way, each in (("up", site.up), ("down", site.down))
                }
                for name, site in self.middle.sites.items()
            },
        }


def site_plan(document: dict[str, Any]) -> SitePlan:
    """Return a site from its JSON document."""
    forwarded = {int(port): (name, inner) for port, (name, inner) in document["forwarded"].items()}
    return SitePlan(**{**document, "line": LineKind(**document["line"]), "forwarded": forwarded})


def main(path: str) -> None:
    """Carry packets for the sites in a file."""
    with suppress(PermissionError):
        os.nice(NICENESS)
    plan = json.loads(Path(path).read_text())
    for device in plan["devices"].values():
        os.set_blocking(device, False)
    sites = {name: site_plan(site) for name, site in plan["sites"].items()}
    carrier = Carrier(sites, plan["devices"], plan["seed"])
    carrier.run(sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1])
