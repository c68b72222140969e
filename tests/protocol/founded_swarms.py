"""Swarms that have been founded, and what must become true of them."""

from __future__ import annotations

from fake_run import MINUTE, run_rules
from swarm_driver import Swarm


def is_dialable(who: str, place: int) -> bool:
    if who == "half":
        return place % 2 == 0
    if who == "two of three":
        return place % 3 != 2
    return who == "all" or (who == "one" and place == 0)


def founded(num_peers: int, who: str = "all", *, bootstrap: bool = True, seed: int = 0, group_size: int = 16) -> Swarm:
    """A swarm in which all peers are members and hold the same bytes; peers join one by one."""
    swarm = Swarm(seed=seed, rules=run_rules(group_size=group_size))
    if bootstrap:
        swarm.add("boot", trains=False, found=True)
    for place in range(num_peers):
        swarm.add(f"p{place}", dialable=is_dialable(who, place), found=not bootstrap and place == 0)
        swarm.run(3.0)
    swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), 3 * MINUTE)
    return swarm


def goes_on(swarm: Swarm, name: str = "p0") -> None:
    height = swarm.height(name)
    swarm.run_until(lambda: swarm.height(name) >= height + 10, 2 * MINUTE)
    assert swarm.included_once()


def recovers(swarm: Swarm, within: float) -> float:
    seconds = swarm.run_until(lambda: swarm.all_members() and swarm.agreed(), within)
    goes_on(swarm)
    return seconds
